"""A paged cache whose bytes tell which tokens were written, and random histories beside plain lists."""

import random

import torch
from paged import RUNTIME

from fp8kv_runtime.cache import content_hashes

SHAPES = ((1, 4), (2, 8))  # heads and channels of the layers
UNWRITTEN = 0xAA


def make_cache(num_blocks, *, block_size=4, can_grow=False, runtime=RUNTIME):
    cache = runtime.cache.PagedKVCache(num_blocks, block_size=block_size, can_grow=can_grow)
    for index, (heads, channels) in enumerate(SHAPES):
        cache.add_layer(index, layer(num_blocks, block_size, heads, channels, runtime))
    return cache


def layer(num_blocks, block_size, heads, channels, runtime=RUNTIME):
    sizes, one = {"num_kv_heads": heads, "head_dim": channels}, torch.ones(1)
    empty = runtime.storage.KVBlocks.empty
    blocks = empty(num_blocks, block_size, **sizes, k_scale=one, v_scale=one, count=True)
    blocks.codes.view(torch.uint8).fill_(UNWRITTEN)
    return blocks


def write(cache, slots, marks):
    """Put each mark, an integer, into all bytes of its slot: K and V and layers differ."""
    for index, blocks in cache.layers.items():
        for part, stored in enumerate(blocks.codes.view(torch.uint8)):
            for slot, mark in zip(slots.tolist(), marks, strict=True):
                block_id, offset = divmod(slot, cache.block_size)
                stored[block_id, :, offset] = byte(mark, index, part)


def filled(cache, token_ids, *, commit=True):
    sequence = cache.allocate(token_ids)
    rest = token_ids[sequence.num_cached_tokens :]
    write(cache, cache.append(sequence, token_ids=rest), rest)
    if commit:
        cache.commit(sequence)
    return sequence


def contents(cache, sequence):
    """What `sequence` sees, through its block table: per token, the bytes of both layers."""
    table, seen = cache.block_tables([sequence])[0], []
    parts = [part for blocks in cache.layers.values() for part in blocks.codes.view(torch.uint8)]
    for position in range(sequence.length):
        block_id, offset = int(table[position // cache.block_size]), position % cache.block_size
        seen.append([sorted({*part[block_id, :, offset].flatten().tolist()}) for part in parts])
    return seen


def expected(marks):
    """What `contents` must be; `None` marks a token that was never written."""
    return [[[byte(mark, index, part)] for index in range(len(SHAPES)) for part in (0, 1)] for mark in marks]


def byte(mark, index, part):
    """Any two marks differ in one of the four bytes, nearly always."""
    return hash((mark, index, part)) & 0xFF


def state(cache):
    pool = cache._pool
    stored = [blocks.codes.view(torch.uint8).flatten().tolist() for blocks in cache.layers.values()]
    return [*pool._references], [*pool._free], {**pool._by_content}, {**pool._content}, stored


def run_history(seed, *, steps, can_grow=False, runtime=RUNTIME):
    model = Model(seed, make_cache(10, can_grow=can_grow, runtime=runtime), runtime.cache.OutOfBlocksError)
    return sum(model.step() for _ in range(steps))


class Model:
    def __init__(self, seed, cache, out_of_blocks):
        self.rng, self.cache, self.out_of_blocks = random.Random(seed), cache, out_of_blocks
        self.live = []  # [sequence, marks]

    def write(self, marks, tokens, slots=None):
        """What is written for a token depends on all tokens before it, as K and V do."""
        first = len(marks)
        for token in tokens:
            marks.append(hash((marks[-1] if marks else 0, token)))
        if slots is not None:
            write(self.cache, slots, marks[first:])

    def run(self, sequence, marks, tokens, *, known):
        known = {"token_ids": tokens} if known else {}
        self.write(marks, tokens, self.cache.append(sequence, len(tokens), **known))
        if self.rng.random() < 0.7:
            self.cache.commit(sequence)

    def tokens(self, most):
        """Mostly zeros, so that prefixes meet."""
        return [int(self.rng.random() < 0.1) for _ in range(self.rng.randint(1, most))]

    def start(self):
        tokens = self.tokens(14)
        sequence = self.cache.allocate(tokens)
        cached, marks = sequence.num_cached_tokens, []
        assert cached < len(tokens)
        self.write(marks, tokens[:cached])
        self.live.append([sequence, marks])
        self.run(sequence, marks, tokens[cached:], known=True)

    def extend(self):
        sequence, marks = self.rng.choice(self.live)
        self.run(sequence, marks, self.tokens(7), known=self.rng.random() < 0.7)

    def reserve(self):
        chosen = self.rng.sample(self.live, self.rng.randint(1, len(self.live)))
        self.cache.reserve([sequence for sequence, _ in chosen], 1)
        for sequence, marks in chosen:
            self.write(marks, [2], self.cache.slots([sequence], sequence.length - 1, 1)[0])

    def fork(self):
        sequence, marks = self.rng.choice(self.live)
        self.live.append([self.cache.fork(sequence), list(marks)])

    def truncate(self):
        sequence, marks = self.rng.choice(self.live)
        length = self.rng.randint(0, len(marks))
        self.cache.truncate(sequence, length)
        del marks[length:]

    def free(self):
        sequence, _ = self.live.pop(self.rng.randrange(len(self.live)))
        self.cache.free(sequence)

    def step(self):
        """One operation; running out must change nothing."""
        operations = [self.extend, self.extend, self.fork, self.truncate, self.reserve, self.free]
        operation = self.rng.choice(operations)
        if len(self.live) > 5:  # or the pool is full for good
            operation = self.free
        elif not self.live or self.rng.random() < 0.2:
            operation = self.start
        before, fails = state(self.cache), False
        try:
            operation()
        except self.out_of_blocks:
            fails = True
            if operation == self.start:  # it has allocated before it appends
                self.cache.free(self.live.pop()[0])
            else:
                assert state(self.cache) == before
        self.check()
        return fails

    def check(self):
        """Every sequence sees its own tokens, and every block is held as often as it is used."""
        pool = self.cache._pool
        held = [block for sequence, _ in self.live for block in sequence.block_ids]
        assert pool._references == [held.count(block) for block in range(pool.num_blocks)]
        assert set(pool._free) == set(range(pool.num_blocks)) - set(held)
        for sequence, marks in self.live:
            assert (sequence.length, contents(self.cache, sequence)) == (len(marks), expected(marks))
            known = content_hashes(sequence.token_ids or [], self.cache.block_size)
            assert sequence.token_ids is None or sequence.digests == known[: len(sequence.digests)]
