"""Cache types with a scale for each token and head, made when it is stored.

vLLM's FP8 and INT8: `_reshape_cache_per_token_head` in v1/attention/ops/triton_reshape_and_cache_flash.py
of vLLM 0.32; its reader multiplies scores and probabilities by the scale in float32.

vLLM's INT4: v1/attention/ops/int4_per_token_head.py of vLLM 0.32. The engine rotates Q as well and its
output back, so attention computes with the K and V that are rotated back here. Its rotation on CUDA
rounds once more, to bfloat16; this one is its rotation for other devices.

LMDeploy's INT8 and INT4: `_quant_int8` and `_quant_int4` in pytorch/kernels/cuda/fill_kv_cache.py of
LMDeploy 0.18, and the reader for decoding in pagedattention.py. Scale and zero point are kept in the
model's 16 bits, and the reader computes in them: in bfloat16 a zero point of 100 is off by up to a
quarter.
"""

from functools import cache

import torch
from torch import Tensor

from calib.errors import InputError
from fp8kv_runtime.fp8 import dequantize

INT8_MAX = 127
FP8 = torch.float8_e4m3fn
LEAST_SCALE = 1e-6
INT8_STEPS, INT4_STEPS = 255, 15
SEED = 0x9E3779B9  # of the rotation's signs
ZERO_BITS = 4  # of the scale's float32, which hold the zero point


def int8_per_token_head(x: Tensor) -> Tensor:
    """Round `x` [..., D] as vLLM's `int8_per_token_head` stores it."""
    codes, scale = int8_codes(x)
    return codes.mul_(scale).to(x.dtype)


def fp8_per_token_head(x: Tensor) -> Tensor:
    """Round `x` [..., D] as vLLM's `fp8_per_token_head` stores it on NVIDIA's GPUs, which have E4M3FN."""
    scaled, scale = fp8_scaled(x)
    return dequantize(scaled.to(FP8), scale).to(x.dtype)


def int8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [..., D] and scales [..., 1], float32, of `x` [..., D]."""
    scaled, scale = _divide(x, INT8_MAX)
    # halves are rounded away from zero
    return scaled.abs().add_(0.5).floor_().mul_(scaled.sign_()), scale


def fp8_scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` [..., D] as it is cast to E4M3, and its scales [..., 1], float32."""
    limit = torch.finfo(FP8).max
    scaled, scale = _divide(x, limit)
    return scaled.clamp_(-limit, limit), scale


def _divide(x: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / limit).clamp_(min=LEAST_SCALE)
    return x * (1.0 / scale), scale


def int4_per_token_head(x: Tensor) -> Tensor:
    """Round `x` [..., D] as vLLM's `int4_per_token_head` stores it; an InputError where D is odd."""
    codes, scale, zero = int4_codes(rotate(x.float()).to(x.dtype))
    return rotate_back(codes.sub_(zero).mul_(scale)).to(x.dtype)


def int4_codes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes [..., D], scales and zero points [..., 1], float32, of rotated `x` [..., D].

    Scales are as the reader sees them: without the bits that hold the zero point.
    """
    x = x.float()
    # two reductions are faster than `aminmax` on a CPU
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / INT4_STEPS).clamp_(min=LEAST_SCALE)
    zero = _round_half_up(-low / scale)
    codes = _round_half_up((x * (1.0 / scale)).add_(zero))
    return codes, (scale.view(torch.int32) & -(1 << ZERO_BITS)).view(torch.float32), zero


def _round_half_up(x: Tensor) -> Tensor:
    """Round `x` to codes, in place."""
    return x.add_(0.5).floor_().clamp_(0, INT4_STEPS)


def rotate(x: Tensor) -> Tensor:
    """Multiply `x` [..., D] by random signs and a Hadamard matrix, in float32.

    A head size that is not a power of two is rotated in equal blocks of one. Lengths grow by the
    square root of the block's size. Raises an InputError where D is odd.
    """
    size = _block_size(x)
    return hadamard_product((x.reshape(-1, size) * signs(size).to(x.device)).T).reshape(x.shape)


def rotate_back(x: Tensor) -> Tensor:
    """Undo `rotate` for `x` [..., D]; an InputError where D is odd."""
    size = _block_size(x)
    return hadamard_product(x.reshape(-1, size).T).mul_(signs(size).to(x.device) / size).reshape(x.shape)


def _block_size(x: Tensor) -> int:
    size = x.shape[-1]
    if size % 2:
        raise InputError(f"int4_per_token_head: head size {size} is not a multiple of 2")
    return size & -size


def hadamard_product(columns: Tensor) -> Tensor:
    """Multiply a Hadamard matrix by `columns` [D, n]; returns rows [n, D]."""
    # sums of whole rows of n values, which are fast where single values of D would be slow
    x, half = columns.clone(memory_format=torch.contiguous_format), 1
    sums = torch.empty_like(x)
    while half < len(x):
        left, right = x.view(-1, 2, half, x.shape[1]).unbind(1)
        total, difference = sums.view(-1, 2, half, x.shape[1]).unbind(1)
        torch.add(left, right, out=total)
        torch.sub(left, right, out=difference)
        x, sums, half = sums, x, 2 * half
    return x.T.contiguous()


@cache
def signs(size: int) -> Tensor:
    """Return the rotation's signs, 1 or -1, which every layer and head shares: [size] float32."""
    generator = torch.Generator().manual_seed(SEED)
    return 2 * torch.bernoulli(torch.full((size,), 0.5), generator=generator) - 1


def lmdeploy(x: Tensor, steps: int, dtype: torch.dtype | None = None) -> Tensor:
    """Round `x` [..., D] as LMDeploy's INT8 or INT4 cache stores it, where the model runs in `dtype`.

    Raises an InputError where D is odd in INT4.
    """
    if steps == INT4_STEPS and x.shape[-1] % 2:
        raise InputError(f"lmdeploy_int4: head size {x.shape[-1]} is not a multiple of 2")
    dtype = served_in(x, dtype)
    codes, scale, zero = (part.to(dtype) for part in zero_point_codes(x, steps))
    return codes.sub_(zero).mul_(scale).to(x.dtype)


def served_in(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return `dtype`, or the dtype that LMDeploy serves `x` [...] in: its own, but float16 for float32."""
    return dtype or (torch.float16 if x.dtype == torch.float32 else x.dtype)


def zero_point_codes(x: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes [..., D], scales and zero points [..., 1], float32, of `x` [..., D].

    Where all values are the same the scale is 0, and all that is read back is NaN.
    """
    x = x.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / steps
    zero = -low / scale
    # codes are not negative, and `floor` is vectorised where `trunc` is not
    return (x / scale).add_(zero).add_(0.5).floor_(), scale, zero
