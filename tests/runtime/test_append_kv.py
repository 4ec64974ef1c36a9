"""Quantise and store: kernel against reference, bit for bit, and both against hand counts."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from checks import assert_rounded, assert_stored
from paged import FORMATS, NAN_CODE, RUNTIME, Case
from paged import poisoned as poison

from fp8kv_runtime.storage import BLOCK_DTYPES, KVBlocks

# NaN and Inf are among the inputs
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

HEAD_DIMS = (64, 80, 96, 128, 256)
SHAPES = ("tensor", "head", "channel")
OTHERS = zip(
    cycle([torch.float16, torch.bfloat16, torch.float32, torch.bfloat16]),
    cycle(SHAPES),
    cycle(SHAPES[::-1] + SHAPES),
    cycle([False, True]),
    strict=False,
)
CASES = [
    Case((), head_dim=d, format=f, dtype=dtype, k_scales=k, v_scales=v, center=center, seed=d)
    for (d, f), (dtype, k, v, center) in zip(
        [(d, f) for d in HEAD_DIMS for f in FORMATS], OTHERS, strict=False
    )
] + [
    Case((), head_dim=d, format="float16", dtype=torch.float32, k_scales=k, v_scales=k, center=True)
    for d, k in ((64, "head"), (80, "channel"))
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
    for module in (RUNTIME.append_kv, RUNTIME.reference):
        blocks.counts.zero_()
        module.append_kv(key, value, blocks, slots)
        once = [[[0, 0, 0], [5, 0, 0]], [[0, 2, 0], [1, 0, 0]]]
        assert blocks.counts.tolist() == once
        module.append_kv(key, value, blocks, slots)
        assert blocks.counts.tolist() == (2 * torch.tensor(once)).tolist()


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


def test_no_tokens(device):
    nothing = torch.zeros(0, 1, 16, device=device)
    before = plain(device=device)
    for blocks in both(nothing, nothing, before, torch.zeros(0, dtype=torch.int64, device=device)):
        assert torch.equal(blocks.codes.view(torch.uint8), before.codes.view(torch.uint8))


def test_shapes_are_checked(device):
    blocks, slots = plain(device=device), torch.tensor([0, 1], device=device)
    good = torch.zeros(2, 1, 16, device=device)
    for key, value in ((good[:1], good), (good, good.half()), (good, good[..., :8])):
        with pytest.raises(ValueError, match=r"(key|value) must be \[2, 1, 16\] float32"):
            RUNTIME.append_kv.append_kv(key, value, blocks, slots)


@pytest.mark.parametrize(("to", "got"), [(torch.int32, "int32 on cpu"), ("meta", "int64 on meta")], ids=str)
def test_slots_are_int64_where_the_blocks_are(to, got):
    new, slots = torch.zeros(2, 1, 16), torch.tensor([0, 1])
    message = rf"^slot_mapping must be \[2\] int64 on cpu, got \[2\] {got}$"
    with pytest.raises(ValueError, match=message):
        RUNTIME.append_kv.append_kv(new, new, plain(), slots.to(to))


def test_new_k_and_v_are_where_the_blocks_are():
    new, slots = torch.zeros(2, 1, 16), torch.tensor([0, 1])
    for key, value in ((new.to("meta"), new), (new, new.to("meta"))):
        with pytest.raises(ValueError, match="must be .* float32 on cpu, got .* float32 on meta$"):
            RUNTIME.append_kv.append_kv(key, value, plain(), slots)


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "k_center", "counts"])
def test_scales_and_counts_are_where_the_blocks_are(name):
    blocks = replace(plain(), k_center=torch.zeros(1, 16))
    with pytest.raises(ValueError, match=f"^{name} must be .* on cpu, got .* on meta$"):
        replace(blocks, **{name: getattr(blocks, name).to("meta")})


@pytest.mark.parametrize("counts", [torch.zeros(2, 1, 3), torch.zeros(2, 3, dtype=torch.int64)])
def test_counts_are_checked(counts):
    with pytest.raises(ValueError, match=r"^counts must be \[2, 1, 3\] int64 on cpu, got"):
        replace(plain(), counts=counts)
