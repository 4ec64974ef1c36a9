"""The FP8 number formats, defined once: rounding, range and what a scale means.

`scale` is always the multiplier that restores a value: `x ≈ x_fp8 * scale`.
"""

import torch
from torch import Tensor

FP8_DTYPES: dict[str, torch.dtype] = {
    "e4m3fn": torch.float8_e4m3fn,  # OCP E4M3, NVIDIA and gfx950
    "e4m3fnuz": torch.float8_e4m3fnuz,  # AMD MI300 (gfx942)
    "e5m2": torch.float8_e5m2,  # OCP E5M2
}


def fp8_max(dtype: torch.dtype) -> float:
    """Largest finite value of `dtype`: 448 (e4m3fn), 240 (e4m3fnuz), 57344 (e5m2)."""
    return torch.finfo(dtype).max


def scale_from_amax(amax: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Return the float32 scale that maps `amax` (any shape, value units) to the format's maximum.

    Raises:
        ValueError: a resulting scale is zero, negative, NaN or Inf.
    """
    scale = amax.float() / fp8_max(dtype)
    if not (torch.isfinite(scale) & (scale > 0)).all():
        raise ValueError(f"amax must be finite and large enough to scale, got {amax.tolist()}")
    return scale


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Round `x / scale` to the nearest FP8 value, ties to even, saturating; NaN stays NaN.

    `scale` must broadcast against `x`. The clamp is explicit because a bare cast saturates in some
    torch versions and formats and gives NaN or Inf in others.
    """
    limit = fp8_max(dtype)
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def dequantize(x: Tensor, scale: Tensor) -> Tensor:
    """Restore float32 values from FP8: `x * scale`."""
    return x.float() * scale
