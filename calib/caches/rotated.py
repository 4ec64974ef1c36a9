"""INT4 after a randomised Hadamard rotation: vLLM's `int4_per_token_head`.

Source: v1/attention/ops/int4_per_token_head.py of vLLM 0.32. The engine rotates Q as well and its
output back, so attention computes with the K and V that are rotated back here. Its rotation on
CUDA rounds once more, to bfloat16; this one is its rotation for other devices.
"""

from functools import cache

import torch
from torch import Tensor

from calib.caches.per_head import LEAST_SCALE
from calib.errors import InputError

STEPS = 15
SEED = 0x9E3779B9
ZERO_BITS = 4  # of the scale's float32, which hold the zero point


def int4_per_token_head(x: Tensor) -> Tensor:
    """`x` [..., D] as vLLM's `int4_per_token_head` holds it; an InputError where D is odd."""
    rotated = rotate(x.float()).to(x.dtype)
    codes, scale, zero = int4_codes(rotated)
    return rotate_back((codes - zero) * scale).to(x.dtype)


def int4_codes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The codes [..., D], scales and zero points [..., 1], float32, of rotated `x` [..., D].

    Scales are what the reader finds: without the bits that hold the zero point.
    """
    x = x.float()
    low, high = x.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / STEPS).clamp(min=LEAST_SCALE)
    zero = _rounded(-low / scale)
    codes = _rounded(x * (1.0 / scale) + zero)
    return codes, (scale.view(torch.int32) & -(1 << ZERO_BITS)).view(torch.float32), zero


def _rounded(x: Tensor) -> Tensor:
    """Half up, in range; what is below 0 ends at 0 however it is rounded."""
    return (x + 0.5).trunc().clamp(0, STEPS)


def rotate(x: Tensor) -> Tensor:
    """`x` [..., D], float32, with random signs, through a Hadamard matrix.

    A head size that is no power of two is rotated in equal blocks of one. Lengths grow by the
    square root of the block's size.
    """
    blocks = _blocks(x)
    return _hadamard(blocks * signs(blocks.shape[-1]).to(x.device)).reshape(x.shape)


def rotate_back(x: Tensor) -> Tensor:
    """What `rotate` was given."""
    blocks = _blocks(x)
    size = blocks.shape[-1]
    return (_hadamard(blocks) * signs(size).to(x.device) / size).reshape(x.shape)


def _blocks(x: Tensor) -> Tensor:
    size = x.shape[-1]
    if size % 2:
        raise InputError(f"int4_per_token_head: head size {size} is not a multiple of 2")
    return x.reshape(*x.shape[:-1], -1, size & -size)


def _hadamard(x: Tensor) -> Tensor:
    half = 1
    while half < x.shape[-1]:
        left, right = x.reshape(*x.shape[:-1], -1, 2, half).unbind(-2)
        x = torch.stack((left + right, left - right), -2).reshape(x.shape)
        half *= 2
    return x


@cache
def signs(size: int) -> Tensor:
    """The rotation's signs, the same in every layer and head."""
    generator = torch.Generator().manual_seed(SEED)
    return 2 * torch.bernoulli(torch.full((size,), 0.5), generator=generator) - 1
