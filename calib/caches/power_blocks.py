"""Cache types with a power of two (E8M0) as the scale of each block of values.

SGLang's MXFP8: `_mxfp8_quant_store_qkv_kernel` in kernels/ops/kvcache/mxfp8_quant_store_kv.py of SGLang
0.5.23. Its 4-bit type: `FP4MXBlock16KVQuantizeUtil` in srt/layers/quantization/kvfp4_tensor.py.

vLLM's UltraQuant: v1/attention/ops/ultraquant/triton_store.py of vLLM 0.32. It rotates K and not V; the
engine rotates Q in place of rotating K back, and rounds it to FP8, which is not simulated.

All round to E2M1 in other ways where a value lies halfway between two: SGLang away from zero, vLLM down.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from calib.caches.blocks import E2M1_MAX, E4M3_MAX, fp8_unscaled, split_blocks
from calib.errors import InputError

MX_BLOCK = 32
SHARE = 0.156  # of a block's amax, whose nearest power of two UltraQuant takes
_LEVELS = torch.tensor([-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_MIDDLES = (_LEVELS[1:] + _LEVELS[:-1]) / 2


def round_blocks(x: Tensor, split: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Round `x` [..., D] to the values times powers of two that `split`, of this module, returns.

    Raises an InputError where its blocks do not divide D.
    """
    values, exponent = split(x)
    return values.mul_(exponent.exp2()).reshape(x.shape).to(x.dtype)


def mxfp8_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 values [..., blocks, 32] and exponents of two [..., blocks, 1], as float32."""
    blocks, amax = split_blocks(x, "head size", MX_BLOCK)
    exponent = (amax.clamp_(min=1e-30) / E4M3_MAX).log2_().ceil_().clamp_(-127, 127)
    return fp8_unscaled(blocks / exponent.exp2()), exponent


def fp4_mx_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E2M1 values [..., blocks, 16] and exponents of two [..., blocks, 1], as float32."""
    blocks, amax = split_blocks(x)
    exponent = (amax / E2M1_MAX).clamp_(min=1e-10).log2_().ceil_()
    return _nearest(blocks.abs() / exponent.exp2(), up=True).copysign(blocks), exponent


def ultraquant_key(x: Tensor) -> Tensor:
    """Round K `x` [..., D] as UltraQuant reads it; an InputError where D is not a power of two from 32 up."""
    return rotate(round_blocks(rotate(x), ultraquant_parts)).to(x.dtype)


def ultraquant_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E2M1 values [..., blocks, 32] and exponents of two, -inf where all are 0, as float32."""
    blocks, amax = split_blocks(x, "head size", MX_BLOCK)
    exponent = amax.mul_(SHARE).log2_().add_(0.5).floor_()
    return _nearest((blocks / exponent.exp2()).nan_to_num_(0.0)), exponent


def rotate(x: Tensor) -> Tensor:
    """Multiply `x` [..., D] by the orthonormal Hadamard matrix of D, which is its own inverse.

    Every step is rounded as vLLM rounds it. Raises an InputError where D is not a power of two.
    """
    half, size, x = 1, x.shape[-1], x.float()
    if size & (size - 1):
        raise InputError(f"ultraquant: head size {size} is not a power of two")
    while half < size:
        left, right = x.reshape(*x.shape[:-1], -1, 2, half).unbind(-2)
        x = torch.stack((left + right, left - right), -2).mul_(math.sqrt(0.5)).flatten(-3)
        half *= 2
    return x


def _nearest(x: Tensor, *, up: bool = False) -> Tensor:
    """Round float32 `x` of any shape to E2M1, down where it lies halfway, or up."""
    levels, middles = _LEVELS.to(x.device), _MIDDLES.to(x.device)
    return levels[torch.bucketize(x.contiguous(), middles, right=up)]
