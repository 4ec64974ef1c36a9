"""Extend attention whose KV is split: a few new tokens over long caches."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from checks import assert_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.processors import PROCESSORS
from paged import Case, build

from fp8kv_runtime.kernels import tuning
from fp8kv_runtime.kernels.targets import INTERPRETER, TARGETS
from fp8kv_runtime.storage import KVBlocks

LONG = Case((70, 30), query_lens=(4, 3), kv_heads=1, group=3, extend_splits=4)


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
    batch = build(LONG, device)
    want = batch.attend("kernel")
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(batch.attend("kernel"), want)
    finally:
        torch.set_default_dtype(torch.float32)


def test_queries_that_were_announced_as_fewer_harm_no_one(device):
    batch = build(LONG, device)
    want = batch.attend("kernel")
    got = replace(batch, max_query_len=3).attend("kernel")
    assert torch.equal(got[:3], want[:3])
    assert torch.equal(got[4:], want[4:])


@pytest.fixture
def planned(monkeypatch):
    """Processors, programs that have work, and whether KV is split."""

    def plan(target, kv_heads, group, tokens, num_seqs, length, head_dim=128):
        count = PROCESSORS[target.name].count
        monkeypatch.setattr(tuning, "num_processors", lambda _: count)
        one = torch.ones(1)
        blocks = KVBlocks.empty(1, 64, num_kv_heads=kv_heads, head_dim=head_dim, k_scale=one, v_scale=one)
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

    return plan


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_kv_is_split_where_processors_would_have_no_program(target, planned):
    shapes = product(
        (1, 2, 5, 8, 32), (1, 4, 16), (1, 2, 16, 33, 64), (1, 2, 3, 50), (128 * 1024,), (64, 128, 256)
    )
    for shape in shapes:
        processors, programs, _ = planned(target, *shape)
        assert programs >= processors, shape

    for kv_heads, group, tokens, num_seqs, length in (
        (8, 4, 8192, 1, 8192),  # a prompt
        (8, 4, 2048, 1, 34 * 1024),  # a chunk
        (8, 4, 4, 64, 4096),  # a few tokens of many
        (8, 4, 100, 1, 200),  # a short prompt: one part
    ):
        assert not planned(target, kv_heads, group, tokens, num_seqs, length)[2]
    assert planned(target, 8, 4, 4, 1, 128 * 1024)[2]


def test_the_interpreter_splits_nothing_by_itself():
    batch = build(Case((9,)))
    plan = tuning.plan_extend(INTERPRETER, batch.query, batch.blocks, 1, 4, 2**20, None)
    assert plan[1] == 0
