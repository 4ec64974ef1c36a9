"""Caches of other types than static FP8, as engines compute them: rounded to codes and back."""

from torch import Tensor

INT8_MAX = 127
_LEAST_SCALE = 1e-6


def int8_per_token_head(x: Tensor) -> Tensor:
    """`x` [..., D] as vLLM's `int8_per_token_head` holds it: one scale per token and head.

    Source: `_reshape_cache_per_token_head` of vLLM 0.32.
    """
    codes, scale = int8_codes(x)
    return (codes * scale).to(x.dtype)


def int8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The codes [..., D] and scales [..., 1], float32, of `x` [..., D]."""
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / INT8_MAX).clamp(min=_LEAST_SCALE)
    scaled = x * (1.0 / scale)
    # half away from zero, as the store that follows cuts the fraction off
    half = (scaled >= 0).float() - 0.5
    return (scaled + half).clamp(-INT8_MAX - 1, INT8_MAX).trunc(), scale
