"""Decode and extend attention, kernels and references, against the oracle."""

import random
import re
from dataclasses import replace

import pytest
import torch
from paged import FORMATS, RUNTIME, Case, build
from runtime import oracle
from runtime.checks import assert_attention, assert_output

from fp8kv_runtime.options import AttentionOptions

IMPLEMENTATIONS = ("kernel", "reference")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# every value of every list occurs, and no two lists are of one length times another's, so that
# over the grid each value meets many of the others
FUZZED = {
    "head_dim": (64, 128, 80, 96, 256, 112, 72, 192),
    "kv_heads": (2, 1, 3),
    "group": (1, 4, 2, 7, 3, 8, 16),
    "block_size": (16, 64, 32, 48, 128, 256),
    "dtype": (torch.float16, torch.float32, torch.float16, torch.bfloat16),
    "format": FORMATS,
    "k_scales": ("head", "channel", "tensor"),
    "v_scales": ("head", "tensor", "channel", "head"),
    "center": (False, True, False, False, True),
    "window": (None, 1, None, 16, 37, None, 64, 500),
    "softcap": (None, 5.0, None, None, 30.0),
    "softmax_scale": (None, None, None, 0.2),
    "sinks": (False, True, False),
    "q_scale": (None, "head", None, None, "tensor"),
    "num_splits": (None, 3, 1, 2, 8, 20),
}
CASES = 80


def fuzzed_cases():
    """Seeded: each option walks through its own list in an order of its own."""
    rng = random.Random(0)
    columns = {}
    for name, values in FUZZED.items():
        rounds = [rng.sample(values, len(values)) for _ in range(-(-CASES // len(values)))]
        columns[name] = [value for row in rounds for value in row][:CASES]
    for i in range(CASES):
        options = {name: column[i] for name, column in columns.items()}
        if options["q_scale"] is not None and options["k_scales"] == "channel":
            options["k_scales"] = "head"  # refused: a scale per channel cannot be taken out
        yield with_lengths(Case((), seed=i, **options), rng, extends=i % 2 == 1)


def with_lengths(case, rng, *, extends):
    """Three ragged sequences: empty ones, single tokens, ends just before and after a block."""
    edge = case.block_size * rng.randint(1, max(1, 128 // case.block_size))
    choices = (0, 1, edge - 1, edge, edge + 1, 63, 64, 65, rng.randint(2, 150))
    lengths = tuple(rng.choice(choices) for _ in range(3))
    starts = tuple(rng.randint(0, n) for n in lengths) if rng.random() < 0.4 else None
    # few queries per sequence, because the oracle takes them one by one
    queries = tuple(rng.choice((0, 1, min(n, 9), min(n, 40))) if n else 0 for n in lengths)
    return replace(case, lengths=lengths, starts=starts, query_lens=queries if extends else None)


def name_of(case):
    kind = "decode" if case.query_lens is None else "extend"
    return f"{case.seed}-{kind}-D{case.head_dim}-G{case.group}-B{case.block_size}-{case.format}"


@pytest.mark.parametrize("case", [*fuzzed_cases()], ids=name_of)
def test_any_layer(case, device):
    assert_attention(case, device, IMPLEMENTATIONS)


@pytest.mark.parametrize("case", [*fuzzed_cases()][::5], ids=name_of)
def test_any_layer_of_float16_blocks(case, device):
    case = replace(case, format="float16", q_scale=None)
    assert_attention(case, device, IMPLEMENTATIONS)


@pytest.mark.parametrize(
    ("block_size", "num_splits"), [(16, 2), (48, 1), (64, 3), (128, 20), (256, 8)]
)
def test_lengths_around_blocks_and_tiles(block_size, num_splits, device):
    edges = sorted({n + d for n in (block_size, 64, 128) for d in (-1, 0, 1)})
    case = Case((0, 1, 2, *edges), kv_heads=1, block_size=block_size, num_splits=num_splits)
    assert_attention(case, device, IMPLEMENTATIONS)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 130, 10_000])
def test_windows_around_blocks_tiles_and_lengths(window, device):
    case = Case((130, 64, 3), kv_heads=1, window=window, num_splits=2, sinks=True)
    assert_attention(case, device, IMPLEMENTATIONS)
    assert_attention(replace(case, query_lens=(34, 3, 1)), device, IMPLEMENTATIONS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_that_takes_nearly_all(dtype, device):
    # one visible token, whose logit is often far below the sink's
    case = Case((65, 40, 9, 1), group=4, window=1, softmax_scale=0.4, sinks=True, dtype=dtype)
    assert_attention(case, device, IMPLEMENTATIONS)


@pytest.mark.parametrize("extends", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_left_padding_up_to_the_whole_sequence(sinks, extends, device):
    case = Case((70, 70, 70, 20), starts=(64, 69, 70, 1), sinks=sinks, num_splits=2)
    if extends:
        case = replace(case, query_lens=(10, 3, 2, 20))
    assert_attention(case, device, IMPLEMENTATIONS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_queries_of_any_magnitude(format, dtype, device):
    # K's scale brings the logits back
    for exponent in (-10,) if dtype == torch.float16 else (17, -30):
        case = Case((50, 9), format=format, dtype=dtype, k_scales="channel")
        batch = scaled_query(build(case, device), 2.0**exponent)
        want = oracle.attention(batch)
        for name in IMPLEMENTATIONS:
            assert_output(batch.attend(name), want, name, case)


def scaled_query(batch, factor):
    """The same logits from a query of another magnitude."""
    blocks = replace(batch.blocks, k_scale=batch.blocks.k_scale / factor)
    return replace(batch, query=batch.query * factor, blocks=blocks)


def test_query_that_is_a_view(device):
    """Heads of a fused QKV tensor, and channels that are not next to each other."""
    batch = build(Case((40, 17)), device)
    want = batch.attend("kernel")
    fused = torch.randn(2, 12, 64, device=device).half()
    fused[:, 4:8] = batch.query
    apart = batch.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert apart.stride(2) != 1
    for view in (fused[:, 4:8], apart):
        assert torch.equal(replace(batch, query=view).attend("kernel"), want)


@pytest.mark.parametrize("query_lens", [None, (7, 3)])
def test_everything_else_that_is_a_view(query_lens, device):
    batch = build(Case((40, 17), query_lens=query_lens, starts=(3, 1)), device)
    one = torch.ones(1, device=device)
    options = AttentionOptions(sinks=one.expand(4), q_scale=(one / 20).expand(4))
    want = replace(batch, options=AttentionOptions(sinks=one.repeat(4), q_scale=one / 20))
    strided = [torch.stack([x, x * 0 - 7], -1)[..., 0] for x in (
        batch.sequences.block_tables, batch.sequences.seq_lens, batch.sequences.seq_starts,
        batch.cu_seqlens,
    )]  # fmt: skip
    views = replace(
        batch,
        options=options,
        sequences=RUNTIME.cache.PagedSequences(*strided[:3]),
        cu_seqlens=strided[3],
    )
    assert torch.equal(views.attend("kernel"), want.attend("kernel"))


REFUSED = {
    "query must be [tokens": {"query": torch.zeros(1, 3, 64)},
    "query must be float16": {"query": torch.zeros(1, 4, 64, dtype=torch.float64)},
    "sliding_window must be at least 1": {"options": AttentionOptions(sliding_window=0)},
    "softcap must be positive": {"options": AttentionOptions(softcap=0.0)},
    "sinks must be [4]": {"options": AttentionOptions(sinks=torch.zeros(2))},
    "q_scale must be [1] or [4]": {"options": AttentionOptions(q_scale=torch.ones(2))},
}


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("query_lens", [None, (1,)])
def test_what_kernels_take_for_granted_is_checked(message, implementation, query_lens, device):
    batch = replace(build(Case((9,), query_lens=query_lens), device), **REFUSED[message])
    with pytest.raises(ValueError, match=re.escape(message)):
        batch.attend(implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fp8_queries_of_float16_blocks_are_refused(implementation, device):
    batch = build(Case((9,), format="float16"), device)
    options = AttentionOptions(q_scale=torch.ones(1, device=device))
    with pytest.raises(ValueError, match="FP8 queries need FP8 blocks, got float16"):
        replace(batch, options=options).attend(implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fp8_queries_with_a_k_scale_per_channel_are_refused(implementation, device):
    batch = build(Case((9,), k_scales="channel", q_scale="head"), device)
    with pytest.raises(ValueError, match="one per channel cannot be taken out"):
        batch.attend(implementation)


@pytest.mark.parametrize(("head_dim", "message"), [(65, "even head_dim"), (320, "256")])
@pytest.mark.parametrize("query_lens", [None, (1,)])
def test_head_dims_that_kernels_do_not_handle(head_dim, message, query_lens, device):
    batch = build(Case((9,), head_dim=head_dim, query_lens=query_lens), device)
    with pytest.raises(ValueError, match=message):
        batch.attend("kernel")
