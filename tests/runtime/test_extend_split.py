"""Extend attention whose KV is split: a few new tokens over long caches."""

from dataclasses import replace

import pytest
import torch
from checks import STEP, assert_attention, head_errors
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.processors import PROCESSORS
from paged import Case, build

from fp8kv_runtime.kernels import tuning
from fp8kv_runtime.kernels.targets import INTERPRETER, TARGETS
from fp8kv_runtime.storage import KVBlocks

LONG = Case((600, 150), query_lens=(4, 3), group=3, extend_splits=6)
CASES = {
    "plain": {},
    # every row tile sees another part of it, the first only the first
    "a prompt": {"lengths": (90,), "query_lens": (90,), "kv_heads": 1, "group": 1},
    "64 tokens": {"lengths": (500,), "query_lens": (64,), "kv_heads": 1, "group": 1},
    "empty ones": {"lengths": (0, 300, 40, 0, 9), "query_lens": (0, 5, 0, 0, 9), "kv_heads": 1},
    "one token each": {"query_lens": (1, 1), "group": 4},
    "left padding": {"starts": (333, 150)},
    "padding into the queries": {"starts": (598, 0), "sinks": True},
    "sinks": {"sinks": True, "kv_heads": 1, "softcap": 5.0, "center": True},
    "a window": {"window": 100, "sinks": True},
    "a window of one": {"window": 1},
    # the last row tile's window starts after the first parts
    "a window of row tiles": {
        "lengths": (200,), "query_lens": (70,), "kv_heads": 1, "group": 1, "window": 20,
        "sinks": True,
    },
    "FP8 queries": {"q_scale": "head", "softcap": 30.0, "dtype": torch.bfloat16},
    "channels": {"k_scales": "channel", "v_scales": "channel", "head_dim": 80, "center": True},
    "fp32": {"dtype": torch.float32, "group": 1},
    "float16": {"format": "float16", "head_dim": 80},
    "e4m3fnuz": {"format": "e4m3fnuz", "block_size": 48},
    "e5m2": {"format": "e5m2", "block_size": 64, "head_dim": 256, "kv_heads": 1},
}  # fmt: skip


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_any_layer(changes, device):
    assert_attention(replace(LONG, **changes), device, ("kernel", "reference"))


@settings(max_examples=5, deadline=None)
@given(
    sequences=st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 4), st.floats(0, 1)), min_size=1, max_size=2
    ),
    group=st.sampled_from([1, 5, 17]),
    window=st.none() | st.integers(1, 300),
    sinks=st.booleans(),
    extend_splits=st.integers(1, 64),
)
def test_any_batch(sequences, group, window, sinks, extend_splits):
    lengths = tuple(max(length, new) for length, new, _ in sequences)
    case = Case(
        lengths,
        query_lens=tuple(new for _, new, _ in sequences),
        starts=tuple(int(length * x) for length, (*_, x) in zip(lengths, sequences, strict=True)),
        kv_heads=1,
        group=group,
        window=window,
        sinks=sinks,
        extend_splits=extend_splits,
    )
    assert_attention(case, "cuda" if torch.cuda.is_available() else "cpu")


def test_sums_are_float32_whatever_the_default_is(device):
    batch = build(replace(LONG, kv_heads=1), device)
    want = batch.attend("kernel")
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(batch.attend("kernel"), want)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_number_of_splits_hardly_matters(dtype, device):
    # weights are rounded beside other maxima: as for decode, test_metamorphic.py
    bound = 2 * 2.0**-11 + STEP[dtype] if dtype == torch.float16 else 2 * 2.0**-20
    batch = build(replace(LONG, dtype=dtype, kv_heads=1, group=1, window=300, sinks=True), device)
    want = replace(batch, extend_splits=None).attend("kernel").cpu().double()
    for splits in (1, 2, 3, 9, 64):
        got = replace(batch, extend_splits=splits).attend("kernel")
        assert head_errors(got, want).max() <= bound


def test_one_token_of_each_sequence_is_decode(device):
    batch = build(Case((300, 0, 70, 5), group=4, window=200, sinks=True, num_splits=5), device)
    extended = replace(batch, decodes=False, extend_splits=5).attend("kernel")
    assert torch.equal(extended, batch.attend("kernel"))


def test_queries_that_were_announced_as_fewer_harm_no_one(device):
    batch = build(replace(LONG, kv_heads=1), device)
    want = batch.attend("kernel")
    got = replace(batch, max_query_len=3).attend("kernel")
    assert torch.equal(got[:3], want[:3])
    assert torch.equal(got[4:], want[4:])


def planned(monkeypatch, target, kv_heads, group, tokens, num_seqs, length, head_dim=128):
    """Processors, programs that have work, and whether KV is split."""
    count = PROCESSORS[target.name].count
    monkeypatch.setattr(tuning, "num_processors", lambda _: count)
    blocks = KVBlocks.empty(
        1, 64, num_kv_heads=kv_heads, head_dim=head_dim, k_scale=(one := torch.ones(1)), v_scale=one
    )
    rows = tokens * group
    query = torch.zeros(1, 1, 1, dtype=torch.float16)
    config, splits = tuning.plan_extend(target, query, blocks, num_seqs, rows, length, None)
    programs = kv_heads * -(-rows // config.rows)
    if not splits:
        return count, programs * num_seqs, False
    tiles = -(-length // config.tile)
    size = max(-(-num_seqs * tiles // splits), config.least)
    sizes = range(size, size + size // 2 + 1)
    # as split.py has it: as many as fit, of parts half as large again at most
    parts = [num_seqs * -(-tiles // size) for size in sizes]
    return count, programs * next((n for n in parts if n <= splits), parts[0]), True


TARGET = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


@TARGET
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_heads", [1, 2, 5, 8, 32])
def test_a_long_cache_gives_every_processor_a_program(target, kv_heads, head_dim, monkeypatch):
    for group in (1, 4, 7, 16):
        for tokens in (1, 2, 4, 16, 33, 64):
            for num_seqs in (1, 2, 3, 7, 50):
                shape = (kv_heads, group, tokens, num_seqs, 128 * 1024, head_dim)
                processors, programs, _ = planned(monkeypatch, target, *shape)
                assert programs >= processors, shape


@TARGET
def test_kv_is_not_split_where_work_is_plenty_or_short(target, monkeypatch):
    for kv_heads, group, tokens, num_seqs, length in (
        (8, 4, 8192, 1, 8192),  # a prompt
        (8, 4, 2048, 1, 34 * 1024),  # a chunk
        (8, 4, 4, 64, 4096),  # a few tokens of many
        (8, 4, 100, 1, 200),  # a short prompt: one part
    ):
        assert not planned(monkeypatch, target, kv_heads, group, tokens, num_seqs, length)[2]
    assert planned(monkeypatch, target, 8, 4, 4, 1, 128 * 1024)[2]


@pytest.mark.parametrize("splits", [0, -3])
@pytest.mark.parametrize("changes", [{}, {"query_lens": None}], ids=["extend", "decode"])
def test_a_number_of_splits_that_is_none(splits, changes):
    case = replace(LONG, **changes, extend_splits=splits, num_splits=splits)
    with pytest.raises(ValueError, match=f"num_splits must be at least 1.* got {splits}"):
        build(case).attend("kernel")


def test_the_interpreter_splits_nothing_by_itself():
    batch = build(Case((9,)))
    plan = tuning.plan_extend(INTERPRETER, batch.query, batch.blocks, 1, 4, 2**20, None)
    assert plan[1] == 0
