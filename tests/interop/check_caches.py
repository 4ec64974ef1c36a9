"""Caches as our evaluation simulates them beside the engines' own Triton writers, byte for byte.

And attention over them beside vLLM's own reader; and proof that a changed constant is noticed.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import interpreted_triton  # before Triton
import torch
import triton
import triton.language as tl
from outputs import report
from torch import Tensor

from calib.caches import blocks, per_token_head

# where the Makefile puts LMDeploy: apart, as it wants other versions of everything
LMDEPLOY = Path(sys.prefix) / "lmdeploy" / "lmdeploy"
# tokens, heads, head_dim, size of the values
SHAPES = [
    (tokens, heads, dim, size)
    for tokens, heads in ((1, 1), (7, 3), (16, 8), (33, 2))
    for dim, size in ((64, 1.0), (128, 30.0), (96, 1e-4), (80, 4e3), (256, 1e-9))
]
LATENT_SIZES = (1.0, 30.0, 4e3, 1e-2, 1e-4, 1e-9)
DTYPES = (torch.float32, torch.bfloat16)
# what is stored of [tokens, heads, D]: codes, and scales
Stored = Callable[[Tensor], tuple[Tensor, Tensor]]


# ---- the engines' writers; nothing of them is copied ----


def import_lmdeploy() -> None:
    """LMDeploy's packages without what they import for serving."""
    for name in ("", ".pytorch", ".pytorch.kernels", ".pytorch.kernels.cuda"):
        package = sys.modules[f"lmdeploy{name}"] = ModuleType(f"lmdeploy{name}")
        package.__path__ = [str(LMDEPLOY.joinpath(*name.split(".")))]


def vllm_integers(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """`int8_per_token_head`, or INT4: two codes to a byte, zero points in the scales' low bits."""
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as ops
    from vllm.v1.kv_cache_interface import KVQuantMode

    tokens, heads, dim = x.shape
    mode, dtype = KVQuantMode[f"INT{bits}_PER_TOKEN_HEAD"], torch.int8 if bits == 8 else torch.uint8
    codes = [torch.zeros(1, tokens, heads, dim * bits // 8, dtype=dtype) for _ in "kv"]
    scales = [torch.zeros(1, tokens, heads) for _ in "kv"]
    ops.triton_reshape_and_cache_flash_per_token_head_quant(x, x, *codes, *scales, torch.arange(tokens), mode)
    assert torch.equal(codes[0], codes[1])
    assert torch.equal(scales[0], scales[1])
    return codes[0][0], scales[0][0]


def vllm_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """What `fp8_per_token_head` casts to E4M3, and scales: the interpreter's own cast is wrong."""
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as ops

    tokens, heads, dim = x.shape
    limit, least = ops._PER_TOKEN_HEAD_QUANT_PARAMS[torch.float8_e4m3fn]
    scaled, scales = torch.zeros(1, tokens, heads, dim), torch.zeros(1, tokens, heads)
    ops._reshape_cache_per_token_head[(tokens, heads)](
        *(x, x, scaled, scaled, scales, scales, torch.arange(tokens)),
        *(*x.stride()[:2], *x.stride()[:2]),
        *(*scaled.stride()[:3], *scaled.stride()[:3]),
        *(*scales.stride(), *scales.stride()),
        block_size=tokens, head_size=dim, head_size_v=dim,
        HEAD_SIZE_PADDED=triton.next_power_of_2(dim),
        QUANT_MAX=limit, QUANT_MIN=least, IS_INT_QUANT=False,
    )  # fmt: skip
    return scaled[0], scales[0]


def lmdeploy_integers(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes [tokens, heads, D * bits / 8], and scales beside zero points [tokens, heads, 2]."""
    from lmdeploy.pytorch.kernels.cuda.fill_kv_cache import fill_kv_cache

    tokens, heads, dim = x.shape
    block, length = triton.next_power_of_2(tokens), torch.tensor([tokens])
    codes = [torch.zeros(1, block, heads, dim * bits // 8, dtype=torch.uint8) for _ in "kv"]
    meta = [torch.zeros(1, block, heads, 2) for _ in "kv"]
    fill_kv_cache(
        x, x, *codes, q_start_loc=torch.tensor([0]), q_seq_length=length, kv_seq_length=length,
        max_q_seq_length=tokens, block_offsets=torch.zeros(1, 2, dtype=torch.int64),
        k_scales_zeros=meta[0], v_scales_zeros=meta[1], quant_policy=bits,
    )  # fmt: skip
    assert torch.equal(codes[0], codes[1])
    return codes[0][0, :tokens], meta[0][0, :tokens]


def vllm_attention(query: Tensor, x: Tensor, bits: int) -> Tensor:
    """Attention of one query [heads, D] over K = V = `x`, which vLLM stores and reads."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    codes, scales = (x[None] for x in vllm_integers(x, bits))
    out = torch.zeros_like(query[None])
    unified_attention(
        q=query[None].contiguous(), k=codes, v=codes, out=out,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32), max_seqlen_q=1,
        seqused_k=torch.tensor([len(x)], dtype=torch.int32), max_seqlen_k=len(x),
        softmax_scale=query.shape[-1] ** -0.5, causal=True, window_size=(-1, -1),
        block_table=torch.zeros(1, 1, dtype=torch.int32), softcap=0,
        q_descale=None, k_descale=None, v_descale=None,
        kv_quant_mode=KVQuantMode[f"INT{bits}_PER_TOKEN_HEAD"],
        k_scale_cache=scales, v_scale_cache=scales,
    )  # fmt: skip
    return out[0]


def vllm_latents(size: int, name: str, x: Tensor, weight: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3.2's writer: `x` [tokens, 512] normed with `weight`, and records [tokens, size].

    k_pe is stored at angles of 0. The interpreter knows no PTX: E2M1 is ours here.
    """
    from vllm.models.deepseek_v32.common import kernels

    (tokens, width), rope, one = x.shape, k_pe.shape[1], torch.ones
    records = torch.zeros(1, tokens, size, dtype=torch.uint8)
    latent, rotated = torch.zeros(tokens, width), torch.zeros(tokens, rope)
    angles = torch.cat([one(tokens, rope // 2), torch.zeros(tokens, rope // 2)], 1)
    slots = torch.arange(tokens)
    with (
        interpreted_triton.right_casts(),
        patch.object(kernels.tl, "inline_asm_elementwise", _packed),
    ):
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


def int8(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = per_token_head.int8_codes(x)
    return codes.to(torch.int8), scale.squeeze(-1)


def fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Before the cast."""
    scaled, scale = per_token_head.fp8_scaled(x)
    return scaled, scale.squeeze(-1)


def int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Even channels in the low bits."""
    codes, scale, zero = per_token_head.int4_codes(per_token_head.rotate(x.float()).to(x.dtype))
    packed = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return packed, (scale.view(torch.int32) | zero.int()).view(torch.float32).squeeze(-1)


def lmdeploy_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale, zero = per_token_head.zero_point_codes(x, per_token_head.INT8_STEPS)
    return codes.to(torch.uint8), torch.cat((scale, zero), -1)


def lmdeploy_int4(x: Tensor) -> tuple[Tensor, Tensor]:
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

TYPES: dict[str, tuple[Stored, Stored]] = {
    "int8_per_token_head": (int8, partial(vllm_integers, bits=8)),
    "fp8_per_token_head": (fp8, vllm_fp8),
    "int4_per_token_head": (int4, partial(vllm_integers, bits=4)),
    "lmdeploy_int8": (lmdeploy_int8, partial(lmdeploy_integers, bits=8)),
    "lmdeploy_int4": (lmdeploy_int4, partial(lmdeploy_integers, bits=4)),
}
LATENTS = {"fp8_ds_mla": (fp8_ds_mla, 656), "nvfp4_ds_mla": (nvfp4_ds_mla, 352)}  # bytes of a token
# a constant of ours, and what it is not
CHANGED = (
    ("int8_per_token_head", per_token_head, "INT8_MAX", 128),
    ("int8_per_token_head", per_token_head, "LEAST_SCALE", 1e-7),
    ("fp8_per_token_head", per_token_head, "FP8", torch.float8_e4m3fnuz),
    ("fp8_per_token_head", per_token_head, "LEAST_SCALE", 1e-5),
    ("int4_per_token_head", per_token_head, "INT4_STEPS", 16),
    ("int4_per_token_head", per_token_head, "SEED", per_token_head.SEED + 1),
    ("int4_per_token_head", per_token_head, "LEAST_SCALE", 1e-7),
    ("int4_per_token_head", per_token_head, "ZERO_BITS", 5),
    ("lmdeploy_int8", per_token_head, "INT8_STEPS", 256),
    ("lmdeploy_int4", per_token_head, "INT4_STEPS", 16),
    ("fp8_ds_mla", blocks, "E4M3_MAX", 240.0),
    ("fp8_ds_mla", blocks, "LEAST_TILE_SCALE", 1e-6),
    ("nvfp4_ds_mla", blocks, "E2M1_MAX", 4.0),
    ("nvfp4_ds_mla", blocks, "LEAST_BLOCK_SCALE", 2.0**-8),
)


def values(number: int, has_zeros: bool) -> Tensor:
    """Normal values of a shape, some of them the same and some of them halves of others."""
    tokens, heads, dim, size = SHAPES[number]
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(tokens, heads, dim, generator=generator) * size
    x[0, 0, : dim // 2] = x[0, 0, 0]
    x[0, 0, 0] *= 2
    if has_zeros:
        x[-1, -1] = 0
    return x.to(DTYPES[number % len(DTYPES)])


def differences(name: str) -> Iterator[str]:
    """Shapes of which ours and the engine's differ."""
    if name in LATENTS:
        yield from latent_differences(name)
        return
    ours, theirs = TYPES[name]
    for number, shape in enumerate(SHAPES):
        # LMDeploy divides by zero there: NaN, which no integer holds
        x = values(number, has_zeros=not name.startswith("lmdeploy"))
        for what, mine, other in zip(("codes", "scales"), ours(x), theirs(x), strict=True):
            if not torch.equal(mine, other):
                yield f"{name}, {shape}: other {what}"


def latent_differences(name: str) -> Iterator[str]:
    """Sizes of latents of which our record and vLLM's differ."""
    ours, size_of_record = LATENTS[name]
    for number, size in enumerate(LATENT_SIZES):
        generator = torch.Generator().manual_seed(number)
        x, k_pe = (torch.randn(7, width, generator=generator) for width in (512, 64))
        x[-1] = 0
        weight, k_pe = size * torch.randn(512, generator=generator).exp(), k_pe * min(size, 200.0)
        latent, records = vllm_latents(size_of_record, name, x, weight, k_pe)
        wrong = (ours(latent, k_pe) != records).float().mean().item()
        if wrong:
            yield f"{name}, values of {size:g}: {wrong:.2%} of the bytes are others"


def unnoticed() -> Iterator[str]:
    """Constants of ours that can be changed without a difference."""
    for name, module, constant, other in CHANGED:
        per_token_head.signs.cache_clear()
        with patch.object(module, constant, other):
            if next(differences(name), None) is None:
                yield f"{name}: {constant} of {other} is not noticed"
    per_token_head.signs.cache_clear()


def misread() -> Iterator[str]:
    """Types whose rounded K and V give another attention than vLLM's reader computes."""
    for bits, rounded in ((8, per_token_head.int8_per_token_head), (4, per_token_head.int4_per_token_head)):
        for dim in (64, 96):
            generator = torch.Generator().manual_seed(dim)
            x, query = (torch.randn(16, 2, dim, generator=generator) for _ in "kq")
            stored = rounded(x)
            scores = torch.einsum("hd,thd->ht", query[0], stored) * dim**-0.5
            expected = torch.einsum("ht,thd->hd", scores.softmax(-1), stored)
            error = (vllm_attention(query[0], x, bits) - expected).abs().max().item()
            # sums of float32 in another order; an INT4 step is a tenth
            if not error < 1e-4:
                yield f"INT{bits}, heads of {dim}: attention differs by {error:.1e}"


def main() -> None:
    """Compare every type and shape."""
    import_lmdeploy()
    problems = [line for name in (*TYPES, *LATENTS) for line in differences(name)]
    problems += [*misread(), *unnoticed()]
    success = f"{len(SHAPES)} shapes of {len(TYPES)} types, the same bytes; of latents "
    success += f"{len(LATENT_SIZES)} sizes of {len(LATENTS)} types as well"
    report(Path("cache types"), problems, f"{success}; {len(CHANGED)} changed constants noticed")


if __name__ == "__main__":
    main()
