"""Quantise and store: kernel against reference, bit for bit, and both against hand counts."""

import re
from dataclasses import replace

import pytest
import torch
from checks import assert_rounded, assert_stored
from paged import FORMATS, NAN_CODE, RUNTIME, Case
from paged import poisoned as poison

from fp8kv_runtime.storage import BLOCK_DTYPES, KVBlocks

# NaN and Inf are among the inputs
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

# every value of every option
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CASES = [
    Case((), head_dim=32, format="e4m3fn", dtype=F16, k_scales="tensor", v_scales="channel"),
    Case((), head_dim=80, format="e4m3fnuz", dtype=BF16, k_scales="head", v_scales="head", center=True),
    Case((), head_dim=128, format="e5m2", dtype=F32, k_scales="channel", v_scales="tensor"),
    Case((), head_dim=80, format="e4m3fn", dtype=F32, k_scales="channel", v_scales="head", center=True),
    Case((), head_dim=128, format="e4m3fnuz", dtype=F16, k_scales="tensor", v_scales="tensor"),
    Case((), head_dim=32, format="e5m2", dtype=BF16, k_scales="head", v_scales="channel", center=True),
    Case((), head_dim=80, format="float16", dtype=F32, k_scales="channel", v_scales="channel", center=True),
]


def both(key, value, blocks, slots):
    """What kernel and reference make of copies of the same blocks."""
    made = []
    for module in (RUNTIME.append_kv, RUNTIME.reference):
        codes = blocks.codes.view(torch.uint8).clone().view(blocks.codes.dtype)
        counts = None if blocks.counts is None else blocks.counts.clone()
        copy = replace(blocks, codes=codes, counts=counts)
        module.append_kv(key, value, copy, slots)
        made.append(copy)
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"D{c.head_dim}-{c.format}-{c.k_scales}")
def test_kernel_stores_what_the_reference_stores(case, device):
    assert_stored(case, device)


@pytest.mark.parametrize("format", FORMATS)
def test_all_bfloat16_values(format, device):
    assert_rounded(format, device)


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
    largest, smallest = {
        "e4m3fn": (448.0, 2.0**-9),
        "e4m3fnuz": (240.0, 2.0**-10),
        "e5m2": (57344.0, 2.0**-16),
        "float16": (65504.0, 2.0**-24),
    }[format]
    saturated = [largest * 1.001, -largest * 2, 3e38]
    underflowed = [smallest / 2, -smallest / 2, smallest / 4, 1e-30, -1e-30]  # ties go to even
    nonfinite = [torch.inf, -torch.inf, torch.nan, -torch.inf]
    neither = [0.0, -0.0, largest, -largest, smallest * 0.501, -smallest, 1.0]
    values = torch.tensor([*saturated, *underflowed, *nonfinite, *neither] + [1.0] * 13)
    key = torch.stack([values, values.flip(0)]).view(2, 1, 32).to(device)
    for blocks in both(key, torch.ones_like(key), plain(format, head_dim=32, device=device),
                       torch.tensor([3, 40], device=device)):  # fmt: skip
        assert blocks.counts.tolist() == [[[6, 10, 8]], [[0, 0, 0]]]


def test_counts_are_per_head_in_units_of_the_scale_and_add_up(device):
    blocks = plain(kv_heads=2, k_scale=2.0, v_scale=0.5, device=device)
    key, value = (torch.ones(3, 2, 16, device=device) for _ in "kv")
    key[0, 1, :5] = 897.0  # 448.5 units
    key[1, 0, 0] = 895.0
    value[2, 1, 3] = -225.0
    value[2, 0, 1:3] = 2.0**-12
    slots = torch.tensor([0, 1, 2], device=device)
    for once in both(key, value, blocks, slots):
        assert once.counts.tolist() == [[[0, 0, 0], [5, 0, 0]], [[0, 2, 0], [1, 0, 0]]]
        for twice in both(key, value, once, slots):
            assert torch.equal(twice.counts, 2 * once.counts)


@pytest.mark.parametrize("format", FORMATS)
def test_slots_in_any_order_and_the_rest_untouched(format, device):
    slots = torch.tensor([63, -1, 0, 17, -1, 31, 16, -1], device=device)
    x = (torch.arange(8.0, device=device) + 1).view(8, 1, 1).expand(8, 1, 16).contiguous()
    for blocks in both(x, -x, plain(format, device=device), slots):
        key, value = (t.float().view(64, 16) for t in (blocks.key.cpu(), blocks.value.cpu()))
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                assert (key[slot] == token + 1).all()
                assert (value[slot] == -token - 1).all()
        untouched = [slot for slot in range(64) if slot not in slots.tolist()]
        codes = blocks.codes.view(torch.uint8).view(2, 64, 16).cpu()
        assert (codes[:, untouched] == NAN_CODE[format]).all()
        assert blocks.counts.sum() == 0  # a token without a slot counts nowhere
    before = plain(format, device=device)
    for blocks in both(x[:0], x[:0], before, slots[:0]):
        assert torch.equal(blocks.codes.view(torch.uint8), before.codes.view(torch.uint8))


def test_centre_is_subtracted_before_rounding_and_from_k_only(device):
    center = torch.full((1, 16), 1000.0, device=device)
    blocks = replace(plain(device=device), k_center=center)
    x = torch.full((1, 1, 16), 1002.0, device=device)
    for made in both(x, x, blocks, torch.tensor([5], device=device)):
        assert (made.key[0, 0, 5].float() == 2).all()
        assert (made.value[0, 0, 5].float() == 448).all()
        assert made.counts.tolist() == [[[0, 0, 0]], [[16, 0, 0]]]


def test_inputs_that_are_views(device):
    """K and V out of a fused QKV tensor, of other strides each; and scales seen from one value."""
    case = Case((), head_dim=80)
    fused = torch.randn(37, 7, 80, device=device)
    key, value = fused[:, 2:4], fused.transpose(1, 2).contiguous().transpose(1, 2)[:, 4:6]
    assert value.stride(2) != 1
    blocks = KVBlocks(
        poison(4, case, device).view(torch.float8_e4m3fn),
        torch.tensor([0.01, 0.02, 0.5], device=device)[::2],
        torch.tensor([0.03], device=device).expand(2),
    )
    slots = torch.randperm(64, device=device)[:37]
    strided = torch.stack([slots, slots * 0 - 7], 1)[:, 0]
    kernel, reference = both(key, value, blocks, strided)
    assert torch.equal(kernel.codes.view(torch.uint8), reference.codes.view(torch.uint8))
    contiguous = both(key.contiguous(), value.contiguous(), blocks, slots)[0]
    assert torch.equal(kernel.codes.view(torch.uint8), contiguous.codes.view(torch.uint8))


def test_what_the_kernel_takes_for_granted_is_checked():
    new, slots = torch.zeros(2, 1, 16), torch.tensor([0, 1])
    own, elsewhere = "[2, 1, 16] float32 on cpu", "[2, 1, 16] float32 on meta"
    for key, value, at, message in (
        (new[:1], new, slots, f"key must be {own}, got [1, 1, 16] float32 on cpu"),
        (new.to("meta"), new, slots, f"key must be {own}, got {elsewhere}"),
        (new, new.half(), slots, f"value must be {own}, got [2, 1, 16] float16 on cpu"),
        (new, new[..., :8], slots, f"value must be {own}, got [2, 1, 8] float32 on cpu"),
        (new, new.to("meta"), slots, f"value must be {own}, got {elsewhere}"),
        (new, new, slots.int(), "slot_mapping must be [2] int64 on cpu, got [2] int32 on cpu"),
        (new, new, slots.to("meta"), "slot_mapping must be [2] int64 on cpu, got [2] int64 on meta"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            RUNTIME.append_kv.append_kv(key, value, plain(), at)


def test_scales_and_counts_are_where_the_blocks_are():
    blocks = replace(plain(), k_center=torch.zeros(1, 16))
    for name in ("k_scale", "v_scale", "k_center", "counts"):
        with pytest.raises(ValueError, match=f"^{name} must be .* on cpu, got .* on meta$"):
            replace(blocks, **{name: getattr(blocks, name).to("meta")})
    for counts in (torch.zeros(2, 1, 3), torch.zeros(2, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"^counts must be \[2, 1, 3\] int64 on cpu, got"):
            replace(plain(), counts=counts)


def test_blocks_and_scales_that_kernels_cannot_read_are_refused():
    blocks, one = replace(plain(), k_center=torch.zeros(1, 16)), torch.ones(1)
    for name, value, rule in (
        ("k_scale", one * torch.nan, "finite and positive"),
        ("k_scale", one * 0, "finite and positive"),
        ("v_scale", one * torch.inf, "finite and positive"),
        ("k_center", torch.full((1, 16), torch.inf), "finite"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be {rule}$"):
            replace(blocks, **{name: value})
    for codes, got in (
        (blocks.codes[0], "[4, 1, 16, 16] float8_e4m3fn on cpu"),
        (blocks.codes.view(torch.uint8), "[2, 4, 1, 16, 16] uint8 on cpu"),
        (blocks.codes.mT, "[2, 4, 1, 16, 16] float8_e4m3fn on cpu"),
    ):
        message = f"blocks must be [2, num_blocks, K, block_size, D] FP8 or float16, contiguous, got {got}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            replace(blocks, codes=codes)
