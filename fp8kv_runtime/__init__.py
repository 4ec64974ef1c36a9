"""FP8 paged-attention runtime: the number format, the cache, the kernels, the bridge.

Names that need Triton or transformers resolve on first use.
"""

from importlib import import_module
from typing import Any

from fp8kv_runtime.cache import OutOfBlocksError, PagedKVCache, PagedSequences
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.fp8 import FP8_DTYPES, dequantize, fp8_max, quantize, scale_from_amax
from fp8kv_runtime.options import AttentionOptions
from fp8kv_runtime.storage import KVBlocks

_HOMES = {
    "append_kv": "fp8kv_runtime.kernels.append_kv",
    "decode_attention": "fp8kv_runtime.kernels.attention",
    "extend_attention": "fp8kv_runtime.kernels.attention",
    "fp8_attention": "fp8kv_runtime.hf",
    "paged_cache": "fp8kv_runtime.hf",
}

__all__ = [
    "FP8_DTYPES", "AttentionError", "AttentionOptions", "KVBlocks", "OutOfBlocksError", "PagedKVCache",
    "PagedSequences", "append_kv", "decode_attention", "dequantize", "extend_attention", "fp8_attention",
    "fp8_max", "paged_cache", "quantize", "scale_from_amax",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fp8kv_runtime' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)  # what completion shows
