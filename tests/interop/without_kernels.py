"""vLLM's loader where this machine has no kernel for quantised weights: its classes, no kernels.

The layers make their parameters, load them, and make attention ready to serve. No kernel is
chosen, and no matrix made ready for one.
"""

import re
import sys
from unittest.mock import MagicMock

import torch
from vllm_process import set_environment

_CHOOSES = re.compile(r"(?:init|choose)_\w+_linear_kernel")
_LAYERS = "vllm.model_executor.layers.quantization"


def install() -> None:
    """Replace what chooses kernels, and what makes weights ready for them."""
    set_environment()
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.model_loader import base_loader

    get_quantization_config("fp8")  # which imports them all
    kernel = MagicMock(__name__="none")
    for module in [module for name, module in sys.modules.items() if name.startswith(_LAYERS)]:
        for name in filter(_CHOOSES.fullmatch, dir(module)):
            setattr(module, name, lambda *_, **__: kernel)
    base_loader.process_weights_after_loading = _make_attention_ready


def _make_attention_ready(model: torch.nn.Module, *_: object) -> None:
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    for layer in model.modules():
        if isinstance(layer, Attention):
            if isinstance(method := getattr(layer, "quant_method", None), BaseKVCacheMethod):
                method.process_weights_after_loading(layer)
            layer.process_weights_after_loading(torch.bfloat16)
