"""Caches as our evaluation simulates them beside the engines' own Triton writers, byte for byte.

And attention over them beside vLLM's own reader.
"""

import sys
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import interpreted_triton  # before Triton
import torch
import triton
import triton.language as tl
from engine import report
from torch import Tensor

from calib.caches import blocks, per_token_head
from calib.caches import turboquant as turbo
from calib.caches.rounding import rounding
from calib.caches.types import Layers, Shape

# packages without what they import for serving; each in a folder, as they want other versions
HOLLOW = """
    lmdeploy lmdeploy.pytorch lmdeploy.pytorch.kernels lmdeploy.pytorch.kernels.cuda sglang sglang.kernels
    sglang.kernels.ops sglang.kernels.ops.quantization sglang.srt sglang.srt.layers
    sglang.srt.layers.quantization
"""
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
    codes, meta = lmdeploy_cache(bits, (bits, bits), x, torch.float32)
    return of_both(*(torch.stack(part)[:, :, : len(x)] for part in (codes, meta)))


def lmdeploy_cache(policy: int, bits: tuple[int, int], x: Tensor, dtype: torch.dtype, **read):
    """Codes and scales of K and V in one block; with `read`, K and V as they are read from it."""
    from lmdeploy.pytorch.kernels.cuda.fill_kv_cache import fill_kv_cache
    from lmdeploy.pytorch.kernels.cuda.flatten_kv_cache import flatten_kv_cache

    tokens, heads, dim = x.shape
    block, length = triton.next_power_of_2(tokens), torch.tensor([tokens])
    codes = [torch.zeros(1, block, heads, dim * n // 8, dtype=torch.uint8) for n in bits]
    meta = [torch.zeros(1, block, heads, 2, dtype=dtype) for _ in bits]
    offsets = torch.zeros(1, 2, dtype=torch.int64)
    how = {"k_scales_zeros": meta[0], "v_scales_zeros": meta[1], "quant_policy": policy}
    with interpreted_triton.right_casts():
        fill_kv_cache(
            x, x, *codes, q_start_loc=torch.tensor([0]), q_seq_length=length, kv_seq_length=length,
            max_q_seq_length=tokens, block_offsets=offsets, **how,
        )  # fmt: skip
        return flatten_kv_cache(*codes, length, offsets[:, :1], **how, **read) if read else (codes, meta)


def lmdeploy_turboquant(x: Tensor) -> Stored:
    """K, then V; of K's lengths two, of V's one."""
    codes, (k, v) = lmdeploy_cache(42, (4, 2), x, x.dtype)
    lengths = torch.cat([k, v[..., :1]], -1)
    read = lmdeploy_cache(42, (4, 2), x, x.dtype, out_size=len(x), out_dtype=x.dtype, flatten_kv_layout="shd")
    check_read("lmdeploy_turboquant", x, *(part.float() @ turbo.hadamard(x.shape[-1]) for part in read))
    return torch.cat(codes, -1)[0, : len(x)], lengths[0, : len(x)]


def check_read(name: str, x: Tensor, *read: Tensor) -> None:
    """Our rounding of K and V `x` is what the engine reads."""
    ours = rounding(name, Layers({0: Shape(1, *x.shape[2:] * 2)}, 1))(0, x, x)
    assert all(map(torch.equal, ours, (part.to(x.dtype) for part in read))), name


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
    return packed(codes, 4), (scale.view(torch.int32) | zero.int()).view(torch.float32).squeeze(-1)


def lmdeploy_integers(bits: int, x: Tensor) -> Stored:
    steps = per_token_head.INT8_STEPS if bits == 8 else per_token_head.INT4_STEPS
    codes, scale, zero = per_token_head.zero_point_codes(x, steps)
    return in_parts(codes, 8 // bits), torch.cat((scale, zero), -1)


def own_lmdeploy_turboquant(x: Tensor) -> Stored:
    (k, *lengths), (v, length) = (turbo.lmdeploy_codes(x, bits) for bits in (3, 2))
    return torch.cat([in_parts(k, 2), in_parts(v, 4)], -1), torch.cat([*lengths, length], -1).to(x.dtype)


def in_parts(codes: Tensor, count: int) -> Tensor:
    """Codes that are so many parts of a head apart, in a byte; the first in its low bits."""
    shifts = 8 // count * torch.arange(count)[:, None]
    return (codes.long().unflatten(-1, (count, -1)) << shifts).sum(-2).byte()


def fp8_ds_mla(latent: Tensor, k_pe: Tensor) -> Tensor:
    """Codes, four float32 scales, k_pe in bfloat16."""
    codes, scale = blocks.tile_codes(latent)
    parts = (codes.flatten(-2), scale.flatten(-2), k_pe.bfloat16())
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def nvfp4_ds_mla(latent: Tensor, k_pe: Tensor) -> Tensor:
    """Codes, k_pe, and the block scales in vLLM's order."""
    rounded, scale = blocks.nvfp4_latent_codes(latent)
    ordered = scale.view(len(latent), 8, 4).mT.flatten(1)
    eight = (x.to(torch.float8_e4m3fn).view(torch.uint8) for x in (blocks.fp8_unscaled(k_pe), ordered))
    return torch.cat([packed(e2m1_codes(rounded.flatten(-2)), 4), *eight], -1)


def turboquant(key_bits: int, bits: int, x: Tensor) -> Stored:
    """Bytes of K, then V, in the place of codes; scales are among them."""
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
    from vllm.v1.attention.ops import triton_turboquant_store as ops

    (tokens, heads, size), levels = x.shape, get_centroids(x.shape[-1], key_bits % 8 or 4)
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


def ultraquant(x: Tensor) -> Stored:
    from vllm.v1.attention.ops.ultraquant import reference, triton_store

    tokens, heads, size = x.shape
    cache = torch.zeros(1, tokens, heads, size + size // 16, dtype=torch.uint8)
    triton_store.ultraquant_store(x, x, cache, torch.arange(tokens))
    halves = (part.split((size // 2, size // 32), -1) for part in cache[0].chunk(2, -1))
    k, v = (reference.ultraquant_dequant(reference.UltraQuantEncoded(*half), size) for half in halves)
    check_read("ultraquant_4bit", x, blocks.rotate(k), v)
    return cache[0], cache.new_empty(0)


def own_ultraquant(x: Tensor) -> Stored:
    k, v = (own_blocks(blocks.ultraquant_parts, each) for each in (blocks.rotate(x), x))
    return torch.cat([*k, *v], -1), k[0].new_empty(0)


def own_blocks(parts_of, x: Tensor) -> Stored:
    """Codes, and exponents as E8M0."""
    values, exponent = parts_of(x)
    codes, is_eight = values.flatten(-2), parts_of is blocks.mxfp8_parts
    codes = codes.to(MODES["FP8"]) if is_eight else packed(e2m1_codes(codes), 4)
    return codes, (exponent.clamp(min=-127) + 127).byte().flatten(-2)


def mxfp8(x: Tensor) -> Stored:
    from sglang.kernels.ops.quantization.mxfp8_quant import to_mxfp8

    with interpreted_triton.right_casts():
        return to_mxfp8(x)


def fp4_mx_block16(x: Tensor) -> Stored:
    from sglang.srt.layers.quantization.kvfp4_tensor import FP4MXBlock16KVQuantizeUtil as Writer

    codes, scales = Writer.batched_quantize(x)
    check_read("fp4_mx_block16", x, *[Writer.batched_dequantize(codes, scales, x.dtype)] * 2)
    return codes, scales.unflatten(-1, (x.shape[1], -1))


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
TYPES |= {
    "lmdeploy_turboquant": (own_lmdeploy_turboquant, lmdeploy_turboquant),
    "ultraquant_4bit": (own_ultraquant, ultraquant),
    "mxfp8": (partial(own_blocks, blocks.mxfp8_parts), mxfp8),
    "fp4_mx_block16": (partial(own_blocks, blocks.fp4_mx_parts), fp4_mx_block16),
}
LATENTS = {"fp8_ds_mla": (fp8_ds_mla, 656), "nvfp4_ds_mla": (nvfp4_ds_mla, 352)}  # bytes of a token


def differences(name: str):
    for number, (*shape, size) in enumerate(SHAPES):
        if ("quant" in name and shape[2] & (shape[2] - 1)) or (name == "mxfp8" and shape[2] % 32):
            continue
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * size
        x[0, 0, : shape[2] // 2] = x[0, 0, 0]  # some values the same, and some of them halves of others
        x[0, 0, 0] *= 2
        # LMDeploy divides by zero there: NaN, which no integer holds
        if not name.startswith("lmdeploy_int"):
            x[-1, -1] = 0
        wide = x.half() if name in ("lmdeploy_turboquant", "ultraquant_4bit") else x  # as they are served
        mine, theirs = (stored(x.bfloat16() if number % 2 else wide) for stored in TYPES[name])
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
    for name in HOLLOW.split():
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(Path(sys.prefix, name.partition(".")[0], *name.split(".")))]
    sys.modules["sglang.srt.runtime_context"] = SimpleNamespace(get_platform=None)
    problems = [line for name in sys.argv[1:] or TYPES for line in differences(name)]
    problems += [*misread(), *(line for name in LATENTS for line in latent_differences(name))]
    success = f"{len(SHAPES)} shapes of {len(TYPES)} types, the same bytes; of latents"
    report("cache types", problems, f"{success} {len(LATENT_SIZES)} sizes of {len(LATENTS)}")
