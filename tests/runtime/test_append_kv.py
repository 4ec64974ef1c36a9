"""Quantise and store: kernel against reference, bit for bit, and both against hand counts."""

import re
from dataclasses import replace

import pytest
import torch
from checks import assert_rounded, assert_stored
from paged import FORMATS, RUNTIME, Case
from paged import poisoned as poison

from fp8kv_runtime.storage import BLOCK_DTYPES, KVBlocks

# NaN and Inf are among the inputs
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CASES = [  # every value of every option
    Case((), head_dim=32, format="e4m3fn", dtype=F16, k_scales="tensor", v_scales="channel"),
    Case((), head_dim=80, format="e4m3fnuz", dtype=BF16, k_scales="head", v_scales="head", center=True),
    Case((), head_dim=128, format="e5m2", dtype=F32, k_scales="channel", v_scales="tensor"),
    Case((), head_dim=80, format="float16", dtype=F32, k_scales="channel", v_scales="channel", center=True),
]


def both(key, value, blocks, slots):
    """What kernel and reference make of copies of the same blocks."""
    made = []
    for module in (RUNTIME.append_kv, RUNTIME.reference):
        codes = blocks.codes.view(torch.uint8).clone().view(blocks.codes.dtype)
        made.append(replace(blocks, codes=codes, counts=blocks.counts.clone()))
        module.append_kv(key, value, made[-1], slots)
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.format)
def test_kernel_stores_what_the_reference_stores(case, device):
    assert_stored(case, device)
    if case.format in FORMATS:
        assert_rounded(case.format, device)


def plain(format="e4m3fn", *, head_dim=16, kv_heads=1, k_scale=1.0, v_scale=1.0, device="cpu"):
    """Four poisoned blocks of 16 tokens that count."""
    case = Case((), head_dim=head_dim, kv_heads=kv_heads, format=format)
    return KVBlocks(
        poison(4, case, device).view(BLOCK_DTYPES[format]),
        torch.full((1,), k_scale, device=device),
        torch.full((1,), v_scale, device=device),
        counts=torch.zeros(2, kv_heads, 3, dtype=torch.int64, device=device),
    )


@pytest.mark.parametrize("format", [*FORMATS, "float16"])
def test_counts_by_hand(format, device):
    ends = {"e4m3fn": (448.0, 2.0**-9), "e4m3fnuz": (240.0, 2.0**-10)}
    ends |= {"e5m2": (57344.0, 2.0**-16), "float16": (65504.0, 2.0**-24)}
    largest, smallest = ends[format]
    saturated = [largest * 1.001, -largest * 2, 3e38]
    underflowed = [smallest / 2, -smallest / 2, smallest / 4, 1e-30, -1e-30]  # ties go to even
    nonfinite = [torch.inf, -torch.inf, torch.nan, -torch.inf]
    neither = [0.0, -0.0, largest, -largest, smallest * 0.501, -smallest, 1.0]
    values = torch.tensor([*saturated, *underflowed, *nonfinite, *neither] + [1.0] * 13)
    key = torch.stack([values, values.flip(0)]).view(2, 1, 32).to(device)
    empty, slots = plain(format, head_dim=32, device=device), torch.tensor([3, 40], device=device)
    for blocks in both(key, torch.ones_like(key), empty, slots):
        assert blocks.counts.tolist() == [[[6, 10, 8]], [[0, 0, 0]]]
        for again in both(key, torch.ones_like(key), blocks, slots):  # they add up, of no tokens to nothing
            assert again.counts.tolist() == [[[12, 20, 16]], [[0, 0, 0]]]
            for same in both(key[:0], key[:0], again, slots[:0]):
                assert torch.equal(same.counts, again.counts)


def test_inputs_that_are_views(device):
    """K and V out of a fused QKV tensor, of other strides each; and scales seen from one value."""
    fused = torch.randn(37, 7, 80, device=device)
    key, value = fused[:, 2:4], fused.transpose(1, 2).contiguous().transpose(1, 2)[:, 4:6]
    assert value.stride(2) != 1
    blocks = replace(
        plain(head_dim=80, kv_heads=2, device=device),
        k_scale=torch.tensor([0.01, 0.02, 0.5], device=device)[::2],
        v_scale=torch.tensor([0.03], device=device).expand(2),
    )
    slots = torch.randperm(64, device=device)[:37]
    strided = torch.stack([slots, slots * 0 - 7], 1)[:, 0]
    views = [made.codes.view(torch.uint8) for made in both(key, value, blocks, strided)]
    contiguous = both(key.contiguous(), value.contiguous(), blocks, slots)[0].codes.view(torch.uint8)
    assert all(torch.equal(codes, contiguous) for codes in views)


def test_what_the_kernel_takes_for_granted_is_checked():
    new, slots, own = torch.zeros(2, 1, 16), torch.tensor([0, 1]), "[2, 1, 16] float32 on cpu"
    for key, value, at, message in (
        (new[:1], new, slots, f"key must be {own}, got [1, 1, 16] float32 on cpu"),
        (new.to("meta"), new, slots, f"key must be {own}, got [2, 1, 16] float32 on meta"),
        (new, new.half(), slots, f"value must be {own}, got [2, 1, 16] float16 on cpu"),
        (new, new[..., :8], slots, f"value must be {own}, got [2, 1, 8] float32 on cpu"),
        (new, new, slots.int(), "slot_mapping must be [2] int64 on cpu, got [2] int32 on cpu"),
        (new, new, slots.to("meta"), "slot_mapping must be [2] int64 on cpu, got [2] int64 on meta"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            RUNTIME.append_kv.append_kv(key, value, plain(), at)


def test_blocks_scales_and_counts_that_kernels_cannot_read_are_refused():
    blocks, one = replace(plain(), k_center=torch.zeros(1, 16)), torch.ones(1)
    described = "blocks must be [2, num_blocks, K, block_size, D] FP8 or float16, contiguous, got "
    counts = "counts must be [2, 1, 3] int64 on cpu, got "
    scale = "v_scale must be [1] or [1] or [1, 16] float32 on cpu, got [1] float32 on meta"
    for name, value, message in (
        ("k_scale", one * torch.nan, "k_scale must be finite and positive"),
        ("k_scale", one * 0, "k_scale must be finite and positive"),
        ("k_center", torch.full((1, 16), torch.inf), "k_center must be finite"),
        ("v_scale", one.to("meta"), scale),
        ("k_center", one, "k_center must be [1, 16] float32 on cpu, got [1] float32 on cpu"),
        ("counts", torch.zeros(2, 1, 3), counts + "[2, 1, 3] float32 on cpu"),
        ("counts", torch.zeros(2, 3, dtype=torch.int64), counts + "[2, 3] int64 on cpu"),
        ("codes", blocks.codes[0], described + "[4, 1, 16, 16] float8_e4m3fn on cpu"),
        ("codes", blocks.codes.view(torch.uint8), described + "[2, 4, 1, 16, 16] uint8 on cpu"),
        ("codes", blocks.codes.mT, described + "[2, 4, 1, 16, 16] float8_e4m3fn on cpu"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            replace(blocks, **{name: value})
