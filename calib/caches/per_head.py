"""One scale for each token and head, made when it is stored.

Source: `_reshape_cache_per_token_head` in v1/attention/ops/triton_reshape_and_cache_flash.py of
vLLM 0.32; its reader multiplies scores and probabilities by the scale in float32.
"""

import torch
from torch import Tensor

INT8_MAX = 127
FP8 = torch.float8_e4m3fn
LEAST_SCALE = 1e-6


def int8_per_token_head(x: Tensor) -> Tensor:
    """`x` [..., D] as vLLM's `int8_per_token_head` holds it."""
    codes, scale = int8_codes(x)
    return (codes * scale).to(x.dtype)


def fp8_per_token_head(x: Tensor) -> Tensor:
    """`x` [..., D] as vLLM's `fp8_per_token_head` holds it on NVIDIA's GPUs, which have E4M3FN."""
    scaled, scale = fp8_scaled(x)
    return (scaled.to(FP8).float() * scale).to(x.dtype)


def int8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The codes [..., D] and scales [..., 1], float32, of `x` [..., D]."""
    scaled, scale = _scaled(x, INT8_MAX)
    # half away from zero, as the store that follows cuts the fraction off
    half = (scaled >= 0).float() - 0.5
    return (scaled + half).clamp(-INT8_MAX - 1, INT8_MAX).trunc(), scale


def fp8_scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` [..., D] as it is cast to E4M3, and its scales [..., 1], float32."""
    limit = torch.finfo(FP8).max
    scaled, scale = _scaled(x, limit)
    return scaled.clamp(-limit, limit), scale


def _scaled(x: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / limit).clamp(min=LEAST_SCALE)
    return x * (1.0 / scale), scale
