"""Rounding of K and V to the codes of a cache type and back, as engines compute it, in a model that runs."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.caches import blocks, per_token_head, turboquant
from calib.caches.types import Layers, cache_type
from fp8kv_runtime.fp8 import dequantize, quantize
from fp8kv_runtime.hf import swap_attention

# layer, key [B, K, N, D], value [B, K, N, D] -> the K and V that attention computes with; of latents
# [B, 1, N, R] and k_pe [B, 1, N, P]
CacheRounding = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
Codec = Callable[[Tensor], Tensor]  # K or V [B, K, N, D], or a latent or k_pe -> the same, rounded


def rounding(name: str, layers: Layers, dtype: torch.dtype | None = None) -> CacheRounding:
    """Return the rounding of the cache type called `name`, of ALL_CACHES; static types have scale 1.0.

    Of a model's `layers` a type may leave the first and last ones in 16 bits. K and V keep their dtype, and
    are rounded to it once more than in the engine. LMDeploy keeps its scales in the `dtype` that the model is
    served in: by default K's own, or float16 for float32.
    """
    edges = cache_type(name).edges(layers)
    fp8, nvfp4, powers = blocks.fp8_unscaled, blocks.nvfp4, blocks.round_powers
    lmdeploy = per_token_head.lmdeploy
    key, value, rotated = turboquant.rotated_key, turboquant.value, partial(turboquant.lmdeploy, dtype=dtype)
    codecs: Mapping[str, Codec | tuple[Codec, Codec]] = {
        "fp8": fp8,
        "fp8_e5m2": partial(fp8, dtype=torch.float8_e5m2),
        "fp8_per_token_head": per_token_head.fp8_per_token_head,
        "int8_per_token_head": per_token_head.int8_per_token_head,
        "int4_per_token_head": per_token_head.int4_per_token_head,
        "turboquant_k8v4": (fp8, partial(value, bits=4)),
        "turboquant_4bit_nc": (partial(key, bits=4), partial(value, bits=4)),
        "turboquant_k3v4_nc": (partial(key, bits=3), partial(value, bits=4)),
        "turboquant_3bit_nc": (partial(key, bits=3), partial(value, bits=3)),
        "ultraquant_4bit": (blocks.ultraquant_key, partial(powers, split=blocks.ultraquant_parts)),
        "nvfp4": nvfp4,
        "nvfp4_4over6": blocks.nvfp4_four_over_six,
        "fp8_k_nvfp4_v": (fp8, nvfp4),
        "mxfp8": partial(powers, split=blocks.mxfp8_parts),
        "fp4_mx_block16": partial(powers, split=blocks.fp4_mx_parts),
        "lmdeploy_int8": partial(lmdeploy, steps=per_token_head.INT8_STEPS, dtype=dtype),
        "lmdeploy_int4": partial(lmdeploy, steps=per_token_head.INT4_STEPS, dtype=dtype),
        "lmdeploy_turboquant": (partial(rotated, bits=3), partial(rotated, bits=2)),
        "fp8_ds_mla": (blocks.fp8_tiles, blocks.bfloat16_k_pe),
        "nvfp4_ds_mla": (blocks.nvfp4_latent, fp8),
    }
    codec = codecs[name]
    key_codec, value_codec = codec if isinstance(codec, tuple) else (codec, codec)

    def round_layer(layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return (key, value) if layer_idx in edges else (key_codec(key), value_codec(value))

    return round_layer


def rounded_attention(model: PreTrainedModel, rounding: CacheRounding) -> AbstractContextManager[None]:
    """Give attention inside the block the K and V that `rounding` returns.

    transformers' own cache keeps K and V as they were, so every step rounds them anew. This
    equals a real cache only for types in which a token's codes depend on that token alone.
    """

    def attend(
        original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
    ) -> Any:
        return original(module, query, *rounding(module.layer_idx, key, value), *args, **kw)

    return swap_attention(model, attend)


def round_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Round `x` of any shape to FP8 codes and back; `scale` must broadcast against it."""
    return dequantize(quantize(x, scale, dtype), scale).to(x.dtype)
