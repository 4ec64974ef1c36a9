"""PagedKVCache: which sequence sees which bytes, which blocks are shared, and what an error leaves."""

import hashlib
from copy import deepcopy

import pytest
from cache_model import contents, expected, filled, layer, make_cache, run_history, state

from fp8kv_runtime.cache import BlockPool, OutOfBlocksError, PagedKVCache

PROMPT = list(range(100, 110))  # two blocks of four, and a half


def test_no_tokens_have_no_slots_and_no_sequences_no_blocks():
    cache = make_cache(8)
    assert (cache.append(cache.allocate(), 0).tolist(), cache.block_tables([]).shape) == ([], (0, 0))


def test_layers_must_have_the_caches_blocks():
    cache = PagedKVCache(8, block_size=4)
    for num_blocks, block_size in ((7, 4), (8, 8)):
        with pytest.raises(ValueError, match="this cache has 8 of 4"):
            cache.add_layer(0, layer(num_blocks, block_size, 1, 4))
    for num_blocks, block_size in ((0, 4), (8, 0)):
        with pytest.raises(ValueError, match="at least one block of one token"):
            PagedKVCache(num_blocks, block_size=block_size)


def test_running_out_names_the_blocks_and_leaves_everything_as_it_was():
    cache = make_cache(5)
    long, short = filled(cache, PROMPT), filled(cache, [7, 8])
    fork = cache.fork(short)
    before = deepcopy((state(cache), [vars(s) for s in (long, short, fork)]))
    # one block is free: either of both would fit alone; and the fork needs a copy of its block
    message = "^3 blocks needed, 1 of 5 are free; free a sequence, or make the cache with more blocks$"
    for sequences in ([long, short], [short, fork]):
        with pytest.raises(OutOfBlocksError, match=message):
            cache.reserve(sequences, 3)
        assert (state(cache), [vars(s) for s in (long, short, fork)]) == before
    cache.reserve([long, fork], 2)
    assert cache.num_free_blocks == 0


def test_a_pool_doubles_or_takes_what_is_needed():
    cache = make_cache(2, can_grow=True)
    first, second = filled(cache, [1, 2, 3]), filled(cache, [4])
    counts = cache.layers[0].counts
    cache.append(first, token_ids=range(20))
    assert cache.num_blocks == cache.layers[0].num_blocks == cache.layers[1].num_blocks == 7
    assert cache.layers[0].counts is counts
    cache.append(second, 4)
    assert cache.num_blocks == 14
    cache.append(second, 400)
    assert len({*first.block_ids, *second.block_ids}) == 6 + 102


def test_a_prefix_is_shared_up_to_the_last_full_block_and_leaves_a_token_to_run():
    cache = make_cache(16)
    first = filled(cache, PROMPT, commit=False)
    assert cache.allocate(PROMPT).num_cached_tokens == 0
    cache.commit(first)
    for prompt in (PROMPT, [*PROMPT, 1, 2, 3], PROMPT[:9]):
        second = cache.allocate(prompt)
        assert second.num_cached_tokens == second.length == 8
        assert (second.block_ids, contents(cache, second)) == (first.block_ids[:2], expected(PROMPT[:8]))
    assert (cache.allocate(PROMPT[:8]).num_cached_tokens, cache.allocate([]).num_cached_tokens) == (4, 0)
    for changed, shared in ((0, 0), (3, 0), (4, 4), (7, 4), (8, 8)):
        other = list(PROMPT)
        other[changed] += 1
        assert cache.allocate(other).num_cached_tokens == shared, changed
    assert cache.allocate(PROMPT[4:]).num_cached_tokens == 0  # the second block after another past


def test_blocks_are_found_again_after_free_until_they_are_reused():
    cache = make_cache(4)
    first = filled(cache, PROMPT)
    blocks = list(first.block_ids)
    for _ in range(2):  # the second time nothing
        cache.free(first)
        assert (first.length, first.block_ids, cache.num_free_blocks) == (0, [], 4)
    second = cache.allocate(PROMPT)
    assert (second.block_ids, contents(cache, second)) == (blocks[:2], expected(PROMPT[:8]))
    assert cache.num_free_blocks == 2
    cache.free(second)
    # two blocks were never published; the third taken is the end of the prefix, the fourth its beginning
    third = cache.allocate()
    cache.append(third, 12)
    found = cache.allocate(PROMPT)
    assert found.num_cached_tokens == 4
    cache.free(found)
    cache.append(third, 4)
    assert cache.allocate(PROMPT).num_cached_tokens == 0


def test_a_pool_finds_the_first_of_blocks_with_one_content_and_none_that_is_free_is_released():
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.publish(first, b"x")
    pool.publish(second, b"x")
    pool.publish(first, b"y")
    assert (pool.find(b"x"), pool.find(b"y")) == (first, None)
    pool.forget(second)
    assert pool.find(b"x") == first
    pool.forget(first)
    pool.publish(first, b"y")
    assert (pool.find(b"x"), pool.find(b"y")) == (None, first)
    pool.release(first)
    with pytest.raises(ValueError, match=f"^block {first} is free already$"):
        pool.release(first)
    assert (pool.references(first), pool.num_free) == (0, 1)


def test_only_as_many_blocks_are_held_and_copied_as_are_needed():
    cache = make_cache(3)
    first = filled(cache, PROMPT)
    for length in (-1, 11):
        with pytest.raises(ValueError, match=f"^cannot truncate 10 tokens to {length}$"):
            cache.truncate(first, length)
    with pytest.raises(ValueError, match="^cannot append -1 tokens;"):
        cache.append(first, -1)
    for length in (10, 9, 8, 7, 4, 2):
        cache.truncate(first, length)
        assert cache.num_free_blocks == 3 - -(-length // 4)
    second, third = cache.fork(first), cache.fork(first)
    cache.reserve([first, second, third], 1)  # where all that hold a block append, the last one keeps it
    assert len({s.block_ids[0] for s in (first, second, third)}) == 3
    assert [contents(cache, s)[:2] for s in (first, second, third)] == [expected(PROMPT[:2])] * 3


@pytest.mark.parametrize("seed", range(4))
def test_every_sequence_sees_its_own_tokens_at_all_times(seed):
    grows = seed % 3 == 0
    failures = run_history(seed, steps=300, can_grow=grows)
    assert (failures == 0) == grows, "a pool that cannot grow should have run out"


def test_commit_hashes_only_what_is_new(monkeypatch):
    hashed, sha256 = [], hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda data: hashed.append(data) or sha256(data))
    cache, tokens, new = make_cache(16), [*PROMPT, *range(30)], [3, 4, 5, 6]
    sequence = cache.allocate([])
    for token in tokens:
        cache.append(sequence, token_ids=[token])
        cache.commit(sequence)
    assert len(hashed) == 10
    fork = cache.fork(sequence)
    cache.append(fork, token_ids=new)
    cache.commit(fork)
    assert len(hashed) == 11
    assert hashed[-1].endswith((6).to_bytes(8, "little"))
    found = cache.allocate([*tokens[:8], *new, 0])
    assert len(hashed) == 14
    cache.append(found, token_ids=new)
    cache.commit(found)
    assert len(hashed) == 15
