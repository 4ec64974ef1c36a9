"""Latents and k_pe as the cache types for DeepSeek's sparse attention hold them.

Source: `_fused_norm_rope_kernel` in models/deepseek_v32/common/kernels.py of vLLM 0.32, which
writes for DeepSeek-V3.2 and GLM-5. `concat_and_cache_ds_mla_kernel` in
csrc/libtorch_stable/cache_kernels.cu, which writes for other models, and SGLang's
`quantize_k_cache` have the same layout, but do not round a tile's scale up to a power of two.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from calib.caches.nvfp4 import E2M1_MAX, e2m1, in_blocks
from fp8kv_runtime.fp8 import dequantize, fp8_max, quantize

TILE = 128
E4M3_MAX = fp8_max(torch.float8_e4m3fn)
LEAST_TILE_SCALE = 1e-4  # before it is rounded up
LEAST_BLOCK_SCALE = 2.0**-9  # the smallest E4M3


def fp8_tiles(latent: Tensor) -> Tensor:
    """`latent` [..., R] in E4M3 with a scale for each 128 values; the last tile may be shorter."""
    codes, scale = tile_codes(latent)
    return dequantize(codes, scale).flatten(-2)[..., : latent.shape[-1]].to(latent.dtype)


def tile_codes(latent: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes [..., tiles, 128], zeros at the end, and scales [..., tiles, 1], float32."""
    filled = pad(latent.float(), (0, -latent.shape[-1] % TILE))
    tiles = filled.view(*latent.shape[:-1], -1, TILE)
    amax = tiles.abs().amax(-1, keepdim=True)
    scale = (amax * (1.0 / E4M3_MAX)).clamp(min=LEAST_TILE_SCALE).log2().ceil().exp2()
    return quantize(tiles, scale), scale


def nvfp4_latent(latent: Tensor) -> Tensor:
    """`latent` [..., R] in NVFP4 blocks of 16, whose scales do not become 0.

    Raises an InputError where R is not a multiple of 16.
    """
    rounded, scale = nvfp4_blocks(latent)
    return (rounded * scale).reshape(latent.shape).to(latent.dtype)


def nvfp4_blocks(latent: Tensor) -> tuple[Tensor, Tensor]:
    """E2M1 [..., blocks, 16] and E4M3 scales [..., blocks, 1], as float32."""
    blocks = in_blocks(latent, "latent size")
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = fp8_k_pe((amax * (1.0 / E2M1_MAX)).clamp(min=LEAST_BLOCK_SCALE))
    return e2m1(blocks * (1.0 / scale)), scale


def fp8_k_pe(k_pe: Tensor) -> Tensor:
    """`k_pe` in E4M3 as it is."""
    one = torch.ones((), device=k_pe.device)
    return dequantize(quantize(k_pe, one), one).to(k_pe.dtype)


def bfloat16_k_pe(k_pe: Tensor) -> Tensor:
    """`k_pe` in bfloat16, the only dtype that the engines' kernels serve."""
    return k_pe.bfloat16().to(k_pe.dtype)
