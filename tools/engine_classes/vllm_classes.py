"""What vLLM's model classes do with KV scales: see engine_tables.py.

Each class is built as vLLM's loader does it, on the CPU and without weights; then its own
`load_weights` gets the scales, and its attention layers are made ready to serve.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import no_pictures  # noqa: F401 (before vLLM)
import plain_configs
import torch
from engine_cases import Quantization, fixtures, write
from engine_fates import NOT_FP8, Held, Pair, Scale
from engine_tables import main
from torch import nn
from vllm_process import OPTIONS, join_group, set_environment

set_environment()
os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"

import vllm  # noqa: E402
import without_gpu  # noqa: E402

BUILD_OPTIONS = without_gpu.install()  # what vLLM serves on, its modules ask when they are imported

from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.layers.attention import Attention, MLAAttention  # noqa: E402
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.transformers_utils.config import _CONFIG_REGISTRY  # noqa: E402
from vllm.triton_utils import triton  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402

triton.set_allocator = lambda *_: None  # which a Triton without a backend lacks
# a class is looked at in this process, not in one of its own: seconds for each
registry._run_in_subprocess = lambda function: function()


class VLLM:
    """vLLM, for engine_tables.py."""

    name = "vLLM"
    version = vllm.__version__.partition("+")[0]
    quantizations = (
        "compressed-tensors",
        "compressed-tensors attn_head",
        "modelopt",
        "fp8",
        "quark",
    )
    of_latents = ("modelopt transformers",)

    def __init__(self) -> None:
        (experts,) = fixtures(["MixtralForCausalLM"])
        with TemporaryDirectory() as scratch:
            config = config_of(write(experts, Quantization(None), Path(scratch)))
        with set_current_vllm_config(config):
            join_group(1, 0)  # with the groups of a model that has experts

    def build(self, directory: Path, **options: Any) -> "Built":
        config = config_of(directory, **options)
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            model = Built(config, initialize_model(config))
        self.hold(model, [])  # a class that needs weights beside scales says nothing about scales here
        return model

    def caches_latents(self, model: "Built") -> bool:
        return any(is_latent(layer) for layer in model.layers.values())

    def heads(self, model: "Built") -> int:
        return next(iter(model.layers.values())).num_kv_heads

    def hold(self, model: "Built", tensors: list[tuple[str, torch.Tensor]]) -> Held:
        """What the layers compute with after loading scales, [1] or [K, 1, 1], into the model as built."""
        with set_current_vllm_config(model.config), model.restored():
            model.model.load_weights(iter(tensors))
            return {name: held_by(layer) for name, layer in model.layers.items()}


def config_of(directory: Path, **options: Any) -> Any:
    """What vLLM makes of the JSON files, for an FP8 cache."""
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    if model_type not in _CONFIG_REGISTRY:
        plain_configs.register(model_type)
    args = EngineArgs(model=str(directory), kv_cache_dtype="fp8", **OPTIONS, **BUILD_OPTIONS, **options)
    return args.create_engine_config()


class Built:
    """A model, and what its attention layers were before anything was loaded."""

    def __init__(self, config: Any, model: nn.Module) -> None:
        self.config = config
        self.model = model
        modules = model.named_modules()
        self.layers = {name: module for name, module in modules if caches(module)}
        if not self.layers:
            raise ValueError("no attention layer of vLLM's that caches K and V")

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Undo what happens to the attention layers within."""
        before = {name: state_of(layer) for name, layer in self.layers.items()}
        try:
            yield
        finally:
            for name, layer in self.layers.items():
                restore(layer, *before[name])


def caches(module: nn.Module) -> bool:
    """Whether the layer keeps K and V of a decoder."""
    if is_latent(module):
        return True
    return isinstance(module, Attention) and module.attn_type == "decoder"


def is_latent(module: nn.Module) -> bool:
    """Whether the layer keeps latents, in vLLM's class for all models or in a model's own."""
    return isinstance(module, MLAAttention) or type(module).__name__ == "MultiHeadLatentAttention"


def state_of(layer: nn.Module) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The attributes of a layer, and copies of its tensors, of any shape."""
    kept = {name: dict(v) if isinstance(v, dict) else v for name, v in vars(layer).items()}
    return kept, {name: tensor.clone() for name, tensor in tensors_of(kept)}


def restore(layer: nn.Module, kept: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Put attributes and tensors, of any shape, back."""
    vars(layer).clear()
    vars(layer).update(kept)
    for name, tensor in tensors_of(kept):
        tensor.copy_(tensors[name])


def tensors_of(kept: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, of any shape, among a layer's attributes, buffers and parameters."""
    for name, value in {**kept, **kept["_buffers"], **kept["_parameters"]}.items():
        if isinstance(value, torch.Tensor):
            yield name, value.data


def held_by(layer: nn.Module) -> Pair | None:
    """The scales in force once the layer is ready to serve."""
    has_place = hasattr(layer, "k_scale")
    method = getattr(layer, "quant_method", None)
    if isinstance(method, BaseKVCacheMethod):
        method.process_weights_after_loading(layer)
    if isinstance(layer, Attention):
        layer.process_weights_after_loading(torch.bfloat16)
    if not has_place:
        return None
    if not layer.kv_cache_dtype.startswith("fp8"):
        return NOT_FP8
    return values(layer._k_scale), values(layer._v_scale)


def values(scale: torch.Tensor) -> Scale:
    """The numbers in a scale of any shape."""
    return tuple(scale.flatten().tolist())


if __name__ == "__main__":
    with torch.no_grad():
        main(VLLM())
