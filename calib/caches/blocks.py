"""Cache types with a scale for each block of values: NVFP4, and those for latents and k_pe (MLA).

NVFP4 has E2M1 in blocks of 16 along the head, an E4M3 scale for each block, a scale for the layer.
`nvfp4_append_quantize_block` in include/flashinfer/page.cuh of FlashInfer fb28d72, which vLLM 0.32 writes
with on A100 and H100; `cvt_warp_fp16_to_fp4_4over6` in csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu of
vLLM for the choice between 4 and 6. Both are CUDA: read, not run. On B200 the engine takes reciprocals
that are exact to a few last bits, and computes with Q in FP8; neither is simulated.

Latents are stored as for DeepSeek's sparse attention: `_fused_norm_rope_kernel` in
models/deepseek_v32/common/kernels.py of vLLM 0.32 writes for DeepSeek-V3.2 and GLM-5.
`concat_and_cache_ds_mla_kernel` in csrc/libtorch_stable/cache_kernels.cu, which writes for other models,
and SGLang's `quantize_k_cache` have the same layout, but do not round a tile's scale up to a power of
two.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from calib.errors import InputError
from fp8kv_runtime.fp8 import dequantize, fp8_max, quantize

BLOCK = 16
E2M1_MAX = 6.0
_FOUR = 4.0
TILE = 128
E4M3_MAX = fp8_max(torch.float8_e4m3fn)
LEAST_TILE_SCALE = 1e-4  # before it is rounded up
LEAST_BLOCK_SCALE = 2.0**-9  # the smallest E4M3


def nvfp4(x: Tensor, scale: float = 1.0) -> Tensor:
    """Round `x` [..., D] to NVFP4 under the layer's `scale`, which vLLM takes as 1.0 by default.

    Raises an InputError where D is not a multiple of 16.
    """
    return _round_blocks(split_blocks(x), E2M1_MAX, scale).reshape(x.shape).to(x.dtype)


def nvfp4_four_over_six(x: Tensor, scale: float = 1.0) -> Tensor:
    """Round `x` to NVFP4, but each block's largest value to 4 where that errs less than 6."""
    blocks = split_blocks(x)
    six, four = (_round_blocks(blocks, largest, scale) for largest in (E2M1_MAX, _FOUR))
    errors = [(rounded - blocks).square().sum(-1, keepdim=True) for rounded in (six, four)]
    return torch.where(errors[1] < errors[0], four, six).reshape(x.shape).to(x.dtype)


def e2m1(x: Tensor) -> Tensor:
    """Return the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with the sign of `x`; ties to even codes."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    # torch rounds halves to even, which are the even codes as well
    return ((size / step).round() * step).clamp(max=E2M1_MAX).copysign(x)


def _round_blocks(blocks: Tensor, largest: float, scale: float) -> Tensor:
    amax = blocks.abs().amax(-1, keepdim=True)
    block_scale = fp8_k_pe(amax / (largest * scale)) * scale
    factor = torch.where(block_scale > 0, 1.0 / block_scale, 0.0)
    return e2m1(blocks * factor) * block_scale


def split_blocks(x: Tensor, name: str = "head size") -> Tensor:
    """Split `x` [..., D] into float32 [..., D / 16, 16]; an InputError where 16 does not divide D.

    `name` is how the message calls D.
    """
    if x.shape[-1] % BLOCK:
        raise InputError(f"NVFP4: {name} {x.shape[-1]} is not a multiple of {BLOCK}")
    return x.float().reshape(*x.shape[:-1], -1, BLOCK)


def fp8_tiles(latent: Tensor) -> Tensor:
    """Round `latent` [..., R] to E4M3 with a scale for each 128 values; the last tile may be shorter."""
    codes, scale = tile_codes(latent)
    return dequantize(codes, scale).flatten(-2)[..., : latent.shape[-1]].to(latent.dtype)


def tile_codes(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes [..., tiles, 128], zeros at the end, and scales [..., tiles, 1], float32."""
    filled = pad(latent.float(), (0, -latent.shape[-1] % TILE))
    tiles = filled.view(*latent.shape[:-1], -1, TILE)
    amax = tiles.abs().amax(-1, keepdim=True)
    scale = (amax * (1.0 / E4M3_MAX)).clamp(min=LEAST_TILE_SCALE).log2().ceil().exp2()
    return quantize(tiles, scale), scale


def nvfp4_latent(latent: Tensor) -> Tensor:
    """Round `latent` [..., R] to NVFP4 blocks of 16, whose scales do not become 0.

    Raises an InputError where R is not a multiple of 16.
    """
    rounded, scale = nvfp4_blocks(latent)
    return (rounded * scale).reshape(latent.shape).to(latent.dtype)


def nvfp4_blocks(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Return E2M1 [..., blocks, 16] and E4M3 scales [..., blocks, 1], as float32."""
    blocks = split_blocks(latent, "latent size")
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = fp8_k_pe((amax * (1.0 / E2M1_MAX)).clamp(min=LEAST_BLOCK_SCALE))
    return e2m1(blocks * (1.0 / scale)), scale


def fp8_k_pe(k_pe: Tensor) -> Tensor:
    """Round `k_pe` to E4M3 at scale 1.0."""
    one = torch.ones((), device=k_pe.device)
    return dequantize(quantize(k_pe, one), one).to(k_pe.dtype)


def bfloat16_k_pe(k_pe: Tensor) -> Tensor:
    """Round `k_pe` to bfloat16, the only dtype that the engines' kernels serve."""
    return k_pe.bfloat16().to(k_pe.dtype)
