"""`PagedKVCache`: K and V of many sequences in FP8, in blocks that sequences can share."""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8kv_runtime.blocks import BlockPool, Sequence, content_hashes
from fp8kv_runtime.storage import KVBlocks, check_tensor


@dataclass(frozen=True)
class PagedSequences:
    """Where the sequences of one batch lie, as kernels read it.

    `seq_starts` is the first position that may be attended to: 0, or the width of left padding.

    Raises:
        ValueError: shapes, types or devices are not those below, or not one another's.
    """

    block_tables: Tensor  # [S, max_blocks] int32, -1 padded
    seq_lens: Tensor  # [S] int32, tokens in the cache including this step's
    seq_starts: Tensor | None = None  # [S] int32

    def __post_init__(self) -> None:
        tables, rows = self.block_tables, (self.seq_lens.numel(),)
        shapes = {"seq_lens": rows, "seq_starts": rows, "block_tables": (*rows, *tables.shape[-1:])}
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is not None:
                check_tensor(name, tensor, (shape,), torch.int32, tables.device)
                # kernels read memory, not views of it
                object.__setattr__(self, name, tensor.contiguous())

    def to(self, device: torch.device) -> "PagedSequences":
        """The same on another device."""
        starts = None if self.seq_starts is None else self.seq_starts.to(device)
        return PagedSequences(self.block_tables.to(device), self.seq_lens.to(device), starts)


class PagedKVCache:
    """A pool of FP8 blocks for every attention layer, and the sequences that hold them.

    All layers share one block table per sequence. A step is: `append` (reserve slots), write K and
    V of every layer with `append_kv`, attend, and `commit` if other sequences may share the blocks.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block, 16 to 256.
        can_grow: double the pool where it runs out, in place of `OutOfBlocksError`.
    """

    def __init__(self, num_blocks: int, *, block_size: int = 64, can_grow: bool = False) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a cache needs at least one block of one token, got {num_blocks} of {block_size}"
            )
        self.block_size = block_size
        self.layers: dict[int, KVBlocks] = {}
        self._pool = BlockPool(num_blocks)
        self._can_grow = can_grow

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._pool.num_free

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V that the pool occupies, over all layers."""
        return sum(layer.num_bytes for layer in self.layers.values())

    @property
    def num_bytes_used(self) -> int:
        """Bytes of K and V in blocks that sequences hold; a shared block counts once."""
        used = self.num_blocks - self.num_free_blocks
        return self.num_bytes // self.num_blocks * used

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token, over all layers."""
        return self.num_bytes // (self.num_blocks * self.block_size)

    def add_layer(self, layer_idx: int, layer: KVBlocks) -> None:
        """Add an attention layer's storage, made by `KVBlocks.empty(cache.num_blocks, ...)`.

        Raises:
            ValueError: its blocks are not this cache's.
        """
        if (layer.num_blocks, layer.block_size) != (self.num_blocks, self.block_size):
            raise ValueError(
                f"layer {layer_idx} has {layer.num_blocks} blocks of {layer.block_size} tokens; "
                f"this cache has {self.num_blocks} of {self.block_size}"
            )
        self.layers[layer_idx] = layer

    def allocate(self, token_ids: SequenceOf[int] | None = None) -> Sequence:
        """Start a sequence; full blocks that hold a prefix of `token_ids` already are shared.

        The sequence starts with `num_cached_tokens` tokens, fewer than `token_ids` has: at least
        one is left to run. Append the others with `append(sequence, token_ids=...)`.
        """
        sequence = Sequence(token_ids=None if token_ids is None else [])
        for digest in content_hashes((token_ids or [])[:-1], self.block_size):
            block_id = self._pool.find(digest)
            if block_id is None:
                break
            self._pool.hold(block_id)
            sequence.block_ids.append(block_id)
            sequence.digests.append(digest)
        sequence.length = sequence.num_cached_tokens = len(sequence.block_ids) * self.block_size
        if token_ids is not None:
            sequence.token_ids = list(token_ids[: sequence.length])
        return sequence

    def append(
        self, sequence: Sequence, num_tokens: int = 1, *, token_ids: SequenceOf[int] | None = None
    ) -> Tensor:
        """Reserve slots for `num_tokens` more tokens, or for `token_ids`; returns slots [T] int64.

        A last block that another sequence holds too is copied first.

        Raises:
            OutOfBlocksError: the pool has too few free blocks; the cache is as before.
        """
        count = num_tokens if token_ids is None else len(token_ids)
        self.reserve([sequence], count)
        start = sequence.length - count
        known = sequence.token_ids
        if known is not None and token_ids is not None and len(known) == start:
            known += token_ids
        elif count:  # not named, or after a bare `reserve`, which leaves a gap
            sequence.token_ids = None
        return self.slots([sequence], start, count)[0]

    def reserve(self, sequences: SequenceOf[Sequence], num_tokens: int) -> None:
        """Make every sequence `num_tokens` longer, or none of them.

        Raises:
            OutOfBlocksError: the pool has too few free blocks; the cache is as before.
        """
        if num_tokens == 0:
            return
        needed = [self._missing_blocks(sequence, num_tokens) for sequence in sequences]
        self._make_room(sum(needed) + self._copies_to_make(sequences))
        for sequence, count in zip(sequences, needed, strict=True):
            self._own_last_block(sequence)
            sequence.block_ids += self._pool.take(count)
            sequence.length += num_tokens

    def commit(self, sequence: Sequence) -> None:
        """Let new sequences share the full blocks, once K and V of all their tokens are written.

        Nothing happens for a sequence whose token ids are unknown.
        """
        first = len(sequence.digests)
        new = content_hashes(sequence.token_ids or [], self.block_size, sequence.digests)
        sequence.digests += new
        for block_id, digest in zip(sequence.block_ids[first:], new, strict=False):
            self._pool.publish(block_id, digest)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens, sharing every block until one of them appends."""
        for block_id in sequence.block_ids:
            self._pool.hold(block_id)
        token_ids = None if sequence.token_ids is None else list(sequence.token_ids)
        block_ids, digests = list(sequence.block_ids), list(sequence.digests)
        return replace(sequence, block_ids=block_ids, token_ids=token_ids, digests=digests)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget all tokens after the first `length`."""
        if not 0 <= length <= sequence.length:
            raise ValueError(f"cannot truncate {sequence.length} tokens to {length}")
        kept = _ceil_div(length, self.block_size)
        # last block first: free blocks are taken in this order, and no block of a prefix can be
        # found without those before it
        for block_id in reversed(sequence.block_ids[kept:]):
            self._pool.release(block_id)
        del sequence.block_ids[kept:]
        sequence.length = length
        del sequence.digests[length // self.block_size :]
        if sequence.token_ids is not None:
            del sequence.token_ids[length:]

    def free(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back; committed ones can be found until they are reused."""
        self.truncate(sequence, 0)

    def slots(self, sequences: SequenceOf[Sequence], start: int, count: int) -> Tensor:
        """Slots of positions `start .. start + count - 1` of each sequence: [S, count] int64."""
        positions = torch.arange(start, start + count)
        blocks = self.block_tables(sequences)[:, positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size

    def block_tables(self, sequences: SequenceOf[Sequence]) -> Tensor:
        """Physical blocks of each sequence: [S, max_blocks] int32, -1 padded."""
        width = max((len(s.block_ids) for s in sequences), default=0)
        rows = [s.block_ids + [-1] * (width - len(s.block_ids)) for s in sequences]
        return torch.tensor(rows, dtype=torch.int32).view(len(rows), width)

    def sequences(self, sequences: SequenceOf[Sequence]) -> PagedSequences:
        """Block tables and lengths of `sequences`, on the CPU."""
        lengths = torch.tensor([s.length for s in sequences], dtype=torch.int32)
        return PagedSequences(self.block_tables(sequences), lengths)

    def _missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        total = _ceil_div(sequence.length + num_tokens, self.block_size)
        return total - len(sequence.block_ids)

    def _copies_to_make(self, sequences: SequenceOf[Sequence]) -> int:
        partial = Counter(s.block_ids[-1] for s in sequences if self._shares_partial_block(s))
        # where all its holders append, the last one left may keep the block
        return sum(min(n, self._pool.references(block) - 1) for block, n in partial.items())

    def _shares_partial_block(self, sequence: Sequence) -> bool:
        partial = sequence.length % self.block_size != 0
        return partial and self._pool.references(sequence.block_ids[-1]) > 1

    def _own_last_block(self, sequence: Sequence) -> None:
        if sequence.length % self.block_size == 0:
            return
        shared = sequence.block_ids[-1]
        if not self._shares_partial_block(sequence):
            self._pool.forget(shared)  # a truncated block that others could find
            return
        (own,) = self._pool.take(1)
        for layer in self.layers.values():
            layer.copy_block(shared, own)
        self._pool.release(shared)
        sequence.block_ids[-1] = own

    def _make_room(self, count: int) -> None:
        missing = count - self._pool.num_free
        if missing > 0 and self._can_grow:
            self._pool.grow(max(2 * self.num_blocks, self.num_blocks + missing))
            for layer_idx, layer in self.layers.items():
                self.layers[layer_idx] = layer.grown(self.num_blocks)
        self._pool.require(count)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
