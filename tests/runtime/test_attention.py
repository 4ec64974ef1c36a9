"""Decode and extend attention, kernels and references, against the oracle."""

import math
import random
import re
from dataclasses import replace

import oracle
import pytest
import torch
from checks import assert_attention, assert_output, head_errors, tolerance
from paged import FORMATS, RUNTIME, Case, build

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


@pytest.mark.parametrize(("block_size", "num_splits"), [(16, 2), (48, 1), (64, 3), (128, 20), (256, 8)])
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


TAIL = 18.5  # the logit beside which others have weights of 2^-26.7
WEIGHTS = {
    "plain": {},
    "fp32": {"dtype": torch.float32},
    "fp8": {"q_scale": "tensor", "dtype": torch.bfloat16},
    "channels": {"k_scales": "channel", "v_scales": "channel"},
    "float16": {"format": "float16"},
}


@pytest.mark.parametrize("changes", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("query_lens", [None, (2,)])
@pytest.mark.parametrize("largest", ["sink", "key"])
def test_many_small_weights_beside_a_large_one(largest, query_lens, changes, device):
    """What is lost of them in the numerator must be lost in the denominator too: all or nothing."""
    case = Case((600,), query_lens=query_lens, kv_heads=1, group=1, num_splits=1, softmax_scale=1.0)
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


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("query_lens", [None, (3, 2)])
@pytest.mark.parametrize("exponent", [20, 24, 26, 30])
def test_logits_of_any_size_give_finite_outputs(exponent, query_lens, format, device):
    case = Case((70, 9), query_lens=query_lens, format=format, dtype=torch.float32, num_splits=2)
    batch = build(case, device)
    # the largest magnitude that a code can have, beside a K that is at home near 1
    batch = replace(batch, query=batch.query * 2.0**exponent)
    largest = batch.blocks.v_scale.max() * torch.finfo(batch.blocks.codes.dtype).max
    out = batch.attend("kernel")
    assert out.isfinite().all()
    # a mean of V, rounded
    assert out.abs().max() <= largest * (1 + 2.0**-11)


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


def placed(value, device):
    """A tensor, or options that hold tensors, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    held = {name: getattr(value, name) for name in ("sinks", "q_scale")}
    return replace(value, **{n: x if x is None else x.to(device) for n, x in held.items()})


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("query_lens", [None, (1,)])
def test_what_kernels_take_for_granted_is_checked(message, implementation, query_lens, device):
    wrong = {name: placed(value, device) for name, value in REFUSED[message].items()}
    batch = replace(build(Case((9,), query_lens=query_lens), device), **wrong)
    with pytest.raises(ValueError, match=re.escape(message)):
        batch.attend(implementation)


INTEGERS = {
    "block_tables must be [2, 1] int32 on cpu, got [2, 1] int64": {"block_tables": torch.int64},
    "seq_lens must be [2] int32 on cpu, got [2] int64 on cpu": {"seq_lens": torch.int64},
    "seq_starts must be [2] int32 on cpu, got [2] float32": {"seq_starts": torch.float32},
    "seq_lens must be [2] int32 on cpu, got [2] int32 on meta": {"seq_lens": "meta"},
    "seq_starts must be [2] int32 on cpu, got [2] int32 on meta": {"seq_starts": "meta"},
}


@pytest.mark.parametrize("message", INTEGERS)
def test_tables_and_lengths_are_int32_on_one_device(message):
    sequences = build(Case((9, 3), starts=(0, 1))).sequences
    moved = {name: getattr(sequences, name).to(to) for name, to in INTEGERS[message].items()}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        replace(sequences, **moved)


@pytest.mark.parametrize("name", ["block_tables", "seq_lens", "seq_starts"])
def test_tables_and_lengths_are_of_as_many_sequences(name):
    sequences = build(Case((9, 3), starts=(0, 1))).sequences
    with pytest.raises(ValueError, match="must be .*, got "):
        replace(sequences, **{name: getattr(sequences, name)[:1]})


ON_META = torch.device("meta")  # another device, which every machine has
MISPLACED = {
    "all must be on meta, where the query is, got blocks on cpu": lambda batch: {
        "query": batch.query.to(ON_META)
    },
    "where the query is, got blocks on cpu, block_tables on meta": lambda batch: {
        "sequences": batch.sequences.to(ON_META)
    },
    "block_tables on cpu, sinks on meta": lambda batch: {
        "options": AttentionOptions(sinks=torch.zeros(4, device=ON_META))
    },
    "q_scale must be [1] or [4] float32 on cpu, got [4] float32 on meta": lambda batch: {
        "options": AttentionOptions(q_scale=torch.ones(4, device=ON_META))
    },
    "q_scale must be [1] or [4] float32 on cpu, got [4] float16 on cpu": lambda batch: {
        "options": AttentionOptions(q_scale=torch.ones(4).half())
    },
    "query must have a row per sequence, 1, got 2": lambda batch: {"query": torch.cat([batch.query] * 2)},
}


@pytest.mark.parametrize("message", MISPLACED)
def test_everything_is_where_the_query_is(message):
    batch = build(Case((9,)))
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(batch, **MISPLACED[message](batch)).attend("kernel")


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (torch.tensor([0, 3]), "[2] int64 on cpu"),
        (torch.zeros(2, dtype=torch.int32, device=ON_META), "[2] int32 on meta"),
        (torch.tensor([0, 3, 3], dtype=torch.int32), "[3] int32 on cpu"),
    ],
)
def test_ends_of_queries_are_checked(ends, message):
    batch = build(Case((9,), query_lens=(3,)))
    message = f"cu_seqlens must be [2] int32 on cpu, got {message}"
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(batch, cu_seqlens=ends).attend("kernel")


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
