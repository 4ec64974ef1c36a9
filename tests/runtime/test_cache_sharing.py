"""PagedKVCache: blocks found after free, copy on write, truncation, and long random histories."""

import hashlib

import pytest
from cache_contents import contents, expected, filled, make_cache, state, write
from cache_model import run_history

from fp8kv_runtime.cache import content_hashes

PROMPT = list(range(100, 110))  # two blocks of four, and a half


def test_blocks_are_found_again_after_free_until_they_are_reused():
    cache = make_cache(4)
    first = filled(cache, PROMPT)
    blocks, seen = list(first.block_ids), contents(cache, first)
    cache.free(first)
    assert cache.num_free_blocks == 4
    second = cache.allocate(PROMPT)
    assert second.block_ids == blocks[:2]
    assert contents(cache, second) == seen[:8]
    assert cache.num_free_blocks == 2
    cache.free(second)
    # two blocks were never published; the third taken is the end of the prefix, the fourth its
    # beginning
    cache.append(cache.allocate(), 12)
    assert cache.allocate(PROMPT).num_cached_tokens == 4
    cache = make_cache(4)
    cache.free(filled(cache, PROMPT))
    cache.append(cache.allocate(), 16)
    assert cache.allocate(PROMPT).num_cached_tokens == 0


def test_freeing_twice_gives_nothing_back_twice():
    cache = make_cache(4)
    sequence, other = filled(cache, PROMPT[:5]), filled(cache, [1])
    cache.free(sequence)
    before = state(cache)
    cache.free(sequence)
    assert state(cache) == before
    assert (sequence.length, sequence.block_ids) == (0, [])
    assert cache.num_free_blocks == 3
    assert contents(cache, other) == expected([1])


def test_copy_on_write_leaves_the_sharer_alone():
    cache = make_cache(8)
    first = filled(cache, PROMPT)
    second = cache.fork(first)
    assert second.block_ids == first.block_ids
    write(cache, cache.append(second, token_ids=[1, 2, 3]), [1, 2, 3])
    assert contents(cache, first) == expected(PROMPT)
    assert contents(cache, second) == expected([*PROMPT, 1, 2, 3])
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    own = list(first.block_ids)
    write(cache, cache.append(first, token_ids=[4]), [4])
    assert first.block_ids == own  # no one else holds it any more
    assert contents(cache, second) == expected([*PROMPT, 1, 2, 3])
    assert second.token_ids == [*PROMPT, 1, 2, 3]


def test_a_fork_outlives_its_parent():
    cache = make_cache(4)
    first = filled(cache, PROMPT)
    second = cache.fork(first)
    cache.free(first)
    assert contents(cache, second) == expected(PROMPT)
    blocks = list(second.block_ids)
    cache.append(second)
    assert second.block_ids == blocks
    cache.free(second)
    assert cache.num_free_blocks == 4


def test_a_published_block_that_is_written_again_is_withdrawn():
    cache = make_cache(8)
    first = filled(cache, PROMPT)
    cache.truncate(first, 6)
    assert cache.allocate(PROMPT).num_cached_tokens == 8  # nothing has changed yet
    cache = make_cache(8)
    first = filled(cache, PROMPT)
    blocks = list(first.block_ids)
    cache.truncate(first, 6)
    write(cache, cache.append(first, token_ids=[1, 2, 3]), [1, 2, 3])
    assert first.block_ids[:2] == blocks[:2]
    assert cache.allocate(PROMPT).num_cached_tokens == 4
    cache.commit(first)
    again = cache.allocate([*PROMPT[:6], 1, 2, 9])
    assert contents(cache, again) == expected([*PROMPT[:6], 1, 2])


def test_a_published_block_that_another_holds_is_copied():
    cache = make_cache(8)
    first, second = filled(cache, PROMPT), None
    second = cache.allocate(PROMPT)
    cache.truncate(first, 6)
    write(cache, cache.append(first, token_ids=[1, 2]), [1, 2])
    assert contents(cache, second) == expected(PROMPT[:8])
    assert contents(cache, first) == expected([*PROMPT[:6], 1, 2])
    cache.commit(first)
    assert contents(cache, cache.allocate(PROMPT)) == expected(PROMPT[:8])
    assert contents(cache, cache.allocate([*first.token_ids, 0])) == expected(first.token_ids)


@pytest.mark.parametrize("length", [0, 1, 4, 7, 8, 9, 10])
def test_truncate_keeps_what_is_before(length):
    cache = make_cache(8)
    sequence = filled(cache, PROMPT)
    cache.truncate(sequence, length)
    assert sequence.length == length
    assert sequence.token_ids == PROMPT[:length]
    assert cache.num_free_blocks == 8 - -(-length // 4)
    assert contents(cache, sequence) == expected(PROMPT[:length])


@pytest.mark.parametrize("length", [-1, 11])
def test_truncate_refuses_what_is_not_there(length):
    cache = make_cache(8)
    sequence = filled(cache, PROMPT)
    with pytest.raises(ValueError, match=f"cannot truncate 10 tokens to {length}"):
        cache.truncate(sequence, length)
    assert contents(cache, sequence) == expected(PROMPT)


@pytest.mark.parametrize("seed", range(6))
def test_every_sequence_sees_its_own_tokens_at_all_times(seed):
    grows = seed % 3 == 0
    failures = run_history(seed, steps=400, can_grow=grows)
    assert (failures == 0) == grows, "a pool that cannot grow should have run out"


@pytest.fixture
def hashed(monkeypatch):
    """Grows by one for each block that is hashed."""
    calls, sha256 = [], hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda data: calls.append(data) or sha256(data))
    return calls


def test_commit_hashes_each_block_once(hashed):
    cache, tokens = make_cache(16), [*PROMPT, *range(30)]
    sequence = cache.allocate([])
    for token in tokens:
        cache.append(sequence, token_ids=[token])
        cache.commit(sequence)
    assert len(hashed) == len(tokens) // 4
    published = [cache._pool._content[block] for block in sequence.block_ids]
    assert published == content_hashes(tokens, 4)


def test_commit_hashes_only_what_a_fork_or_a_truncated_sequence_wrote(hashed):
    cache = make_cache(16)
    first = filled(cache, PROMPT)
    second = cache.fork(first)
    cache.truncate(first, 6)
    hashed.clear()
    for sequence, new in ((first, [7, 8]), (second, [1, 2])):
        write(cache, cache.append(sequence, token_ids=new), new)
        cache.commit(sequence)
        cache.commit(sequence)
        assert len(hashed) == 1
        assert hashed.pop().endswith(new[1].to_bytes(8, "little"))
    for sequence in (first, second):
        assert cache.allocate([*sequence.token_ids, 0]).num_cached_tokens == sequence.length
    hashed.clear()
    third = cache.allocate([*first.token_ids, 3, 4, 5, 6, 0])
    cache.append(third, token_ids=[3, 4, 5, 6])
    assert len(hashed) == 3
    cache.commit(third)
    assert len(hashed) == 4
