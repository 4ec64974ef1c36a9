"""Decode and extend attention, kernels and references, against the oracle; what they refuse; far memory."""

import math
import re
from dataclasses import replace
from functools import partial

import oracle
import pytest
import torch
from checks import assert_attention, assert_output, head_errors, tolerance
from kernel_grid import KEPT, name_of, paired_cases
from paged import RUNTIME, Case, build
from torch.nn.functional import pad

from fp8kv_runtime.options import AttentionOptions

IMPLEMENTATIONS = ("kernel", "reference")
QUICK = [case for case in paired_cases() if case.seed in KEPT]
OTHERS = [case for case in paired_cases() if case.seed not in KEPT]
OTHERS += [replace(case, head_dim=256, group=16, block_size=256) for case in QUICK]  # the largest
NIGHTLY = [pytest.param(case, marks=pytest.mark.nightly) for case in OTHERS]


@pytest.mark.parametrize("case", QUICK + NIGHTLY, ids=name_of)
def test_any_layer(case, device):
    assert_attention(case, device, IMPLEMENTATIONS)


def test_split_sums_are_float32_whatever_the_default_and_too_few_announced_queries_harm_no_other(device):
    batch = build(Case((70, 30), query_lens=(4, 3), kv_heads=1, group=3, extend_splits=4), device)
    want, got = batch.attend("kernel"), replace(batch, max_query_len=3).attend("kernel")
    assert torch.equal(got[:3], want[:3])
    assert torch.equal(got[4:], want[4:])
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(batch.attend("kernel"), want)
    finally:
        torch.set_default_dtype(torch.float32)


TAIL = 18.5  # the logit beside which others have weights of 2^-26.7


@pytest.mark.parametrize(
    ("largest", "query_lens", "changes"),
    [
        ("sink", None, {}),
        ("key", (2,), {"dtype": torch.float32}),
        ("key", None, {"q_scale": "tensor", "dtype": torch.bfloat16}),
        ("sink", (2,), {"k_scales": "channel", "v_scales": "channel"}),
        ("key", (2,), {"format": "float16", "extend_splits": 1}),
    ],
    ids=["plain", "fp32", "fp8", "channels", "float16"],
)
def test_many_small_weights_beside_a_large_one(largest, query_lens, changes, device):
    """What is lost of them in the numerator must be lost in the denominator too: all or nothing."""
    case = Case((100,), query_lens=query_lens, kv_heads=1, group=1, num_splits=1, softmax_scale=1.0)
    batch = build(replace(case, sinks=largest == "sink", **changes), device)
    stored, first = batch.blocks.codes.view(torch.uint8), batch.sequences.block_tables[0, 0]
    one = torch.ones(1, device=device)
    stored[0] = 0
    if largest == "key":  # whose value is 0
        stored[:, first, :, 0] = 0
        code = one.to(batch.blocks.codes.dtype).view(torch.uint8)
        stored[0, first, :, 0, : len(code)] = code
    scales = {"k_scale": torch.full_like(batch.blocks.k_scale, TAIL), "v_scale": batch.blocks.v_scale * 2**15}
    q_scale = None if batch.options.q_scale is None else one
    options = replace(batch.options, sinks=one * TAIL if largest == "sink" else None, q_scale=q_scale)
    query = torch.zeros_like(batch.query)
    query[:, :, 0] = 1
    batch = replace(batch, query=query, blocks=replace(batch.blocks, **scales), options=options)
    error = head_errors(batch.attend("kernel"), oracle.attention(batch)).max().item()
    # beside the largest weight, 2^14, float16 has steps of 2^-24 for the smallest
    assert error <= tolerance(query.dtype) + 2.0**-39 * math.exp(TAIL)


@pytest.mark.parametrize(("query_lens", "format"), [(None, "e5m2"), ((3, 2), "e4m3fn")])
@pytest.mark.parametrize("exponent", [20, 24, 30])
def test_logits_of_any_size_give_finite_outputs(exponent, query_lens, format, device):
    case = Case((40, 9), query_lens=query_lens, format=format, dtype=torch.float32, num_splits=2, kv_heads=1)
    batch = build(case, device)
    # the largest magnitude that a code can have, beside a K that is at home near 1
    largest = batch.blocks.v_scale.max() * torch.finfo(batch.blocks.codes.dtype).max
    out = replace(batch, query=batch.query * 2.0**exponent).attend("kernel")
    assert out.isfinite().all()
    assert out.abs().max() <= largest * (1 + 2.0**-11)  # a mean of V, rounded


@pytest.mark.parametrize(
    ("dtype", "format", "exponent"),
    [(torch.float16, "e4m3fn", -10), (torch.bfloat16, "e5m2", 17), (torch.float32, "e4m3fnuz", -30)],
)
def test_queries_of_any_magnitude(exponent, format, dtype, device):
    case = Case((40, 9), format=format, dtype=dtype, k_scales="channel", kv_heads=1)
    batch = build(case, device)
    # K's scale brings the logits back
    blocks = replace(batch.blocks, k_scale=batch.blocks.k_scale / 2.0**exponent)
    batch = replace(batch, query=batch.query * 2.0**exponent, blocks=blocks)
    want = oracle.attention(batch)
    for name in IMPLEMENTATIONS:
        assert_output(batch.attend(name), want, name, case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_sink_without_weight_is_no_sink(implementation, device):
    for query_lens in (None, (9, 17, 0)):
        splits = {"num_splits": 2, "extend_splits": 1}
        batch = build(Case((40, 17, 0), query_lens=query_lens, kv_heads=1, sinks=True, **splits), device)
        without = replace(batch, options=replace(batch.options, sinks=None)).attend(implementation)
        for weightless in (float("-inf"), -3e38):
            options = replace(batch.options, sinks=torch.full_like(batch.options.sinks, weightless))
            assert torch.equal(replace(batch, options=options).attend(implementation), without), weightless


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_batches_without_sequences_and_sequences_without_tokens(implementation, device):
    for query_lens in (None, ()):
        batch = build(Case((), query_lens=query_lens), device)
        assert batch.attend(implementation).shape == (0, 4, 64)
    for query_lens in (None, (1, 3)):
        for sinks in (False, True):
            batch = build(Case((0, 0), query_lens=query_lens, sinks=sinks), device)
            assert batch.sequences.block_tables.shape == (2, 0)
            assert torch.equal(batch.attend(implementation), torch.zeros_like(batch.query))


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_of_no_sequence_are_zero_and_harm_no_other(splits, device):
    batch = build(Case((40, 17), query_lens=(9, 17), extend_splits=splits), device)
    longer = replace(batch, query=pad(batch.query, (0, 0, 0, 0, 0, 3), value=torch.nan))
    for implementation in IMPLEMENTATIONS:
        out = longer.attend(implementation)
        assert torch.equal(out, pad(batch.attend(implementation), (0, 0, 0, 0, 0, 3))), implementation


META = torch.device("meta")  # another device, which every machine has


def assert_refused(message, change, *arguments):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        change(*arguments)


def test_memory_that_a_launcher_allocates_is_nan_in_these_tests(device):
    launcher = {"__name__": "fp8kv_runtime.kernels.some", "torch": torch, "device": device}
    new = "torch.empty(3, device=device), torch.empty_like(torch.zeros(3, device=device))"
    assert all(x.isnan().all() for x in eval(new, launcher))


def test_what_kernels_take_for_granted_is_checked():
    batch = build(Case((9,)))
    query, extended = batch.query, build(Case((9,), query_lens=(3,)))

    def options(**changed):
        return {"options": AttentionOptions(**changed)}

    of_q_scale = "q_scale must be [1] or [4] float32 on cpu, got "
    elsewhere = "all must be on cpu, where the query is, got blocks on cpu, block_tables on "
    of_ends = "cu_seqlens must be [2] int32 on cpu, got "
    too_few = "num_splits must be at least 1, or None to choose, got "
    for message, changes in {
        "query must be [tokens, a multiple of 2 heads, 64], got [1, 3, 64]": {"query": query[:, :3]},
        "query must be float16, bfloat16 or float32, got torch.float64": {"query": query.double()},
        "query must have a row per sequence, 1, got 2": {"query": query.repeat(2, 1, 1)},
        "sliding_window must be at least 1, got 0": options(sliding_window=0),
        "softcap must be positive, got 0.0": options(softcap=0.0),
        "sinks must be [4], got [2]": options(sinks=torch.zeros(2)),
        of_q_scale + "[2] float32 on cpu": options(q_scale=torch.ones(2)),
        of_q_scale + "[4] float16 on meta": options(q_scale=torch.ones(4, device=META).half()),
        elsewhere.replace("must be on cpu", "must be on meta") + "cpu": {"query": query.to(META)},
        elsewhere + "meta": {"sequences": batch.sequences.to(META)},
        elsewhere + "cpu, sinks on meta": options(sinks=torch.zeros(4, device=META)),
        too_few + "0": {"num_splits": 0},
    }.items():
        assert_refused(message, replace(batch, **changes).attend, "kernel")
    for message, changes in {
        of_ends + "[2] int64 on cpu": {"cu_seqlens": torch.tensor([0, 3])},
        of_ends + "[3] int32 on cpu": {"cu_seqlens": torch.tensor([0, 3, 3], dtype=torch.int32)},
        too_few + "-3": {"extend_splits": -3},
    }.items():
        assert_refused(message, replace(extended, **changes).attend, "kernel")
    sequences = build(Case((9, 3), starts=(0, 1))).sequences
    tables, lens = sequences.block_tables, sequences.seq_lens
    for message, changes in {
        "block_tables must be [2, 1] int32 on cpu, got [2, 1] int64 on cpu": {"block_tables": tables.long()},
        "block_tables must be [2, 1] int32 on cpu, got [1, 1] int32 on cpu": {"block_tables": tables[:1]},
        "seq_lens must be [2] int32 on cpu, got [2] int32 on meta": {"seq_lens": lens.to(META)},
        "seq_starts must be [1] int32 on cpu, got [2] int32 on cpu": {"seq_lens": lens[:1]},
    }.items():
        assert_refused(message, partial(replace, sequences, **changes))


def test_every_implementation_checks(device):
    per_channel = "FP8 queries need K scales [1] or [K]: one per channel cannot be taken out"
    refused = {"FP8 queries need FP8 blocks, got float16": {"format": "float16"}}
    for query_lens in (None, (1,)):
        for implementation in ("kernel", "reference"):
            for message, changes in (refused | {per_channel: {"k_scales": "channel"}}).items():
                batch = build(Case((9,), query_lens=query_lens, **changes), device)
                wrong = replace(batch, options=AttentionOptions(q_scale=torch.ones(1, device=device)))
                assert_refused(message, wrong.attend, implementation)
        for head_dim, message in (
            (65, "kernels need an even head_dim, got 65"),
            (320, "head_dim 320 is more than the 256 that kernels handle"),
        ):
            batch = build(Case((9,), head_dim=head_dim, query_lens=query_lens), device)
            assert_refused(message, batch.attend, "kernel")


@pytest.mark.parametrize("query_lens", [None, (7, 3)])
def test_everything_that_is_a_view(query_lens, device):
    batch = build(Case((40, 17), query_lens=query_lens, starts=(3, 1)), device)
    one = torch.ones(1, device=device)
    options = AttentionOptions(sinks=one.expand(4), q_scale=(one / 20).expand(4))
    want = replace(batch, options=AttentionOptions(sinks=one.repeat(4), q_scale=one / 20)).attend("kernel")

    def strided(x):
        return torch.stack([x, x * 0 - 7], -1)[..., 0]

    of = batch.sequences
    sequences = RUNTIME.cache.PagedSequences(*map(strided, (of.block_tables, of.seq_lens, of.seq_starts)))
    views = replace(batch, options=options, sequences=sequences, cu_seqlens=strided(batch.cu_seqlens))
    # heads of a fused QKV tensor, and channels that are not next to each other
    fused = torch.randn(len(batch.query), 12, 64, device=device).half()
    fused[:, 4:8] = batch.query
    apart = batch.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert apart.stride(2) != 1
    for query in (batch.query, fused[:, 4:8], apart):
        assert torch.equal(replace(views, query=query).attend("kernel"), want)


@pytest.mark.parametrize("query_lens", [None, (5, 3)])
def test_blocks_beyond_two_gigabytes(query_lens, device):
    """Pages that are not touched cost no memory, so the pool can be as large as in production."""
    case = Case((40, 20), block_size=64, head_dim=128, num_splits=2, group=1, query_lens=query_lens)
    batch = build(case, device)
    small, dtype = batch.blocks.codes.view(torch.uint8), batch.blocks.codes.dtype
    count = small.shape[1]
    first = 2**31 // small[0, 0].numel() + 1
    codes = torch.empty(2, first + count, *small.shape[2:], dtype=torch.uint8, device=device)
    codes[:, first:] = small
    tables = batch.sequences.block_tables
    sequences = replace(batch.sequences, block_tables=torch.where(tables < 0, -1, tables + first))
    large = replace(batch, blocks=replace(batch.blocks, codes=codes.view(dtype)), sequences=sequences)
    for implementation in ("kernel", "reference"):
        assert torch.equal(large.attend(implementation), batch.attend(implementation))
    key, value = (torch.randn(3, 2, 128, device=device) for _ in "kv")
    slots = torch.tensor([5, 64 * count - 1, 64], device=device)
    for module in (RUNTIME.append_kv, RUNTIME.reference):
        codes[:, first:] = small.fill_(0x7F)
        module.append_kv(key, value, batch.blocks, slots)
        module.append_kv(key, value, large.blocks, slots + first * 64)
        assert torch.equal(codes[:, first:], small)
        assert (small != 0x7F).any()


@pytest.mark.parametrize("launcher", ["append", "decode", "extend"])
def test_heads_beyond_two_gigabytes(launcher, device):
    """Heads of queries, K and V as far apart as a stride of 32 bits allows."""
    memory = torch.empty(2**32 + 2**20, dtype=torch.float16, device=device)

    def far_apart(x):
        strides, middle = (x.shape[2], 2**30, 1), 2**31
        # 0 is where the offset of the third head wraps to
        memory.as_strided(x.shape, strides, 0).copy_(x + 1)
        return memory.as_strided(x.shape, strides, middle).copy_(x)

    query_lens = (5, 3) if launcher == "extend" else None
    batch = build(Case((40, 20), kv_heads=3, group=1, query_lens=query_lens), device)
    if launcher != "append":
        far = replace(batch, query=far_apart(batch.query))
        assert torch.equal(far.attend("kernel"), batch.attend("kernel"))
        return
    new, slots = torch.randn(5, 3, 64, device=device).half(), torch.arange(5, device=device)
    codes, stored = batch.blocks.codes.view(torch.uint8), []
    for key, value in ((new, new), (far_apart(new), new), (new, far_apart(new))):
        codes.fill_(0x7F)
        RUNTIME.append_kv.append_kv(key, value, batch.blocks, slots)
        stored.append(codes.clone())
    assert all(torch.equal(each, stored[0]) for each in stored)
