"""Cache types with a scale for each block of values, of K and V, or of latents and k_pe (MLA).

NVFP4 has E2M1 in blocks of 16 along the head. Each block has an E4M3 scale, and the layer has one more,
which is vLLM's default of 1.0 here. The rounding is that of `nvfp4_append_quantize_block` in
include/flashinfer/page.cuh of FlashInfer fb28d72, with which vLLM 0.32 writes on A100 and H100. The
choice between 4 and 6 is that of `cvt_warp_fp16_to_fp4_4over6` in
csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu of vLLM. Both are CUDA: read, not run. On B200 the engine
takes reciprocals that are exact to a few last bits, and computes with Q in FP8; neither is simulated.

Latents are stored as for DeepSeek's sparse attention: `_fused_norm_rope_kernel` in
models/deepseek_v32/common/kernels.py of vLLM 0.32 writes for DeepSeek-V3.2 and GLM-5.
`concat_and_cache_ds_mla_kernel` in csrc/libtorch_stable/cache_kernels.cu, which writes for other models,
and SGLang's `quantize_k_cache` have the same layout, but do not round a tile's scale up to a power of
two.

MXFP8, SGLang's 4-bit type and UltraQuant have scales that are powers of two (E8M0). They follow
`_mxfp8_quant_store_qkv_kernel` in kernels/ops/kvcache/mxfp8_quant_store_kv.py and
`FP4MXBlock16KVQuantizeUtil` in srt/layers/quantization/kvfp4_tensor.py of SGLang 0.5.23, and
v1/attention/ops/ultraquant/triton_store.py of vLLM 0.32. UltraQuant rotates K and not V. The engine
rotates Q in place of rotating K back, and rounds it to FP8, which is not simulated. A value halfway
between two of E2M1 goes to the even code in NVFP4, away from zero in SGLang's type, and down in UltraQuant.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from calib.errors import InputError
from fp8kv_runtime.fp8 import dequantize, fp8_max, quantize

BLOCK, MX_BLOCK = 16, 32
E2M1_MAX = 6.0
TILE = 128
E4M3_MAX = fp8_max(torch.float8_e4m3fn)
LEAST_TILE_SCALE = 1e-4  # before it is rounded up
LEAST_BLOCK_SCALE = 2.0**-9  # the smallest E4M3
_EXPONENT = 0x7F800000  # bits of a float32
SHARE = 0.156  # of a block's amax: UltraQuant's scale is the power of two nearest to it
_LEVELS = torch.tensor([-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_MIDDLES = (_LEVELS[1:] + _LEVELS[:-1]) / 2


def nvfp4(x: Tensor) -> Tensor:
    """Round `x` [..., D] to NVFP4; an InputError where 16 does not divide D."""
    blocks, amax = split_blocks(x)
    return _round_blocks(blocks, amax / E2M1_MAX).reshape(x.shape).to(x.dtype)


def nvfp4_four_over_six(x: Tensor) -> Tensor:
    """Round `x` [..., D] to NVFP4, but each block's largest value to 4 where that errs less than 6.

    Raises an InputError where 16 does not divide D.
    """
    blocks, amax = split_blocks(x)
    six, four = (_round_blocks(blocks, amax / largest) for largest in (E2M1_MAX, 4.0))
    error_of_six, error_of_four = ((x - blocks).square_().sum(-1, keepdim=True) for x in (six, four))
    return torch.where(error_of_four < error_of_six, four, six).reshape(x.shape).to(x.dtype)


def _round_blocks(blocks: Tensor, scale: Tensor) -> Tensor:
    scale = fp8_unscaled(scale)
    factor = (1.0 / scale).masked_fill_(scale == 0, 0.0)
    return e2m1(blocks * factor).mul_(scale)


def split_blocks(x: Tensor, name: str = "head size", size: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Split `x` [..., D] into float32 [..., D / size, size], and return the amax of each, [..., D / size, 1].

    Raises an InputError where `size` does not divide D, which the message calls `name`.
    """
    if x.shape[-1] % size:
        raise InputError(f"blocks of {size}: {name} {x.shape[-1]} is not a multiple of {size}")
    blocks = x.float().reshape(*x.shape[:-1], -1, size)
    return blocks, blocks.abs().amax(-1, keepdim=True)


def e2m1(x: Tensor) -> Tensor:
    """Round float32 `x` of any shape to 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with its sign; ties to even codes."""
    size = x.abs()
    # a float32 of 2^22 octaves has steps of half an octave, and sums are rounded to even ones
    octave = (size.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(1, 4)
    shift = octave.mul_(2.0**22)
    return size.add_(shift).sub_(shift).clamp_(max=E2M1_MAX).copysign_(x)


def fp8_tiles(latent: Tensor) -> Tensor:
    """Round `latent` [..., R] to E4M3 with a scale for each 128 values; the last tile may be shorter."""
    codes, scale = tile_codes(latent)
    return dequantize(codes, scale).flatten(-2)[..., : latent.shape[-1]].to(latent.dtype)


def tile_codes(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes [..., tiles, 128] of `latent` [..., R], 0 at the end, and scales [..., tiles, 1]."""
    tiles = pad(latent.float(), (0, -latent.shape[-1] % TILE)).view(*latent.shape[:-1], -1, TILE)
    amax = tiles.abs().amax(-1, keepdim=True)
    scale = (amax * (1.0 / E4M3_MAX)).clamp(min=LEAST_TILE_SCALE).log2().ceil().exp2()
    return quantize(tiles, scale), scale


def nvfp4_latent(latent: Tensor) -> Tensor:
    """Round `latent` [..., R] to NVFP4 blocks of 16, whose scales do not become 0.

    Raises an InputError where 16 does not divide R.
    """
    codes, scale = nvfp4_latent_codes(latent)
    return codes.mul_(scale).reshape(latent.shape).to(latent.dtype)


def nvfp4_latent_codes(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Return E2M1 [..., blocks, 16] and E4M3 scales [..., blocks, 1], as float32, of [..., R].

    Raises an InputError where 16 does not divide R.
    """
    blocks, amax = split_blocks(latent, "latent size")
    scale = fp8_unscaled((amax * (1.0 / E2M1_MAX)).clamp_(min=LEAST_BLOCK_SCALE))
    return e2m1(blocks * (1.0 / scale)), scale


def fp8_unscaled(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Round `x` of any shape to FP8 at scale 1.0."""
    one = torch.ones(1, device=x.device)
    return dequantize(quantize(x, one, dtype), one).to(x.dtype)


def bfloat16_k_pe(k_pe: Tensor) -> Tensor:
    """Round `k_pe` of any shape to bfloat16, the only dtype that the engines' kernels serve."""
    return k_pe.bfloat16().to(k_pe.dtype)


def round_powers(x: Tensor, split: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Round `x` [..., D] to the values times powers of two that `split` returns.

    Raises an InputError where its blocks do not divide D.
    """
    values, exponent = split(x)
    return values.mul_(exponent.exp2()).reshape(x.shape).to(x.dtype)


def mxfp8_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 values [..., blocks, 32] and exponents [..., blocks, 1], float32, of `x` [..., D].

    Raises an InputError where 32 does not divide D.
    """
    blocks, amax = split_blocks(x, "head size", MX_BLOCK)
    exponent = (amax.clamp_(min=1e-30) / E4M3_MAX).log2_().ceil_().clamp_(-127, 127)
    return fp8_unscaled(blocks / exponent.exp2()), exponent


def fp4_mx_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E2M1 values [..., blocks, 16] and exponents [..., blocks, 1], float32, of `x` [..., D].

    Raises an InputError where 16 does not divide D.
    """
    blocks, amax = split_blocks(x)
    exponent = (amax / E2M1_MAX).clamp_(min=1e-10).log2_().ceil_()
    return _nearest(blocks.abs() / exponent.exp2(), up=True).copysign(blocks), exponent


def ultraquant_key(x: Tensor) -> Tensor:
    """Round K `x` [..., D] as UltraQuant reads it; an InputError where D is not a power of two from 32 up."""
    return rotate(round_powers(rotate(x), ultraquant_parts)).to(x.dtype)


def ultraquant_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E2M1 values [..., blocks, 32] and exponents [..., blocks, 1], float32, of `x` [..., D].

    An exponent is -inf where all are 0. Raises an InputError where 32 does not divide D.
    """
    blocks, amax = split_blocks(x, "head size", MX_BLOCK)
    exponent = amax.mul_(SHARE).log2_().add_(0.5).floor_()
    return _nearest((blocks / exponent.exp2()).nan_to_num_(0.0)), exponent


def rotate(x: Tensor) -> Tensor:
    """Multiply `x` [..., D] by the orthonormal Hadamard matrix of D, which is its own inverse.

    Every step is rounded as vLLM rounds it; float32. Raises an InputError where D is not a power of two.
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
