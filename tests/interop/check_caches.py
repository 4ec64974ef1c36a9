"""Caches as our evaluation simulates them beside the engines' own Triton writers, byte for byte.

And attention over them beside vLLM's own reader; and proof that a changed constant is noticed.
"""

import sys
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import interpreted_triton  # before Triton
import torch
import triton
import triton.language as tl
from engine import report
from torch import Tensor

from calib.caches import blocks, per_token_head

# where the Makefile puts LMDeploy: apart, as it wants other versions of everything
LMDEPLOY = Path(sys.prefix) / "lmdeploy" / "lmdeploy"
# tokens, heads; head_dim, size of the values
SHAPES = [
    (*counts, *values)
    for counts in ((1, 1), (7, 3), (16, 8), (33, 2))
    for values in ((64, 1.0), (128, 30.0), (96, 1e-4), (80, 4e3), (256, 1e-9))
]
LATENT_SIZES = (1.0, 30.0, 4e3, 1e-2, 1e-4, 1e-9)
Stored = tuple[Tensor, Tensor]  # of [tokens, heads, D]: codes, and scales


# ---- the engines' writers; nothing of them is copied ----


def import_lmdeploy() -> None:
    """LMDeploy's packages without what they import for serving."""
    for name in ("", ".pytorch", ".pytorch.kernels", ".pytorch.kernels.cuda"):
        package = sys.modules[f"lmdeploy{name}"] = ModuleType(f"lmdeploy{name}")
        package.__path__ = [str(LMDEPLOY.joinpath(*name.split(".")))]


def vllm(x: Tensor, mode: str, dtype: torch.dtype) -> Stored:
    """INT4 has two codes to a byte, and zero points in the scales' low bits."""
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as ops
    from vllm.v1.kv_cache_interface import KVQuantMode

    tokens, heads, dim = x.shape
    codes = torch.zeros(2, 1, tokens, heads, dim // 2 if mode == "INT4" else dim, dtype=dtype)
    scales = torch.zeros(2, 1, tokens, heads)
    with interpreted_triton.right_casts():
        ops.triton_reshape_and_cache_flash_per_token_head_quant(
            *(x, x, *codes, *scales, torch.arange(tokens)), KVQuantMode[f"{mode}_PER_TOKEN_HEAD"]
        )
    return of_both(codes, scales)


def lmdeploy(x: Tensor, bits: int) -> Stored:
    """Codes [tokens, heads, D * bits / 8], and scales beside zero points [tokens, heads, 2]."""
    from lmdeploy.pytorch.kernels.cuda.fill_kv_cache import fill_kv_cache

    tokens, heads, dim = x.shape
    block, length = triton.next_power_of_2(tokens), torch.tensor([tokens])
    codes = torch.zeros(2, 1, block, heads, dim * bits // 8, dtype=torch.uint8)
    meta = torch.zeros(2, 1, block, heads, 2)
    fill_kv_cache(
        x, x, *codes, q_start_loc=torch.tensor([0]), q_seq_length=length, kv_seq_length=length,
        max_q_seq_length=tokens, block_offsets=torch.zeros(1, 2, dtype=torch.int64),
        k_scales_zeros=meta[0], v_scales_zeros=meta[1], quant_policy=bits,
    )  # fmt: skip
    return of_both(codes[:, :, :tokens], meta[:, :, :tokens])


def of_both(codes: Tensor, scales: Tensor) -> Stored:
    """What is the same of K and V."""
    assert torch.equal(*codes.view(torch.uint8))
    assert torch.equal(*scales)
    return codes[0, 0], scales[0, 0]


def vllm_attention(query: Tensor, x: Tensor, mode: str, dtype: torch.dtype) -> Tensor:
    """Attention of one query [heads, D] over K = V = `x`, which vLLM stores and reads."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    codes, scales = (x[None] for x in vllm(x, mode, dtype))
    out = torch.zeros_like(query[None])
    unified_attention(
        q=query[None].contiguous(), k=codes, v=codes, out=out,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32), max_seqlen_q=1,
        seqused_k=torch.tensor([len(x)], dtype=torch.int32), max_seqlen_k=len(x),
        softmax_scale=query.shape[-1] ** -0.5, causal=True, window_size=(-1, -1),
        block_table=torch.zeros(1, 1, dtype=torch.int32), softcap=0,
        q_descale=None, k_descale=None, v_descale=None,
        kv_quant_mode=KVQuantMode[f"{mode}_PER_TOKEN_HEAD"], k_scale_cache=scales, v_scale_cache=scales,
    )  # fmt: skip
    return out[0]


def vllm_latents(size: int, name: str, x: Tensor, weight: Tensor, k_pe: Tensor) -> Stored:
    """DeepSeek-V3.2's writer: `x` [tokens, 512] normed with `weight`, and records [tokens, size].

    k_pe is stored at angles of 0. The interpreter knows no PTX: E2M1 is ours here.
    """
    from vllm.models.deepseek_v32.common import kernels

    (tokens, width), rope, one = x.shape, k_pe.shape[1], torch.ones
    records = torch.zeros(1, tokens, size, dtype=torch.uint8)
    latent, rotated = torch.zeros(tokens, width), torch.zeros(tokens, rope)
    angles = torch.cat([one(tokens, rope // 2), torch.zeros(tokens, rope // 2)], 1)
    slots = torch.arange(tokens)
    own = patch.object(kernels.tl, "inline_asm_elementwise", _packed)
    with interpreted_triton.right_casts(), own:
        kernels.fused_norm_rope(
            *(slots, one(tokens, 16), one(16), 1e-6, x, weight, 1e-6, k_pe, angles),
            *(None, None, None, 1e-6, None, torch.zeros(tokens, 8, dtype=torch.int32)),
            slot_mapping=slots, mla_kv_cache=records, mla_kv_cache_dtype=name, has_indexer=False,
            kv_c_out=latent, k_pe_out=rotated,
        )  # fmt: skip
    assert torch.equal(rotated, k_pe)
    return latent, records[0]


def _packed(asm, constraints, args, dtype, **_):
    """Two E2M1 codes to a byte, the even channel's in the low bits."""
    assert "e2m1x2" in asm
    even, odd = (e2m1_codes(blocks.e2m1(torch.from_numpy(x.handle.data))) for x in args)
    handle = interpreted_triton.interpreter.TensorHandle((even + 16 * odd).int().numpy(), tl.int32)
    return tl.tensor(handle, tl.block_type(tl.int32, list(even.shape)))


def e2m1_codes(values: Tensor) -> Tensor:
    """Codes 0 to 15 of E2M1 values, the sign in the highest bit."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.searchsorted(sizes, values.abs().contiguous())
    return (codes + 8 * torch.signbit(values)).to(torch.uint8)


# ---- ours, laid out as the engines' ----


def int8(x: Tensor) -> Stored:
    codes, scale = per_token_head.int8_codes(x)
    return codes.to(torch.int8), scale.squeeze(-1)


def fp8(x: Tensor) -> Stored:
    scaled, scale = per_token_head.fp8_scaled(x)
    return scaled.to(torch.float8_e4m3fn), scale.squeeze(-1)


def int4(x: Tensor) -> Stored:
    """Even channels in the low bits."""
    codes, scale, zero = per_token_head.int4_codes(per_token_head.rotate(x.float()).to(x.dtype))
    packed = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return packed, (scale.view(torch.int32) | zero.int()).view(torch.float32).squeeze(-1)


def lmdeploy_int8(x: Tensor) -> Stored:
    codes, scale, zero = per_token_head.zero_point_codes(x, per_token_head.INT8_STEPS)
    return codes.to(torch.uint8), torch.cat((scale, zero), -1)


def lmdeploy_int4(x: Tensor) -> Stored:
    """The first half of the head in the low bits."""
    codes, scale, zero = per_token_head.zero_point_codes(x, per_token_head.INT4_STEPS)
    low, high = codes.chunk(2, -1)
    return (low + 16 * high).to(torch.uint8), torch.cat((scale, zero), -1)


def fp8_ds_mla(latent: Tensor, k_pe: Tensor) -> Tensor:
    """Codes, four float32 scales, k_pe in bfloat16."""
    codes, scale = blocks.tile_codes(latent)
    parts = (codes.flatten(-2), scale.flatten(-2), k_pe.bfloat16())
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def nvfp4_ds_mla(latent: Tensor, k_pe: Tensor) -> Tensor:
    """Codes, k_pe, and the block scales in vLLM's order."""
    rounded, scale = blocks.nvfp4_latent_codes(latent)
    codes = e2m1_codes(rounded.flatten(-2))
    packed = codes[..., ::2] + 16 * codes[..., 1::2]
    ordered = scale.view(len(latent), 8, 4).mT.flatten(1)
    eight = (x.to(torch.float8_e4m3fn).view(torch.uint8) for x in (blocks.fp8_unscaled(k_pe), ordered))
    return torch.cat([packed, *eight], -1)


# ---- both compared ----

INT8, INT4 = {"mode": "INT8", "dtype": torch.int8}, {"mode": "INT4", "dtype": torch.uint8}
TYPES = {
    "int8_per_token_head": (int8, partial(vllm, **INT8)),
    "fp8_per_token_head": (fp8, partial(vllm, mode="FP8", dtype=torch.float8_e4m3fn)),
    "int4_per_token_head": (int4, partial(vllm, **INT4)),
    "lmdeploy_int8": (lmdeploy_int8, partial(lmdeploy, bits=8)),
    "lmdeploy_int4": (lmdeploy_int4, partial(lmdeploy, bits=4)),
}
LATENTS = {"fp8_ds_mla": (fp8_ds_mla, 656), "nvfp4_ds_mla": (nvfp4_ds_mla, 352)}  # bytes of a token
# constants of ours, and what they are not
CHANGED = {
    "int8_per_token_head": {"INT8_MAX": 128, "LEAST_SCALE": 1e-7},
    "fp8_per_token_head": {"FP8": torch.float8_e4m3fnuz, "LEAST_SCALE": 1e-5},
    "int4_per_token_head": {"INT4_STEPS": 16, "SEED": 1, "LEAST_SCALE": 1e-7, "ZERO_BITS": 5},
    "lmdeploy_int8": {"INT8_STEPS": 256},
    "lmdeploy_int4": {"INT4_STEPS": 16},
    "fp8_ds_mla": {"E4M3_MAX": 240.0, "LEAST_TILE_SCALE": 1e-6},
    "nvfp4_ds_mla": {"E2M1_MAX": 4.0, "LEAST_BLOCK_SCALE": 2.0**-8},
}


def values(number: int, has_zeros: bool) -> Tensor:
    """Normal values of a shape, some of them the same and some of them halves of others."""
    *shape, size = SHAPES[number]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * size
    x[0, 0, : shape[2] // 2] = x[0, 0, 0]
    x[0, 0, 0] *= 2
    if has_zeros:
        x[-1, -1] = 0
    return x.bfloat16() if number % 2 else x


def differences(name: str):
    """Shapes of which ours and the engine's differ, or sizes of latents."""
    for number, shape in enumerate(SHAPES if name in TYPES else ()):
        # LMDeploy divides by zero there: NaN, which no integer holds
        x = values(number, has_zeros=not name.startswith("lmdeploy"))
        for what, *both in zip(("codes", "scales"), *(stored(x) for stored in TYPES[name]), strict=True):
            if not torch.equal(*(x.view(torch.uint8) for x in both)):
                yield f"{name}, {shape}: other {what}"
    for number, size in enumerate(LATENT_SIZES if name in LATENTS else ()):
        ours, size_of_record = LATENTS[name]
        generator = torch.Generator().manual_seed(number)
        x, k_pe = (torch.randn(7, width, generator=generator) for width in (512, 64))
        x[-1] = 0
        weight, k_pe = size * torch.randn(512, generator=generator).exp(), k_pe * min(size, 200.0)
        latent, records = vllm_latents(size_of_record, name, x, weight, k_pe)
        if wrong := (ours(latent, k_pe) != records).float().mean().item():
            yield f"{name}, values of {size:g}: {wrong:.2%} of the bytes are others"


def unnoticed():
    """Constants of ours that can be changed without a difference."""
    for name, changes in CHANGED.items():
        for constant, other in changes.items():
            per_token_head.signs.cache_clear()
            with patch.object(per_token_head if name in TYPES else blocks, constant, other):
                if next(differences(name), None) is None:
                    yield f"{name}: {constant} of {other} is not noticed"
    per_token_head.signs.cache_clear()


def misread():
    """Types whose rounded K and V give another attention than vLLM's reader computes."""
    types = ((INT8, per_token_head.int8_per_token_head), (INT4, per_token_head.int4_per_token_head))
    for (how, rounded), dim in product(types, (64, 96)):
        generator = torch.Generator().manual_seed(dim)
        x, query = (torch.randn(16, 2, dim, generator=generator) for _ in "kq")
        stored = rounded(x)
        scores = torch.einsum("hd,thd->ht", query[0], stored) * dim**-0.5
        expected = torch.einsum("ht,thd->hd", scores.softmax(-1), stored)
        error = (vllm_attention(query[0], x, **how) - expected).abs().max().item()
        # sums of float32 in another order; an INT4 step is a tenth
        if not error < 1e-4:
            yield f"{how['mode']}, heads of {dim}: attention differs by {error:.1e}"


if __name__ == "__main__":
    import_lmdeploy()
    problems = [line for name in (*TYPES, *LATENTS) for line in differences(name)]
    problems += [*misread(), *unnoticed()]
    success = (
        f"{len(SHAPES)} shapes of {len(TYPES)} types, the same bytes; of latents {len(LATENT_SIZES)} sizes"
    )
    constants = sum(map(len, CHANGED.values()))
    report("cache types", problems, f"{success} of {len(LATENTS)}; {constants} changed constants noticed")
