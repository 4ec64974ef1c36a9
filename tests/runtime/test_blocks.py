"""Who owns which block, and which content is found again."""

import pytest

from fp8kv_runtime.cache import BlockPool, OutOfBlocksError, content_hashes


def test_taking_and_releasing_keep_count():
    pool = BlockPool(4)
    taken = pool.take(3)
    assert sorted(taken) == [0, 1, 2]
    assert (pool.num_blocks, pool.num_free) == (4, 1)
    assert [pool.references(block) for block in range(4)] == [1, 1, 1, 0]
    pool.release(taken[1])
    assert pool.num_free == 2
    assert pool.references(taken[1]) == 0


def test_a_block_is_free_when_the_last_holder_releases_it():
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.hold(block)
    assert pool.references(block) == 2
    pool.release(block)
    assert pool.num_free == 0
    pool.release(block)
    assert pool.num_free == 1


def test_releasing_a_free_block_is_an_error():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.release(block)
    with pytest.raises(ValueError, match=f"block {block} is free already"):
        pool.release(block)
    assert pool.references(block) == 0
    assert pool.num_free == 2


def test_the_block_that_is_free_longest_is_taken_first():
    pool = BlockPool(3)
    pool.take(3)
    for block in (1, 2, 0):
        pool.release(block)
    assert pool.take(3) == [1, 2, 0]


def test_taking_too_many_says_what_to_do_and_takes_none():
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(OutOfBlocksError, match="3 blocks needed, 2 of 3 are free; free a sequence"):
        pool.take(3)
    assert pool.num_free == 2


def test_growing_adds_free_blocks_at_the_end():
    pool = BlockPool(2)
    held = pool.take(2)
    pool.grow(5)
    assert (pool.num_blocks, pool.num_free) == (5, 3)
    assert [pool.references(block) for block in held] == [1, 1]
    assert sorted(pool.take(3)) == [2, 3, 4]


def test_published_content_is_found_until_its_block_is_taken_again():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    assert pool.find(b"x") is None
    pool.publish(block, b"x")
    pool.release(block)
    assert pool.find(b"x") == block
    other = pool.take(1)  # the other block was free for longer
    assert other != [block]
    assert pool.find(b"x") == block
    assert pool.take(1) == [block]
    assert pool.find(b"x") is None


def test_holding_a_free_block_takes_it_out_of_the_free_ones():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.publish(block, b"x")
    pool.release(block)
    pool.hold(block)
    assert (pool.references(block), pool.num_free) == (1, 1)
    assert pool.take(1) != [block]
    assert pool.find(b"x") == block


def test_the_first_block_with_a_content_is_the_one_found():
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.publish(first, b"x")
    pool.publish(second, b"x")
    assert pool.find(b"x") == first
    pool.forget(second)
    assert pool.find(b"x") == first
    pool.forget(first)
    assert pool.find(b"x") is None


def test_a_block_has_one_content():
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.publish(block, b"x")
    pool.publish(block, b"y")
    assert pool.find(b"y") is None
    pool.forget(block)
    pool.publish(block, b"y")
    assert pool.find(b"y") == block


def test_content_hashes_are_of_full_blocks_and_all_before_them():
    hashes = content_hashes([1, 2, 3, 4, 5, 6, 7], 3)
    assert len(set(hashes)) == len(hashes) == 2
    assert content_hashes([1, 2, 3, 4, 5, 6], 3) == hashes
    assert content_hashes([1, 2, 3, 9, 5, 6], 3)[0] == hashes[0]
    assert content_hashes([9, 2, 3, 4, 5, 6], 3)[1] != hashes[1]  # another past
    assert content_hashes([4, 5, 6], 3)[0] != hashes[1]
    assert content_hashes([1, 2], 3) == []


def test_content_hashes_tell_tokens_from_their_bytes():
    assert content_hashes([1, 0], 2) != content_hashes([0, 1], 2)
    assert content_hashes([256, 1], 2) != content_hashes([0, 257], 2)
    assert content_hashes([1, 1, 1, 1], 2) != content_hashes([1, 1, 1, 1], 4) * 2
