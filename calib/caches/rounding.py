"""What cache types make of K and V: rounded to codes and back, as engines compute it."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from calib.caches.latents import bfloat16_k_pe, fp8_k_pe, fp8_tiles, nvfp4_latent
from calib.caches.nvfp4 import nvfp4, nvfp4_four_over_six
from calib.caches.per_head import fp8_per_token_head, int8_per_token_head
from calib.caches.rotated import int4_per_token_head
from calib.caches.zero_points import lmdeploy_int4, lmdeploy_int8
from calib.errors import InputError
from fp8kv_runtime.fp8 import dequantize, quantize

# layer, key [B, H, T, D], value [B, H, T, D] -> what attention computes with; of latents
# [B, 1, T, R] and k_pe [B, 1, T, P]
CacheRounding = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]

# a tensor, the layer's scale, the dtype that the model is served in
_Rounding = Callable[[Tensor, float, torch.dtype | None], Tensor]


def rounding(
    name: str,
    *,
    scales: Sequence[tuple[float, float]] | None = None,
    dtype: torch.dtype | None = None,
) -> CacheRounding:
    """The rounding of the cache type called `name`, of CACHES or LATENT_CACHES.

    K and V keep their dtype, and are rounded to it once more than in the engine. Static types use
    `scales`, K's and V's of each layer, or 1.0, the engine's default. LMDeploy keeps its scales in
    the `dtype` that the model is served in: by default K's own, or float16 for float32.
    """
    if name not in _ROUNDINGS:
        raise InputError(f"cache '{name[:40]}' is not one of {', '.join(_ROUNDINGS)}")
    of_key, of_value = _ROUNDINGS[name]

    def rounded(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        k_scale, v_scale = scales[layer] if scales is not None else (1.0, 1.0)
        return of_key(key, k_scale, dtype), of_value(value, v_scale, dtype)

    return rounded


def _fp8(x: Tensor, scale: float, dtype: torch.dtype | None) -> Tensor:
    return round_fp8(x, torch.tensor([scale], device=x.device))


def round_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Round `x` to FP8 codes and back; `scale` must broadcast against it."""
    return dequantize(quantize(x, scale, dtype), scale).to(x.dtype)


def _dynamic(function: Callable[[Tensor], Tensor]) -> _Rounding:
    return lambda x, scale, dtype: function(x)


def _static(function: Callable[[Tensor, float], Tensor]) -> _Rounding:
    return lambda x, scale, dtype: function(x, scale)


def _kept(function: Callable[[Tensor, torch.dtype | None], Tensor]) -> _Rounding:
    return lambda x, scale, dtype: function(x, dtype)


_ROUNDINGS: Mapping[str, tuple[_Rounding, _Rounding]] = {
    "fp8_per_token_head": (_dynamic(fp8_per_token_head),) * 2,
    "int8_per_token_head": (_dynamic(int8_per_token_head),) * 2,
    "int4_per_token_head": (_dynamic(int4_per_token_head),) * 2,
    "nvfp4": (_static(nvfp4),) * 2,
    "nvfp4_4over6": (_static(nvfp4_four_over_six),) * 2,
    "fp8_k_nvfp4_v": (_fp8, _static(nvfp4)),
    "lmdeploy_int8": (_kept(lmdeploy_int8),) * 2,
    "lmdeploy_int4": (_kept(lmdeploy_int4),) * 2,
    "fp8_ds_mla": (_dynamic(fp8_tiles), _dynamic(bfloat16_k_pe)),
    "nvfp4_ds_mla": (_dynamic(nvfp4_latent), _dynamic(fp8_k_pe)),
}
