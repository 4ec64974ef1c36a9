"""`PagedKVCache`: K and V of many sequences in FP8, in blocks that sequences can share.

This is the scheme of PagedAttention (arXiv 2309.06180). Only the bookkeeping is here; the bytes lie in
`KVBlocks`, one object per layer.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fp8kv_runtime.storage import KVBlocks, check_tensor


class OutOfBlocksError(RuntimeError):
    """The pool has fewer free blocks than were asked for; nothing was changed."""


@dataclass(eq=False)
class CachedSequence:
    """The place of a sequence in the cache, made by `PagedKVCache.allocate` and written by it only."""

    block_ids: list[int] = field(default_factory=list)
    length: int = 0  # tokens, including those appended but not yet written
    num_cached_tokens: int = 0  # found in the cache when it was allocated
    token_ids: list[int] | None = None  # None: unknown, so its blocks cannot be found by content
    digests: list[bytes] = field(default_factory=list)  # of the full blocks offered to others


@dataclass(frozen=True)
class PagedSequences:
    """Block tables and lengths of the sequences of one batch, as kernels read them.

    `seq_starts` is the first position that may be attended to: 0, or the width of left padding.

    Raises:
        ValueError: shapes, types or devices are not those below, or not one another's.
    """

    block_tables: Tensor  # [S, max_blocks] int32, -1 padded
    seq_lens: Tensor  # [S] int32, tokens in the cache including this step's
    seq_starts: Tensor | None = None  # [S] int32
    # those that `to` copied from the CPU; not for tensors that are written later
    _on_host: "PagedSequences | None" = field(default=None, init=False, repr=False, compare=False)

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
        """Copy them to another device; lengths that are then written there are not known to `spans`."""
        tables, lengths = (
            x.to(device, non_blocking=x.is_cpu)  # the CPU could read before a copy to it is done
            for x in (self.block_tables, self.seq_lens)
        )
        moved = PagedSequences(
            tables, lengths, None if self.seq_starts is None else self.seq_starts.to(device)
        )
        object.__setattr__(moved, "_on_host", self if self.seq_lens.is_cpu else self._on_host)
        return moved

    def spans(self) -> list[tuple[int, int]]:
        """Return each sequence's first position and length, from the device only where `to` made no copy."""
        sequences = self._on_host or self
        lengths = sequences.seq_lens.tolist()
        starts = [0] * len(lengths) if sequences.seq_starts is None else sequences.seq_starts.tolist()
        return list(zip(starts, lengths, strict=True))


class PagedKVCache:
    """A pool of FP8 blocks for every attention layer, and the sequences that hold them.

    All layers share one block table per sequence. A step is: `append` (reserve slots), write K and
    V of every layer with `append_kv`, attend, and `commit` if other sequences may share the blocks.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        can_grow: double the pool where it runs out, in place of `OutOfBlocksError`.

    Raises:
        ValueError: `num_blocks` or `block_size` is below 1.
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
        return self.num_bytes // self.num_blocks * (self.num_blocks - self.num_free_blocks)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token, over all layers."""
        return self.num_bytes // (self.num_blocks * self.block_size)

    def add_layer(self, layer_idx: int, layer: KVBlocks) -> None:
        """Add a layer's storage; a ValueError if its blocks are not as many, or not of this size."""
        if (layer.num_blocks, layer.block_size) != (self.num_blocks, self.block_size):
            raise ValueError(
                f"layer {layer_idx} has {layer.num_blocks} blocks of {layer.block_size} tokens; "
                f"this cache has {self.num_blocks} of {self.block_size}"
            )
        self.layers[layer_idx] = layer

    def allocate(self, token_ids: Sequence[int] | None = None) -> CachedSequence:
        """Start a sequence; full blocks that hold a prefix of `token_ids` already are shared.

        The sequence starts with `num_cached_tokens` tokens, fewer than `token_ids` has: at least
        one is left to run. Append the others with `append(sequence, token_ids=...)`.
        """
        sequence = CachedSequence()
        for digest in content_hashes((token_ids or [])[:-1], self.block_size):
            block_id = self._pool.find(digest)
            if block_id is None:
                break
            self._pool.hold(block_id)
            sequence.block_ids.append(block_id)
            sequence.digests.append(digest)
        sequence.length = sequence.num_cached_tokens = len(sequence.block_ids) * self.block_size
        sequence.token_ids = None if token_ids is None else list(token_ids[: sequence.length])
        return sequence

    def append(
        self, sequence: CachedSequence, num_tokens: int = 1, *, token_ids: Sequence[int] | None = None
    ) -> Tensor:
        """Reserve slots for `num_tokens` more tokens, or for `token_ids`; return the slots [T] int64.

        A last block that another sequence holds too is copied first.

        Raises:
            OutOfBlocksError: the pool has too few free blocks; the cache is as before.
            ValueError: `num_tokens` is below 0.
        """
        count = num_tokens if token_ids is None else len(token_ids)
        self.reserve([sequence], count)
        start, tokens = sequence.length - count, sequence.token_ids
        if tokens is not None and token_ids is not None and len(tokens) == start:
            tokens += token_ids
        elif count:  # not named, or after a bare `reserve`, which leaves a gap
            sequence.token_ids = None
        return self.slots([sequence], start, count)[0]

    def reserve(self, sequences: Sequence[CachedSequence], num_tokens: int) -> None:
        """Make every sequence `num_tokens` longer, or none of them.

        Raises:
            OutOfBlocksError: the pool has too few free blocks; the cache is as before.
            ValueError: `num_tokens` is below 0.
        """
        if num_tokens < 0:
            raise ValueError(f"cannot append {num_tokens} tokens; `truncate` takes some away")
        if num_tokens == 0:
            return
        needed = [self._count_blocks(s.length + num_tokens) - len(s.block_ids) for s in sequences]
        shared = Counter(s.block_ids[-1] for s in sequences if self._shares_partial_block(s))
        # where all its holders append, the last one left may keep the block
        copies = sum(min(n, self._pool.references(block) - 1) for block, n in shared.items())
        self._make_room(sum(needed) + copies)
        for sequence, count in zip(sequences, needed, strict=True):
            self._own_last_block(sequence)
            sequence.block_ids += self._pool.take(count)
            sequence.length += num_tokens

    def commit(self, sequence: CachedSequence) -> None:
        """Let new sequences share the full blocks, once K and V of all their tokens are written.

        Nothing happens for a sequence whose token ids are unknown.
        """
        first = len(sequence.digests)
        new = content_hashes(sequence.token_ids or [], self.block_size, sequence.digests)
        sequence.digests += new
        for block_id, digest in zip(sequence.block_ids[first:], new, strict=False):
            self._pool.publish(block_id, digest)

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """Start a second sequence with the same tokens; they share every block until one appends."""
        for block_id in sequence.block_ids:
            self._pool.hold(block_id)
        token_ids = None if sequence.token_ids is None else list(sequence.token_ids)
        block_ids, digests = list(sequence.block_ids), list(sequence.digests)
        return replace(sequence, block_ids=block_ids, token_ids=token_ids, digests=digests)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget all tokens after the first `length`; a ValueError if there are fewer."""
        if not 0 <= length <= sequence.length:
            raise ValueError(f"cannot truncate {sequence.length} tokens to {length}")
        num_blocks = self._count_blocks(length)
        # last block first: free blocks are taken in this order, and no block of a prefix can be
        # found without those before it
        for block_id in reversed(sequence.block_ids[num_blocks:]):
            self._pool.release(block_id)
        del sequence.block_ids[num_blocks:]
        sequence.length = length
        del sequence.digests[length // self.block_size :]
        if sequence.token_ids is not None:
            del sequence.token_ids[length:]

    def free(self, sequence: CachedSequence) -> None:
        """Give the sequence's blocks back; committed ones can be found until they are reused."""
        self.truncate(sequence, 0)

    def slots(self, sequences: Sequence[CachedSequence], start: int, count: int) -> Tensor:
        """Return the slots of positions `start .. start + count - 1` of each sequence: [S, count] int64."""
        positions = torch.arange(start, start + count)
        blocks = self.block_tables(sequences)[:, positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size

    def block_tables(self, sequences: Sequence[CachedSequence]) -> Tensor:
        """Return the physical blocks of each sequence: [S, max_blocks] int32, -1 padded."""
        width = max((len(s.block_ids) for s in sequences), default=0)
        rows = [s.block_ids + [-1] * (width - len(s.block_ids)) for s in sequences]
        return torch.tensor(rows, dtype=torch.int32).view(len(rows), width)

    def sequences(self, sequences: Sequence[CachedSequence]) -> PagedSequences:
        """Return block tables and lengths of `sequences`, on the CPU."""
        lengths = torch.tensor([s.length for s in sequences], dtype=torch.int32)
        return PagedSequences(self.block_tables(sequences), lengths)

    def _count_blocks(self, length: int) -> int:
        return -(-length // self.block_size)

    def _shares_partial_block(self, sequence: CachedSequence) -> bool:
        is_partial = sequence.length % self.block_size != 0
        return is_partial and self._pool.references(sequence.block_ids[-1]) > 1

    def _own_last_block(self, sequence: CachedSequence) -> None:
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


class BlockPool:
    """Blocks `0 .. num_blocks - 1`, each free or held by one or more sequences.

    A free block keeps its content until it is taken again, oldest first, so a prefix outlives the
    sequence that wrote it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_content: dict[bytes, int] = {}
        self._content: dict[int, bytes] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, free or held."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until the pool has `num_blocks`."""
        first = self.num_blocks
        self._references += [0] * (num_blocks - first)
        self._free.update(OrderedDict.fromkeys(range(first, num_blocks)))

    def references(self, block_id: int) -> int:
        """Count the sequences that hold the block."""
        return self._references[block_id]

    def take(self, count: int) -> list[int]:
        """Hold `count` free blocks, and forget what they contained; an OutOfBlocksError if fewer are free."""
        self.require(count)
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self.forget(block_id)
            self._references[block_id] = 1
        return block_ids

    def require(self, count: int) -> None:
        """Check that `count` blocks are free; an OutOfBlocksError if they are not."""
        if count > self.num_free:
            raise OutOfBlocksError(
                f"{count} blocks needed, {self.num_free} of {self.num_blocks} are free; "
                "free a sequence, or make the cache with more blocks"
            )

    def hold(self, block_id: int) -> None:
        """Count one more sequence that holds the block, which may have been free."""
        self._free.pop(block_id, None)
        self._references[block_id] += 1

    def release(self, block_id: int) -> None:
        """Count one sequence less that holds the block; a ValueError if none does."""
        if self._references[block_id] < 1:
            raise ValueError(f"block {block_id} is free already")
        self._references[block_id] -= 1
        if self._references[block_id] == 0:
            self._free[block_id] = None

    def publish(self, block_id: int, content: bytes) -> None:
        """Let other sequences find the full block; of equal blocks the first is found."""
        if content not in self._by_content and block_id not in self._content:
            self._by_content[content] = block_id
            self._content[block_id] = content

    def find(self, content: bytes) -> int | None:
        """Return the published block with this content."""
        return self._by_content.get(content)

    def forget(self, block_id: int) -> None:
        """Withdraw the block: its content is about to change."""
        content = self._content.pop(block_id, None)
        if content is not None:
            del self._by_content[content]


def content_hashes(token_ids: Sequence[int], block_size: int, digests: Sequence[bytes] = ()) -> list[bytes]:
    """Hash each full block with all tokens before it, after the first blocks, which have `digests`."""
    new: list[bytes] = []
    digest = digests[-1] if digests else b""
    for start in range(len(digests) * block_size, len(token_ids) - block_size + 1, block_size):
        block = b"".join(int(t).to_bytes(8, "little") for t in token_ids[start : start + block_size])
        digest = hashlib.sha256(digest + block).digest()
        new.append(digest)
    return new
