"""Caches as our evaluation simulates them beside the engines' own Triton writers, byte for byte.

And attention over them beside vLLM's own reader; and proof that a changed constant is noticed.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import cache_writers as writers
import latent_writer
import torch
from outputs import report
from torch import Tensor

from calib.caches import blocks, per_token_head

# tokens, heads, head_dim, size of the values
SHAPES = [
    (tokens, heads, dim, size)
    for tokens, heads in ((1, 1), (7, 3), (16, 8), (33, 2))
    for dim, size in ((64, 1.0), (128, 30.0), (96, 1e-4), (80, 4e3), (256, 1e-9))
]
LATENT_SIZES = (1.0, 30.0, 4e3, 1e-2, 1e-4, 1e-9)
DTYPES = (torch.float32, torch.bfloat16)

# what is stored: arrays to compare with the engine's
Stored = Callable[[Tensor], tuple[Tensor, Tensor]]


def int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Our int8_per_token_head."""
    codes, scale = per_token_head.int8_codes(x)
    return codes.to(torch.int8), scale.squeeze(-1)


def fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Our fp8_per_token_head, before the cast."""
    scaled, scale = per_token_head.fp8_scaled(x)
    return scaled, scale.squeeze(-1)


def int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Our int4_per_token_head: even channels in the low bits."""
    codes, scale, zero = per_token_head.int4_codes(per_token_head.rotate(x.float()).to(x.dtype))
    packed = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return packed, (scale.view(torch.int32) | zero.int()).view(torch.float32).squeeze(-1)


def lmdeploy_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Our lmdeploy_int8."""
    codes, scale, zero = per_token_head.zero_point_codes(x, per_token_head.INT8_STEPS)
    return codes.to(torch.uint8), torch.cat((scale, zero), -1)


def lmdeploy_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Our lmdeploy_int4: the first half of the head in the low bits."""
    codes, scale, zero = per_token_head.zero_point_codes(x, per_token_head.INT4_STEPS)
    low, high = codes.chunk(2, -1)
    return (low + 16 * high).to(torch.uint8), torch.cat((scale, zero), -1)


def fp8_ds_mla(latent: Tensor, k_pe: Tensor) -> Tensor:
    """Our fp8_ds_mla: codes, four float32 scales, k_pe in bfloat16."""
    codes, scale = blocks.tile_codes(latent)
    parts = (codes.flatten(-2), scale.flatten(-2), k_pe.bfloat16())
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def nvfp4_ds_mla(latent: Tensor, k_pe: Tensor) -> Tensor:
    """Our nvfp4_ds_mla: codes, k_pe, and the block scales in vLLM's order."""
    rounded, scale = blocks.nvfp4_latent_codes(latent)
    codes = latent_writer.e2m1_codes(rounded.flatten(-2))
    packed = codes[..., ::2] + 16 * codes[..., 1::2]
    ordered = scale.view(len(latent), 8, 4).mT.flatten(1)
    eight = (each.to(torch.float8_e4m3fn).view(torch.uint8) for each in (blocks.fp8_unscaled(k_pe), ordered))
    return torch.cat([packed, *eight], -1)


LATENTS = {"fp8_ds_mla": fp8_ds_mla, "nvfp4_ds_mla": nvfp4_ds_mla}

TYPES: dict[str, tuple[Stored, Stored]] = {
    "int8_per_token_head": (int8, writers.vllm_int8),
    "fp8_per_token_head": (fp8, writers.vllm_fp8),
    "int4_per_token_head": (int4, writers.vllm_int4),
    "lmdeploy_int8": (lmdeploy_int8, lambda x: writers.lmdeploy(x, 8)),
    "lmdeploy_int4": (lmdeploy_int4, lambda x: writers.lmdeploy(x, 4)),
}

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
    for number, size in enumerate(LATENT_SIZES):
        generator = torch.Generator().manual_seed(number)
        x, k_pe = (torch.randn(7, width, generator=generator) for width in (512, 64))
        x[-1] = 0
        weight = size * torch.randn(512, generator=generator).exp()
        written = latent_writer.write(name, x, weight, k_pe * min(size, 200.0))
        ours = LATENTS[name](written.latent, written.k_pe)
        if not torch.equal(ours, written.record):
            wrong = (ours != written.record).float().mean().item()
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
            held = rounded(x)
            scores = torch.einsum("hd,thd->ht", query[0], held) * dim**-0.5
            expected = torch.einsum("ht,thd->hd", scores.softmax(-1), held)
            error = (writers.vllm_attention(query[0], x, bits) - expected).abs().max().item()
            # sums of float32 in another order; an INT4 step is a tenth
            if not error < 1e-4:
                yield f"INT{bits}, heads of {dim}: attention differs by {error:.1e}"


def main() -> None:
    """Compare every type and shape."""
    writers.install()
    problems = [line for name in (*TYPES, *LATENTS) for line in differences(name)]
    problems += [*misread(), *unnoticed()]
    told = f"{len(SHAPES)} shapes of {len(TYPES)} types, the same bytes; of latents "
    told += f"{len(LATENT_SIZES)} sizes of {len(LATENTS)} types as well"
    report(Path("cache types"), problems, f"{told}; {len(CHANGED)} changed constants noticed")


if __name__ == "__main__":
    main()
