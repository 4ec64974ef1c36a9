"""The bridge to transformers: the one place of the runtime that imports it."""

from fp8kv_runtime.hf.attention import Backend, fp8_attention
from fp8kv_runtime.hf.layers import cache_argument, cache_of, new_cache, paged_cache, values_per_token
from fp8kv_runtime.hf.swap import EngineQuery, is_latent, swap_attention

__all__ = [
    "Backend", "EngineQuery", "cache_argument", "cache_of", "fp8_attention", "is_latent", "new_cache",
    "paged_cache", "swap_attention", "values_per_token",
]  # fmt: skip
