"""Splits of the KV of a batch: parts of about one size whatever the lengths.

Found on the device from the lengths there, so that a captured launch stays right as they grow:
a batch of one long and many short sequences takes as long as one of equal sequences.
"""

import triton
import triton.language as tl

BISECTIONS: tl.constexpr = tl.constexpr(4)


@triton.jit
def plan_parts(
    seq_lens_ptr: tl.tensor, seq_starts_ptr: tl.tensor, cu_seqlens_ptr: tl.tensor, num_seqs: tl.tensor,
    num_splits: tl.tensor, least: tl.tensor, TILE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_STARTS: tl.constexpr, EXTENDS: tl.constexpr, BLOCK_S: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Return number, tiles and parts (at least one) of every sequence: 3 x [BLOCK_S].

    With EXTENDS, `cu_seqlens` says how many queries each has; one without queries has 0 tiles.

    Parts have a `num_splits`th of all tiles, rounded up, or `least`; or a little more where they
    then are at most `num_splits`, a wave of programs. Otherwise they are at most `num_splits`
    + `num_seqs`.
    """
    seqs = tl.arange(0, BLOCK_S)
    inside = seqs < num_seqs
    seq_lens = tl.load(seq_lens_ptr + seqs, mask=inside, other=0)
    first = tl.zeros_like(seq_lens)
    query_lens = 1
    if EXTENDS:
        query_lens = tl.load(cu_seqlens_ptr + 1 + seqs, mask=inside, other=0)
        query_lens -= tl.load(cu_seqlens_ptr + seqs, mask=inside, other=0)
    if HAS_STARTS:
        first = tl.load(seq_starts_ptr + seqs, mask=inside, other=0)
    if WINDOW > 0:
        first = tl.maximum(first, seq_lens - query_lens + 1 - WINDOW)
    # whole tiles, counted from the tile that holds the first position
    tiles = tl.maximum(tl.cdiv(seq_lens - first // TILE * TILE, TILE), 0)
    if EXTENDS:
        tiles = tl.where(query_lens > 0, tiles, 0)
    total = tl.sum(tiles)
    size = tl.maximum(tl.cdiv(total, num_splits), least)
    # up to half as large again: beyond that, parts of uneven size share processors better
    enough = size + size // 2
    enough = tl.where(tl.sum(count_parts(tiles, enough, inside)) <= num_splits, enough, size)
    # bisected without a branch: beside one the compiler no longer loads K and V ahead
    for step in tl.static_range(1 + BISECTIONS):
        middle = size if step == 0 else (size + enough) // 2
        fits = tl.sum(count_parts(tiles, middle, inside)) <= num_splits
        size, enough = tl.where(fits, size, middle + 1), tl.where(fits, middle, enough)
    return seqs, tiles, count_parts(tiles, enough, inside)


@triton.jit
def count_parts(tiles: tl.tensor, size: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return how many parts of `size` tiles every sequence has, [BLOCK_S] as `tiles` and `inside` are."""
    return tl.where(inside, tl.maximum(tl.cdiv(tiles, size), 1), 0)


@triton.jit
def find_part(
    program: tl.tensor, seqs: tl.tensor, tiles: tl.tensor, parts: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Return three scalars: a program's sequence, the number of its part there, and the tiles of a part.

    `seqs`, `tiles` and `parts` [BLOCK_S] are what `plan_parts` returned. A program past the last part
    gets a sequence of `num_seqs` or more.
    """
    seq = tl.sum((tl.cumsum(parts) <= program).to(tl.int32))
    before = tl.sum(tl.where(seqs < seq, parts, 0))
    own_parts = tl.maximum(tl.sum(tl.where(seqs == seq, parts, 0)), 1)
    own_tiles = tl.sum(tl.where(seqs == seq, tiles, 0))
    return seq, program - before, tl.cdiv(own_tiles, own_parts)
