"""vLLM's model classes of a build for GPUs, where there is none: chosen and made as on a CPU.

Only what loads scales is run. What computes is compiled for a GPU, and stands as a name.
"""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

# what layers of activations ask for when they are made
OPERATIONS = ("gelu_new", "gelu_fast", "gelu_quick", "gelu_tanh", "relu_squared", "silu_and_mul")

ABSENT = ("cutlass", "cuda", "quack")


def install() -> dict[str, Any]:
    """Make a vLLM that was built for GPUs serve on the CPU, with the options that it returns.

    One that was built for CPUs stays as it is.
    """
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    if vllm.platforms.current_platform.is_cpu():
        return {}
    sys.meta_path.append(Absent())
    torch.cuda.Stream = torch.cuda.Event = MagicMock()
    torch.cpu._is_amx_tile_supported = lambda: True  # without it hybrid models of latents are refused
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # as on a GPU; a few models need it
    vllm.platforms._current_platform = CpuPlatform()
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.v1.attention.backends import cpu_attn

    theirs = CpuPlatform.get_attn_backend_cls.__func__

    def choose(cls: type, selected_backend: Any, attn_selector_config: Any, **more: Any) -> str:
        # on a CPU alone latents are kept in 16 bits from 0.33 on, and sparse attention is refused
        if attn_selector_config.use_mla:
            attn_selector_config = attn_selector_config._replace(kv_cache_dtype="auto", use_sparse=False)
        return theirs(cls, selected_backend, attn_selector_config, **more)

    CpuPlatform.get_attn_backend_cls = classmethod(choose)
    accept(cpu_attn.CPUAttentionBackendImpl, "chunk_lookback", "use_alibi_sqrt")
    accept(mla_attention.MLACommonImpl, "topk_indices_buffer", "index_group_builder")
    cpu_attn.CPUAttentionBackend.supports_alibi_sqrt = classmethod(lambda cls: True)
    for name in OPERATIONS:
        if not hasattr(torch.ops._C, name):
            setattr(torch.ops._C, name, MagicMock(name=name))
    return {"enable_prefix_caching": True}  # as on a GPU; on a CPU hybrid models cannot be made without


def accept(kind: type, *names: str) -> None:
    """Let a CPU's attention take these arguments, which only a GPU's has."""
    make = kind.__init__

    def ignore(self: Any, *values: Any, **named: Any) -> None:
        make(self, *values, **{name: value for name, value in named.items() if name not in names})

    kind.__init__ = ignore


class Absent(MetaPathFinder, Loader):
    """Names of what is compiled for a GPU, where it is not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return MagicMock(name=spec.name, __path__=[], __spec__=spec)

    def exec_module(self, module: ModuleType) -> None:
        pass
