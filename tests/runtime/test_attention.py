"""Decode and extend attention, kernels and references, against the oracle."""

import math
from dataclasses import replace

import oracle
import pytest
import torch
from checks import assert_attention, assert_output, head_errors, tolerance
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_grid import KEPT, name_of, paired_cases
from paged import Case, build

IMPLEMENTATIONS = ("kernel", "reference")


QUICK = [case for case in paired_cases() if case.seed in KEPT]
OTHERS = [case for case in paired_cases() if case.seed not in KEPT]
OTHERS += [replace(case, head_dim=256, group=16, block_size=256) for case in QUICK]  # the largest
NIGHTLY = [pytest.param(case, marks=pytest.mark.nightly) for case in OTHERS]


@pytest.mark.parametrize("case", QUICK + NIGHTLY, ids=name_of)
def test_any_layer(case, device):
    assert_attention(case, device, IMPLEMENTATIONS)


@settings(max_examples=6, deadline=None)
@given(
    sequences=st.lists(
        st.tuples(st.integers(0, 80), st.integers(0, 4), st.floats(0, 1)), min_size=1, max_size=2
    ),
    group=st.sampled_from([1, 5, 17]),
    window=st.none() | st.integers(1, 60),
    sinks=st.booleans(),
    extend_splits=st.integers(1, 8),
)
def test_any_batch_whose_kv_is_split(sequences, **options):
    lengths, query_lens = zip(*((max(length, new), new) for length, new, _ in sequences), strict=True)
    starts = tuple(int(length * x) for length, (*_, x) in zip(lengths, sequences, strict=True))
    case = Case(lengths, query_lens=query_lens, starts=starts, kv_heads=1, **options)
    assert_attention(case, "cuda" if torch.cuda.is_available() else "cpu")


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
        ("key", (2,), {"format": "float16"}),
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
        batch = build(Case((40, 17, 0), query_lens=query_lens, kv_heads=1, num_splits=2, sinks=True), device)
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
