"""NVFP4: E2M1 in blocks of 16 along the head, an E4M3 scale for each block, a scale for the layer.

Source: `nvfp4_append_quantize_block` in include/flashinfer/page.cuh of FlashInfer fb28d72, which
vLLM 0.32 writes with on A100 and H100; `cvt_warp_fp16_to_fp4_4over6` in
csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu of vLLM for the choice between 4 and 6. Both are
CUDA: read, not run. On B200 the engine takes reciprocals that are exact to a few last bits, and
computes with Q in FP8; neither is simulated.
"""

import torch
from torch import Tensor

from calib.errors import InputError
from fp8kv_runtime.fp8 import quantize

BLOCK = 16
E2M1_MAX = 6.0
_FOUR = 4.0


def nvfp4(x: Tensor, scale: float = 1.0) -> Tensor:
    """`x` [..., D] as NVFP4 holds it under the layer's `scale`, which vLLM takes as 1.0 by default.

    Raises an InputError where D is not a multiple of 16.
    """
    return _restored(x, _rounded(in_blocks(x), E2M1_MAX, scale))


def nvfp4_four_over_six(x: Tensor, scale: float = 1.0) -> Tensor:
    """As `nvfp4`, but each block's largest value becomes 4 where that errs less than 6."""
    blocks = in_blocks(x)
    six, four = (_rounded(blocks, largest, scale) for largest in (E2M1_MAX, _FOUR))
    errors = [(rounded - blocks).square().sum(-1, keepdim=True) for rounded in (six, four)]
    return _restored(x, torch.where(errors[1] < errors[0], four, six))


def e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with the sign of `x`; ties to even codes."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    # torch rounds halves to even, which are the even codes as well
    return ((size / step).round() * step).clamp(max=E2M1_MAX).copysign(x)


def _rounded(blocks: Tensor, largest: float, scale: float) -> Tensor:
    amax = blocks.abs().amax(-1, keepdim=True)
    one = torch.ones((), device=blocks.device)
    block_scale = quantize(amax / (largest * scale), one).float() * scale
    factor = torch.where(block_scale > 0, 1.0 / block_scale, 0.0)
    return e2m1(blocks * factor) * block_scale


def in_blocks(x: Tensor, what: str = "head size") -> Tensor:
    """`x` [..., D] as float32 [..., D / 16, 16]; an InputError where D is no multiple of 16.

    `what` is what the message calls D.
    """
    if x.shape[-1] % BLOCK:
        raise InputError(f"NVFP4: {what} {x.shape[-1]} is not a multiple of {BLOCK}")
    return x.float().reshape(*x.shape[:-1], -1, BLOCK)


def _restored(x: Tensor, blocks: Tensor) -> Tensor:
    return blocks.reshape(x.shape).to(x.dtype)
