"""Rounding of K and V to the codes of a cache type and back, as engines compute it, in a model that runs."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.caches.blocks import bfloat16_k_pe, fp8_k_pe, fp8_tiles, nvfp4, nvfp4_four_over_six, nvfp4_latent
from calib.caches.per_token_head import (
    fp8_per_token_head,
    int4_per_token_head,
    int8_per_token_head,
    lmdeploy_int4,
    lmdeploy_int8,
)
from calib.errors import InputError
from fp8kv_runtime.fp8 import dequantize, quantize
from fp8kv_runtime.hf import EngineQuery, swap_attention

QKV = tuple[Tensor, Tensor, Tensor]
# layer, key [B, H, T, D], value [B, H, T, D] -> the K and V that attention computes with; of latents
# [B, 1, T, R] and k_pe [B, 1, T, P]
CacheRounding = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
# a tensor, the layer's scale, the dtype that the model is served in
_Codec = Callable[[Tensor, float, torch.dtype | None], Tensor]


def rounding(
    name: str, *, scales: Sequence[tuple[float, float]] | None = None, dtype: torch.dtype | None = None
) -> CacheRounding:
    """Return the rounding of the cache type called `name`, of CACHES or LATENT_CACHES.

    K and V keep their dtype, and are rounded to it once more than in the engine. Static types use
    `scales`, K's and V's of each layer, or 1.0, the engine's default. LMDeploy keeps its scales in
    the `dtype` that the model is served in: by default K's own, or float16 for float32.
    """
    if name not in _CODECS:
        raise InputError(f"cache '{name[:40]}' is not one of {', '.join(_CODECS)}")
    key_codec, value_codec = _CODECS[name]

    def rounded(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        k_scale, v_scale = scales[layer] if scales is not None else (1.0, 1.0)
        return key_codec(key, k_scale, dtype), value_codec(value, v_scale, dtype)

    return rounded


def rounded_attention(
    model: PreTrainedModel, rounding: Callable[[int, Tensor, Tensor, Tensor], QKV]
) -> AbstractContextManager[None]:
    """Give attention inside the block the result of `rounding(layer_idx, query, key, value)`.

    transformers' own cache keeps K and V as they were, so every step rounds them anew. A cache holds
    the same where a token's codes depend on that token alone.
    """

    def attend(
        original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
    ) -> Any:
        engine_query = EngineQuery.of(module, query, kw.get("scaling"))
        query, key, value = rounding(module.layer_idx, engine_query.query, key, value)
        return original(module, engine_query.undo(query), key, value, *args, **kw)

    return swap_attention(model, attend)


def beside_queries(rounding: CacheRounding) -> Callable[[int, Tensor, Tensor, Tensor], QKV]:
    """Extend `rounding` of K and V by queries, which stay as they are."""
    return lambda layer_idx, query, key, value: (query, *rounding(layer_idx, key, value))


def round_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Round `x` to FP8 codes and back; `scale` must broadcast against it."""
    return dequantize(quantize(x, scale, dtype), scale).to(x.dtype)


def _fp8(x: Tensor, scale: float, dtype: torch.dtype | None) -> Tensor:
    return round_fp8(x, torch.tensor([scale], device=x.device))


def _dynamic(codec: Callable[[Tensor], Tensor]) -> _Codec:
    return lambda x, scale, dtype: codec(x)


def _static(codec: Callable[[Tensor, float], Tensor]) -> _Codec:
    return lambda x, scale, dtype: codec(x, scale)


def _served(codec: Callable[[Tensor, torch.dtype | None], Tensor]) -> _Codec:
    return lambda x, scale, dtype: codec(x, dtype)


_CODECS: Mapping[str, tuple[_Codec, _Codec]] = {
    "fp8_per_token_head": (_dynamic(fp8_per_token_head),) * 2,
    "int8_per_token_head": (_dynamic(int8_per_token_head),) * 2,
    "int4_per_token_head": (_dynamic(int4_per_token_head),) * 2,
    "nvfp4": (_static(nvfp4),) * 2,
    "nvfp4_4over6": (_static(nvfp4_four_over_six),) * 2,
    "fp8_k_nvfp4_v": (_fp8, _static(nvfp4)),
    "lmdeploy_int8": (_served(lmdeploy_int8),) * 2,
    "lmdeploy_int4": (_served(lmdeploy_int4),) * 2,
    "fp8_ds_mla": (_dynamic(fp8_tiles), _dynamic(bfloat16_k_pe)),
    "nvfp4_ds_mla": (_dynamic(nvfp4_latent), _dynamic(fp8_k_pe)),
}
