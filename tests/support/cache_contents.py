"""A paged cache whose bytes tell which tokens were written, for tests."""

import torch
from paged import RUNTIME

SHAPES = ((1, 4), (2, 8))  # heads and channels of the layers
UNWRITTEN = 0xAA


def make_cache(num_blocks, *, block_size=4, can_grow=False, runtime=RUNTIME):
    """Two layers of different shape."""
    cache = runtime.cache.PagedKVCache(num_blocks, block_size=block_size, can_grow=can_grow)
    for index, (heads, channels) in enumerate(SHAPES):
        cache.add_layer(index, layer(num_blocks, block_size, heads, channels, runtime))
    return cache


def layer(num_blocks, block_size, heads, channels, runtime=RUNTIME):
    """Blocks in which nothing was written."""
    scale = torch.ones(1)
    blocks = runtime.storage.KVBlocks.empty(
        num_blocks,
        block_size,
        num_kv_heads=heads,
        head_dim=channels,
        k_scale=scale,
        v_scale=scale,
        count=True,
    )
    blocks.codes.view(torch.uint8).fill_(UNWRITTEN)
    return blocks


def write(cache, slots, marks):
    """Put each mark, an integer, into all bytes of its slot: K and V and layers differ."""
    for index, blocks in cache.layers.items():
        stored = blocks.codes.view(torch.uint8)
        for slot, mark in zip(slots.tolist(), marks, strict=True):
            block_id, offset = divmod(slot, cache.block_size)
            for part in (0, 1):
                stored[part, block_id, :, offset] = byte(mark, index, part)


def filled(cache, token_ids, *, commit=True):
    """A sequence that ran: everything written, and offered to others."""
    sequence = cache.allocate(token_ids)
    rest = token_ids[sequence.num_cached_tokens :]
    write(cache, cache.append(sequence, token_ids=rest), rest)
    if commit:
        cache.commit(sequence)
    return sequence


def contents(cache, sequence):
    """What `sequence` sees, through its block table: per token, the bytes of both layers."""
    table = cache.block_tables([sequence])[0]
    seen = []
    for position in range(sequence.length):
        block_id, offset = int(table[position // cache.block_size]), position % cache.block_size
        codes = [blocks.codes.view(torch.uint8) for blocks in cache.layers.values()]
        seen.append([sorted({*c[p, block_id, :, offset].flatten().tolist()}) for c in codes
                     for p in (0, 1)])  # fmt: skip
    return seen


def expected(marks):
    """What `contents` must be; `None` marks a token that was never written."""
    return [[[byte(mark, index, part)] for index in range(len(SHAPES)) for part in (0, 1)] for mark in marks]


def byte(mark, index, part):
    """Any two marks differ in one of the four bytes, nearly always."""
    return hash((mark, index, part)) & 0xFF


def state(cache):
    """Everything that an operation may change."""
    pool = cache._pool
    return (
        list(pool._references),
        list(pool._free),
        dict(pool._by_content),
        dict(pool._content),
        [blocks.codes.view(torch.uint8).flatten().tolist() for blocks in cache.layers.values()],
    )
