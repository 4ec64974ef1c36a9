"""The FP8 number formats, defined once: rounding, range and what a scale means.

`scale` is always the multiplier that restores a value: `x ≈ x_fp8 * scale`. E4M3FN and E5M2 are
those of OCP's OFP8 1.0 (arXiv 2209.05433), E4M3FNUZ is that of arXiv 2206.02915.
"""

import torch
from torch import Tensor

FP8_DTYPES: dict[str, torch.dtype] = {
    "e4m3fn": torch.float8_e4m3fn,  # OCP E4M3, NVIDIA and gfx950
    "e4m3fnuz": torch.float8_e4m3fnuz,  # AMD MI300 (gfx942)
    "e5m2": torch.float8_e5m2,  # OCP E5M2
}

_FEW = 4096  # values that torch's own cast restores sooner


def fp8_max(dtype: torch.dtype) -> float:
    """Return the largest finite value of `dtype`: 448 (e4m3fn), 240 (e4m3fnuz), 57344 (e5m2)."""
    return torch.finfo(dtype).max


def scale_from_amax(amax: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Return the float32 scale that maps `amax`, of any shape, to the format's maximum: amax / 448 in E4M3.

    Raises:
        ValueError: a resulting scale is zero, negative, NaN or Inf.
    """
    scale = amax.float() / fp8_max(dtype)
    if not (torch.isfinite(scale) & (scale > 0)).all():
        raise ValueError(f"amax must be finite and large enough to scale, got {amax.tolist()}")
    return scale


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Round `x / scale` to the nearest FP8 value, ties to even, saturating; NaN stays NaN.

    `scale` must broadcast against `x`, of any shape. The clamp is explicit because a bare cast saturates
    in some torch versions and formats and gives NaN or Inf in others.
    """
    limit = fp8_max(dtype)
    return (x.float() / scale).clamp_(-limit, limit).to(dtype)


def dequantize(x: Tensor, scale: Tensor) -> Tensor:
    """Restore float32 values from FP8: `x * scale`. `scale` must broadcast against `x`, of any shape."""
    # beside a scale without dimensions the product would stay float16; a graph cannot ask for NaN
    is_large = x.is_cpu and x.numel() > _FEW
    if is_large and scale.dim() > 0 and not torch.compiler.is_compiling() and not _has_nan(x):
        # torch's own cast takes ten times as long on a CPU
        half, unit = _cast_to_half(x)
        return torch.mul(half, scale * unit)
    return x.float() * scale


def _cast_to_half(x: Tensor) -> tuple[Tensor, float]:
    """Return FP8 bits as float16 values, and the power of two that they lack; wrong for E4M3 NaN."""
    if x.dtype == torch.float16:
        return x, 1.0
    codes = x.view(torch.int8).to(torch.int16)
    if x.dtype == torch.float8_e5m2:
        return codes.bitwise_left_shift_(8).view(torch.float16), 1.0
    # the sign is extended over the upper byte: clear the exponent bit that it reaches
    half = codes.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
    return half, 2.0**8 if x.dtype == torch.float8_e4m3fn else 2.0**7


def _has_nan(x: Tensor) -> bool:
    codes = x.view(torch.uint8)
    if x.dtype == torch.float8_e4m3fn:
        return codes.numel() > 0 and int((codes & 0x7F).max()) == 0x7F
    return x.dtype == torch.float8_e4m3fnuz and bool((codes == 0x80).any())
