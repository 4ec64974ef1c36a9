"""A model that computes with K and V as a cache would give them back."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from calib.caches.rounding import CacheRounding
from fp8kv_runtime.hf import EngineQuery, swap_attention

QKV = tuple[Tensor, Tensor, Tensor]


def rounded_attention(
    model: PreTrainedModel, rounding: Callable[[int, Tensor, Tensor, Tensor], QKV]
) -> AbstractContextManager[None]:
    """Inside the block attention gets what `rounding(layer_idx, query, key, value)` returns.

    transformers' own cache keeps K and V as they were, so every step rounds them anew. That is
    what a cache holds where a token's codes depend on that token alone.
    """

    def attend(
        original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
    ) -> Any:
        asked = EngineQuery.of(module, query, kw.get("scaling"))
        query, key, value = rounding(module.layer_idx, asked.query, key, value)
        return original(module, asked.undo(query), key, value, *args, **kw)

    return swap_attention(model, attend)


def beside_queries(rounding: CacheRounding) -> Callable[[int, Tensor, Tensor, Tensor], QKV]:
    """`rounding` for K and V, with queries as they are."""
    return lambda layer_idx, query, key, value: (query, *rounding(layer_idx, key, value))
