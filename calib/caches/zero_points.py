"""A scale and a zero point for each token and head: LMDeploy's INT8 and INT4.

Source: `_quant_int8` and `_quant_int4` in pytorch/kernels/cuda/fill_kv_cache.py of LMDeploy 0.18,
and the reader for decoding in pagedattention.py. Both numbers are kept in the model's 16 bits, and
the reader computes in them: in bfloat16 a zero point of 100 is off by up to a quarter.
"""

import torch
from torch import Tensor

from calib.errors import InputError

INT8_STEPS = 255
INT4_STEPS = 15


def lmdeploy_int8(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`x` [..., D] as LMDeploy's `--quant-policy 8` holds it, where the model runs in `dtype`."""
    return _held(x, INT8_STEPS, dtype)


def lmdeploy_int4(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """As `lmdeploy_int8`, in 4 bits; an InputError where D is odd."""
    if x.shape[-1] % 2:
        raise InputError(f"lmdeploy_int4: head size {x.shape[-1]} is not a multiple of 2")
    return _held(x, INT4_STEPS, dtype)


def zero_point_codes(x: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """The codes [..., D], scales and zero points [..., 1], float32, of `x` [..., D].

    Where all values are the same there is no scale, and all that is read back is NaN.
    """
    x = x.float()
    low, high = x.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / steps
    zero = -low / scale
    return (x / scale + zero + 0.5).trunc(), scale, zero


def _held(x: Tensor, steps: int, dtype: torch.dtype | None) -> Tensor:
    codes, scale, zero = zero_point_codes(x, steps)
    kept = dtype or (torch.float16 if x.dtype == torch.float32 else x.dtype)
    return ((codes.to(kept) - zero.to(kept)) * scale.to(kept)).to(x.dtype)
