"""Caches as our evaluation simulates them beside the engines' own Triton writers, byte for byte.

And attention over them beside vLLM's own reader.
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
from calib.caches import turboquant as turbo

# where the Makefile puts LMDeploy: apart, as it wants other versions of everything
LMDEPLOY = Path(sys.prefix) / "lmdeploy" / "lmdeploy"
# tokens, heads; head_dim, size of the values
SHAPES = [
    (*counts, *values)
    for counts in ((1, 1), (7, 3), (16, 8), (33, 2))
    for values in ((64, 1.0), (128, 30.0), (96, 1e-4), (80, 4e3), (256, 1e-9))
]
LATENT_SIZES = (1.0, 30.0, 4e3, 1e-2, 1e-4, 1e-9)
MODES = {"INT8": torch.int8, "FP8": torch.float8_e4m3fn, "INT4": torch.uint8}
Stored = tuple[Tensor, Tensor]  # of [tokens, heads, D]: codes, and scales


def vllm(mode: str, x: Tensor) -> Stored:
    """INT4 has two codes to a byte, and zero points in the scales' low bits."""
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as ops
    from vllm.v1.kv_cache_interface import KVQuantMode

    tokens, heads, dim = x.shape
    codes = torch.zeros(2, 1, tokens, heads, dim // 2 if mode == "INT4" else dim, dtype=MODES[mode])
    scales, mode = torch.zeros(2, 1, tokens, heads), KVQuantMode[f"{mode}_PER_TOKEN_HEAD"]
    write = ops.triton_reshape_and_cache_flash_per_token_head_quant
    with interpreted_triton.right_casts():
        write(x, x, *codes, *scales, torch.arange(tokens), mode)
    return of_both(codes, scales)


def lmdeploy(bits: int, x: Tensor) -> Stored:
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


def one_byte(codes_of, dtype: torch.dtype, x: Tensor) -> Stored:
    codes, scale = codes_of(x)
    return codes.to(dtype), scale.squeeze(-1)


def int4(x: Tensor) -> Stored:
    """Even channels in the low bits."""
    codes, scale, zero = per_token_head.int4_codes(per_token_head.rotate(x.float()).to(x.dtype))
    packed = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return packed, (scale.view(torch.int32) | zero.int()).view(torch.float32).squeeze(-1)


def lmdeploy_integers(bits: int, x: Tensor) -> Stored:
    """The first half of an INT4 head in the low bits."""
    steps = per_token_head.INT8_STEPS if bits == 8 else per_token_head.INT4_STEPS
    codes, scale, zero = per_token_head.zero_point_codes(x, steps)
    if bits == 4:
        codes = codes.chunk(2, -1)[0] + 16 * codes.chunk(2, -1)[1]
    return codes.to(torch.uint8), torch.cat((scale, zero), -1)


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


def turboquant(key_bits: int, bits: int, x: Tensor) -> Stored:
    """Bytes of K, then V, in the place of codes; scales are among them."""
    from vllm.v1.attention.ops import triton_turboquant_store as ops

    (tokens, heads, size), levels = x.shape, turbo.centroids(x.shape[-1], key_bits % 8 or 4)
    key_bytes = size * key_bits // 8 + 2 * (key_bits < 8)
    cache = torch.zeros(1, tokens, heads, key_bytes + size * bits // 8 + 4, dtype=torch.uint8)
    tables = turbo.hadamard(size), (levels[:-1] + levels[1:]) / 2
    with interpreted_triton.right_casts(), patch.object(ops, "_use_fp8_e4b15", lambda device: 0):
        ops.triton_turboquant_store(
            x, x, cache, torch.arange(tokens), *tables, key_bits % 8 or 4, key_bytes, bits, key_bits == 8
        )
    return cache[0], cache.new_empty(0)


def own_turboquant(key_bits: int, bits: int, x: Tensor) -> Stored:
    codes, *scale = turbo.value_codes(x, bits)
    v = [packed(codes, bits), *(part.half().view(torch.uint8) for part in scale)]
    if key_bits == 8:
        k = [x.float().clamp(-448, 448).to(MODES["FP8"]).view(torch.uint8)]
    else:
        codes, length = turbo.key_codes(x, key_bits)
        k = [packed(codes, key_bits), length.half().view(torch.uint8)]
    return torch.cat([*k, *v], -1), v[0].new_empty(0)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes of 3 or 4 bits [..., D] in bytes, the first in the lowest bits."""
    groups = codes.long().unflatten(-1, (-1, 8)) << bits * torch.arange(8)
    return (groups.sum(-1, keepdim=True) >> 8 * torch.arange(bits)).byte().flatten(-2)


TYPES = {
    "int8_per_token_head": (partial(one_byte, per_token_head.int8_codes, torch.int8), partial(vllm, "INT8")),
    "fp8_per_token_head": (partial(one_byte, per_token_head.fp8_scaled, MODES["FP8"]), partial(vllm, "FP8")),
    "int4_per_token_head": (int4, partial(vllm, "INT4")),
    "lmdeploy_int8": (partial(lmdeploy_integers, 8), partial(lmdeploy, 8)),
    "lmdeploy_int4": (partial(lmdeploy_integers, 4), partial(lmdeploy, 4)),
}
BITS = {"k8v4": (8, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}
TYPES |= {f"turboquant_{x}": (partial(own_turboquant, *n), partial(turboquant, *n)) for x, n in BITS.items()}
LATENTS = {"fp8_ds_mla": (fp8_ds_mla, 656), "nvfp4_ds_mla": (nvfp4_ds_mla, 352)}  # bytes of a token


def differences(name: str):
    for number, (*shape, size) in enumerate(SHAPES):
        if name.startswith("turboquant") and shape[2] & (shape[2] - 1):
            continue
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * size
        x[0, 0, : shape[2] // 2] = x[0, 0, 0]  # some values the same, and some of them halves of others
        x[0, 0, 0] *= 2
        # LMDeploy divides by zero there: NaN, which no integer holds
        if not name.startswith("lmdeploy"):
            x[-1, -1] = 0
        mine, theirs = (stored(x.bfloat16() if number % 2 else x) for stored in TYPES[name])
        for what, one, other in zip(("codes", "scales"), mine, theirs, strict=True):
            if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                yield f"{name}, {shape}, values of {size:g}: other {what}"


def latent_differences(name: str):
    ours, size_of_record = LATENTS[name]
    for number, size in enumerate(LATENT_SIZES):
        generator = torch.Generator().manual_seed(number)
        x, k_pe = (torch.randn(7, width, generator=generator) for width in (512, 64))
        x[-1] = 0
        weight, k_pe = size * torch.randn(512, generator=generator).exp(), k_pe * min(size, 200.0)
        latent, records = vllm_latents(size_of_record, name, x, weight, k_pe)
        if wrong := (ours(latent, k_pe) != records).float().mean().item():
            yield f"{name}, values of {size:g}: {wrong:.2%} of the bytes are others"


def misread():
    """Types whose rounded K and V give another attention than vLLM's reader computes."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    types = {"INT8": per_token_head.int8_per_token_head, "INT4": per_token_head.int4_per_token_head}
    for (mode, rounded), dim in product(types.items(), (64, 96)):
        generator = torch.Generator().manual_seed(dim)
        x, query = (torch.randn(16, 2, dim, generator=generator) for _ in "kq")
        scores = torch.einsum("hd,thd->ht", query[0], rounded(x)) * dim**-0.5
        expected = torch.einsum("ht,thd->hd", scores.softmax(-1), rounded(x))
        codes, scales = (part[None] for part in vllm(mode, x))
        how = {"k_scale_cache": scales, "v_scale_cache": scales, "k_descale": None, "v_descale": None}
        how["kv_quant_mode"] = KVQuantMode[f"{mode}_PER_TOKEN_HEAD"]
        out = torch.zeros(1, 2, dim)
        interpreted_triton.vllm_attention(query[:1], codes, codes, len(x), out, **how)
        error = (out[0] - expected).abs().max().item()
        # sums of float32 in another order; an INT4 step is a tenth
        if not error < 1e-4:
            yield f"{mode}, heads of {dim}: attention differs by {error:.1e}"


if __name__ == "__main__":
    # LMDeploy's packages without what they import for serving
    for name in ("", ".pytorch", ".pytorch.kernels", ".pytorch.kernels.cuda"):
        package = sys.modules[f"lmdeploy{name}"] = ModuleType(f"lmdeploy{name}")
        package.__path__ = [str(LMDEPLOY.joinpath(*name.split(".")))]
    problems = [line for name in TYPES for line in differences(name)]
    problems += [*misread(), *(line for name in LATENTS for line in latent_differences(name))]
    success = f"{len(SHAPES)} shapes of {len(TYPES)} types, the same bytes; of latents"
    report("cache types", problems, f"{success} {len(LATENT_SIZES)} sizes of {len(LATENTS)}")
