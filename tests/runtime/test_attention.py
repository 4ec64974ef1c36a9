"""Decode and extend attention, kernels and references, against the oracle."""

import math
from dataclasses import replace

import oracle
import pytest
import torch
from checks import assert_attention, assert_output, head_errors, tolerance
from kernel_grid import KEPT, large_grid, name_of, paired_cases
from paged import Case, build

IMPLEMENTATIONS = ("kernel", "reference")


@pytest.mark.parametrize(
    "case",
    [case if case.seed in KEPT else pytest.param(case, marks=pytest.mark.nightly) for case in paired_cases()],
    ids=name_of,
)
def test_any_layer(case, device):
    assert_attention(case, device, IMPLEMENTATIONS)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case", [*large_grid(), *(replace(case, format="float16") for case in large_grid())], ids=name_of
)
def test_any_layer_of_the_large_grid(case, device):
    case = replace(case, q_scale=None) if case.format == "float16" else case
    assert_attention(case, device, IMPLEMENTATIONS)


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
    case = replace(case, sinks=largest == "sink", **changes)
    batch = build(case, device)
    stored, first = batch.blocks.codes.view(torch.uint8), batch.sequences.block_tables[0, 0]
    stored[0] = 0
    if largest == "key":  # whose value is 0
        stored[:, first, :, 0] = 0
        one = torch.ones(1, device=device).to(batch.blocks.codes.dtype).view(torch.uint8)
        stored[0, first, :, 0, : len(one)] = one
    blocks = replace(
        batch.blocks,
        k_scale=torch.full_like(batch.blocks.k_scale, TAIL),
        v_scale=batch.blocks.v_scale * 2.0**15,
    )
    options = replace(
        batch.options,
        sinks=torch.tensor([TAIL], device=device) if largest == "sink" else None,
        q_scale=None if batch.options.q_scale is None else torch.ones(1, device=device),
    )
    query = torch.zeros_like(batch.query)
    query[:, :, 0] = 1
    batch = replace(batch, query=query, blocks=blocks, options=options)
    want = oracle.attention(batch)
    error = head_errors(batch.attend("kernel"), want).max().item()
    # beside the largest weight, 2^14, float16 has steps of 2^-24 for the smallest
    assert error <= tolerance(case.dtype) + 2.0**-39 * math.exp(TAIL)


@pytest.mark.parametrize(("query_lens", "format"), [(None, "e5m2"), ((3, 2), "e4m3fn")])
@pytest.mark.parametrize("exponent", [20, 24, 30])
def test_logits_of_any_size_give_finite_outputs(exponent, query_lens, format, device):
    case = Case((40, 9), query_lens=query_lens, format=format, dtype=torch.float32, num_splits=2)
    batch = build(replace(case, kv_heads=1), device)
    # the largest magnitude that a code can have, beside a K that is at home near 1
    batch = replace(batch, query=batch.query * 2.0**exponent)
    largest = batch.blocks.v_scale.max() * torch.finfo(batch.blocks.codes.dtype).max
    out = batch.attend("kernel")
    assert out.isfinite().all()
    # a mean of V, rounded
    assert out.abs().max() <= largest * (1 + 2.0**-11)


@pytest.mark.parametrize(
    ("dtype", "format", "exponent"),
    [(torch.float16, "e4m3fn", -10), (torch.bfloat16, "e5m2", 17), (torch.float32, "e4m3fnuz", -30)],
)
def test_queries_of_any_magnitude(exponent, format, dtype, device):
    # K's scale brings the logits back
    case = Case((40, 9), format=format, dtype=dtype, k_scales="channel", kv_heads=1)
    batch = build(case, device)
    blocks = replace(batch.blocks, k_scale=batch.blocks.k_scale / 2.0**exponent)
    batch = replace(batch, query=batch.query * 2.0**exponent, blocks=blocks)
    want = oracle.attention(batch)
    for name in IMPLEMENTATIONS:
        assert_output(batch.attend(name), want, name, case)
