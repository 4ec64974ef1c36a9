"""PagedKVCache: which sequence sees which bytes, and what is left after an error."""

from copy import deepcopy

import pytest
import torch
from cache_contents import contents, filled, layer, make_cache, state, write

from fp8kv_runtime.cache import OutOfBlocksError, PagedKVCache

PROMPT = list(range(100, 110))  # two blocks of four, and a half


def test_slots_are_blocks_times_block_size_plus_offset():
    cache = make_cache(8)
    first, second = cache.allocate(), cache.allocate()
    slots = [cache.append(first, 3), cache.append(second, 5), cache.append(first, 2)]
    assert [s.dtype for s in slots] == [torch.int64] * 3
    tables = cache.block_tables([first, second])
    assert tables.dtype == torch.int32
    assert tables.tolist() == [first.block_ids, second.block_ids]
    a, b = first.block_ids
    assert slots[0].tolist() == [4 * a, 4 * a + 1, 4 * a + 2]
    assert slots[2].tolist() == [4 * a + 3, 4 * b]
    assert torch.equal(cache.slots([first, second], 1, 4)[1], slots[1][1:])
    batch = cache.sequences([second, first])
    assert batch.seq_lens.tolist() == [5, 5]
    assert batch.block_tables.tolist() == [second.block_ids, first.block_ids]


def test_shorter_block_tables_end_in_minus_one():
    cache = make_cache(8)
    sequences = [cache.allocate() for _ in range(3)]
    cache.append(sequences[0], 9)
    cache.append(sequences[1], 1)
    tables = cache.block_tables(sequences).tolist()
    assert tables == [
        sequences[0].block_ids,
        [*sequences[1].block_ids, -1, -1],
        [-1, -1, -1],
    ]
    assert cache.block_tables([]).shape == (0, 0)
    assert cache.append(sequences[2], 0).tolist() == []


def test_bytes():
    cache = make_cache(8)
    # K and V, two layers: heads x channels bytes a token
    assert cache.bytes_per_token == 2 * (1 * 4 + 2 * 8)
    assert cache.num_bytes == 8 * 4 * cache.bytes_per_token
    assert cache.num_bytes_used == 0
    sequence = cache.allocate()
    cache.append(sequence, 5)
    assert cache.num_bytes_used == 2 * 4 * cache.bytes_per_token
    other = cache.fork(sequence)
    assert cache.num_bytes_used == 2 * 4 * cache.bytes_per_token  # shared blocks count once
    cache.append(other)
    assert cache.num_bytes_used == 3 * 4 * cache.bytes_per_token
    cache.free(sequence)
    cache.free(other)
    assert (cache.num_bytes_used, cache.num_free_blocks) == (0, 8)


def test_layers_must_have_the_caches_blocks():
    cache = PagedKVCache(8, block_size=4)
    for num_blocks, block_size in ((7, 4), (8, 8)):
        with pytest.raises(ValueError, match="this cache has 8 of 4"):
            cache.add_layer(0, layer(num_blocks, block_size, 1, 4))
    for num_blocks, block_size in ((0, 4), (8, 0)):
        with pytest.raises(ValueError, match="at least one block of one token"):
            PagedKVCache(num_blocks, block_size=block_size)


def test_running_out_leaves_everything_as_it_was():
    cache = make_cache(5)
    long, short = filled(cache, PROMPT), filled(cache, [7, 8])
    fork = cache.fork(short)
    before = deepcopy(state(cache)), deepcopy([vars(s) for s in (long, short, fork)])
    for failing in (
        lambda: cache.append(long, 7),
        lambda: cache.append(long, token_ids=range(7)),
        # one block is free: either sequence alone would fit
        lambda: cache.reserve([long, short], 3),
        # the fork needs a copy of its block, and both one more
        lambda: cache.reserve([short, fork], 3),
    ):
        with pytest.raises(OutOfBlocksError, match="1 of 5 are free"):
            failing()
        assert state(cache) == before[0]
        assert [vars(s) for s in (long, short, fork)] == before[1]
    cache.reserve([long, fork], 2)
    assert cache.num_free_blocks == 0


def test_only_as_many_copies_as_are_needed():
    """Where all that hold a block append, the last one keeps it."""
    cache = make_cache(3)
    first = filled(cache, [1, 2])
    second, third = cache.fork(first), cache.fork(first)
    cache.reserve([first, second, third], 1)
    blocks = {s.block_ids[0] for s in (first, second, third)}
    assert len(blocks) == 3
    assert [contents(cache, s)[:2] for s in (second, third)] == [contents(cache, first)[:2]] * 2


def test_growing_keeps_bytes_and_sequences():
    cache = make_cache(2, can_grow=True)
    first, second = filled(cache, [1, 2, 3]), filled(cache, [4])
    before = contents(cache, first), contents(cache, second)
    counts = cache.layers[0].counts
    write(cache, cache.append(first, token_ids=range(20)), range(20))
    assert cache.num_blocks == cache.layers[0].num_blocks == cache.layers[1].num_blocks >= 7
    assert contents(cache, first)[:3] == before[0]
    assert contents(cache, second) == before[1]
    assert cache.layers[0].counts is counts
    cache.append(second, 400)
    assert len({*first.block_ids, *second.block_ids}) == 6 + 101


def test_a_prefix_is_shared_up_to_the_last_full_block():
    cache = make_cache(16)
    first = filled(cache, PROMPT)
    same, longer = cache.allocate(PROMPT), cache.allocate([*PROMPT, 1, 2, 3])
    for second in (same, longer):
        assert second.num_cached_tokens == second.length == 8
        assert second.block_ids == first.block_ids[:2]
        assert contents(cache, second) == contents(cache, first)[:8]
    assert [cache._pool.references(b) for b in first.block_ids] == [3, 3, 1]


def test_at_least_one_token_is_left_to_run():
    cache = make_cache(16)
    first = filled(cache, PROMPT[:8])
    second = cache.allocate(PROMPT[:8])
    assert second.num_cached_tokens == 4
    assert second.block_ids == first.block_ids[:1]
    assert cache.allocate(PROMPT[:9]).num_cached_tokens == 8
    assert cache.allocate([]).num_cached_tokens == 0


@pytest.mark.parametrize(("changed", "shared"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8)])
def test_another_prefix_is_not_shared(changed, shared):
    cache = make_cache(16)
    filled(cache, PROMPT)
    other = list(PROMPT)
    other[changed] += 1
    assert cache.allocate(other).num_cached_tokens == shared


def test_the_same_tokens_after_another_past_are_not_shared():
    cache = make_cache(16)
    filled(cache, [*PROMPT[:4], 9, 9, 9, 9, 5])
    assert cache.allocate([*PROMPT[4:8], 9, 9, 9, 9, 5]).num_cached_tokens == 0
    assert cache.allocate([9, 9, 9, 9, 5]).num_cached_tokens == 0


def test_what_is_not_committed_is_not_shared():
    cache = make_cache(16)
    first = filled(cache, PROMPT, commit=False)
    assert cache.allocate(PROMPT).num_cached_tokens == 0
    cache.commit(first)
    assert cache.allocate(PROMPT).num_cached_tokens == 8


@pytest.mark.parametrize("start", [None, PROMPT[:3]])
def test_unknown_tokens_are_never_shared(start):
    cache = make_cache(16)
    sequence = cache.allocate(start)
    if start is not None:
        write(cache, cache.append(sequence, token_ids=start), start)
    cache.append(sequence, 9)
    cache.append(sequence, token_ids=PROMPT)  # known again, after a gap
    before = state(cache)
    cache.commit(sequence)
    assert state(cache) == before
    assert cache.allocate([*PROMPT, *PROMPT]).num_cached_tokens == 0


def test_tokens_after_a_reserved_gap_are_unknown():
    cache = make_cache(16)
    sequence = cache.allocate(PROMPT)
    cache.reserve([sequence], 3)
    write(cache, cache.append(sequence, token_ids=PROMPT), PROMPT)
    cache.commit(sequence)
    assert cache.allocate([*PROMPT, 1]).num_cached_tokens == 0
