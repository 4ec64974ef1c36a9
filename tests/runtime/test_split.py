"""Parts of KV: every tile once, none larger than its share, whatever the lengths; and where KV is split."""

from bisect import bisect_left
from itertools import accumulate, product
from random import Random

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from kernels.processors import PROCESSORS

from fp8kv_runtime.kernels import tuning
from fp8kv_runtime.kernels.split import plan_parts
from fp8kv_runtime.kernels.targets import TARGETS
from fp8kv_runtime.storage import KVBlocks

TILE = 16


@triton.jit
def plan_kernel(
    lens_ptr, starts_ptr, ends_ptr, out_ptr, num_seqs, num_splits, least, TILE: tl.constexpr,
    WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr, EXTENDS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    seqs, _, parts = plan_parts(
        lens_ptr, starts_ptr, ends_ptr, num_seqs, num_splits, least, TILE, WINDOW, HAS_STARTS,
        EXTENDS, BLOCK_S,
    )  # fmt: skip
    tl.store(out_ptr + seqs, parts, mask=seqs < num_seqs)


def plan(lens, num_splits, least, tile=TILE, starts=None, window=0, queries=None):
    """Parts of every sequence."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ends = None if queries is None else [0, *accumulate(queries)]
    tensors = [
        None if x is None else torch.tensor(x, dtype=torch.int32, device=device) for x in (lens, starts, ends)
    ]
    out = torch.empty_like(tensors[0])
    plan_kernel[(1,)](
        *tensors, out, len(lens), num_splits, least, TILE=tile, WINDOW=window,
        HAS_STARTS=starts is not None, EXTENDS=queries is not None,
        BLOCK_S=triton.next_power_of_2(len(lens)),
    )  # fmt: skip
    return out.tolist()


def tiles_of(lens, starts=None, window=0, queries=None):
    found = []
    for seq, length in enumerate(lens):
        new, first = 1 if queries is None else queries[seq], starts[seq] if starts else 0
        if window:
            first = max(first, length - new + 1 - window)
        found.append(-(-(length - first // TILE * TILE) // TILE) if new else 0)
    return found


def count_parts(tiles, size):
    return sum(max(1, -(-n // size)) for n in tiles)


# without shrinking, which takes minutes
@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
@example(num_seqs=64, longest=2**18, skew=1, num_splits=400, least=1, window=0, draws=set(), seed=0)
@given(
    num_seqs=st.integers(1, 512),
    longest=st.integers(1, 2**18),
    skew=st.sampled_from([0, 1, 4, 20]),
    num_splits=st.integers(1, 2048),
    least=st.sampled_from([1, 4, 8]),
    window=st.sampled_from([0, 100]),
    draws=st.sets(st.sampled_from(["starts", "queries"])),
    seed=st.integers(0, 2**32),
)
def test_batches_fit_the_slots_where_parts_half_as_large_again_do(
    num_seqs, longest, skew, num_splits, least, window, draws, seed
):
    random = Random(seed)
    lens = [int(longest * random.random() ** skew) for _ in range(num_seqs)]
    options = {"window": window}
    for name in sorted(draws):
        options[name] = [random.choice((0, random.randint(0, length))) for length in lens]
    parts, tiles = plan(lens, num_splits, least, **options), tiles_of(lens, **options)
    share = max(-(-sum(tiles) // num_splits), least)
    sizes = range(share, share + share // 2 + 1)
    fits = bisect_left(sizes, True, key=lambda size: count_parts(tiles, size) <= num_splits)
    if fits == len(sizes):
        assert sum(parts) == count_parts(tiles, share)
    else:
        assert sum(parts) <= num_splits
        # the smallest that fits, and what four bisections leave
        largest = sizes[fits] + (share // 32 + 1 if fits else 0)
        assert max(-(-n // p) for n, p in zip(tiles, parts, strict=True)) <= largest


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_no_wave_of_programs_is_nearly_empty(target):
    for head_dim, (num_seqs, length) in product((64, 128, 256), ((1, 2**15), (8, 2**15), (64, 2**11))):
        config = tuning.find_config("decode", ("", target.name, target.backend), 8, head_dim)
        slots = config.per_processor * PROCESSORS[target.name].count // 8  # of each KV head
        parts = plan([length] * num_seqs, slots, config.least, config.tile)
        largest = -(-length // (config.tile * parts[0])) * config.tile
        waves = -(-sum(parts) // slots)
        # one wave of parts half as large again is two thirds full
        full = num_seqs * length / (waves * slots * largest)
        assert full >= 2 / 3 or sum(parts) == num_seqs > slots, (head_dim, num_seqs)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_kv_is_split_where_processors_would_have_no_program(target, monkeypatch):
    count = PROCESSORS[target.name].count
    monkeypatch.setattr(tuning, "num_processors", lambda _: count)

    def plan(kv_heads, group, tokens, num_seqs, length, head_dim=128):
        one, query = torch.ones(1), torch.zeros(1, 1, 1, dtype=torch.float16)
        blocks = KVBlocks.empty(1, 64, num_kv_heads=kv_heads, head_dim=head_dim, k_scale=one, v_scale=one)
        return tuning.plan_extend(target, query, blocks, num_seqs, tokens * group, length, None)

    length = 128 * 1024
    for kv_heads, group, tokens, num_seqs, head_dim in product(
        (1, 2, 5, 8, 32), (1, 4, 16), (1, 2, 16, 33, 64), (1, 2, 3, 50), (64, 128, 256)
    ):
        config, splits = plan(kv_heads, group, tokens, num_seqs, length, head_dim)
        programs, parts = kv_heads * -(-tokens * group // config.rows), [num_seqs]
        if splits:  # as split.py has it: as many as fit, of parts half as large again at most
            tiles = -(-length // config.tile)
            size = max(-(-num_seqs * tiles // splits), config.least)
            parts = [num_seqs * -(-tiles // n) for n in range(size, size + size // 2 + 1)]
        programs *= next((n for n in parts if n <= splits), parts[0])
        assert programs >= count, (kv_heads, group, tokens, num_seqs, head_dim)
    for shape in (
        (8, 4, 8192, 1, 8192),  # a prompt
        (8, 4, 2048, 1, 34 * 1024),  # a chunk
        (8, 4, 4, 64, 4096),  # a few tokens of many
        (8, 4, 100, 1, 200),  # a short prompt: one part
    ):
        assert plan(*shape)[1] == 0
    assert plan(8, 4, 4, 1, length)[1] > 0
