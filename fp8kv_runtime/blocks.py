"""Who owns which block: reference counts, free blocks, and full blocks found again by content.

Bookkeeping only; the bytes live in `cache.py`.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field


class OutOfBlocksError(RuntimeError):
    """The pool has fewer free blocks than were asked for; nothing was changed."""


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
        """How many sequences hold the block."""
        return self._references[block_id]

    def take(self, count: int) -> list[int]:
        """Hold `count` free blocks, and forget what they contained.

        Raises:
            OutOfBlocksError: fewer are free.
        """
        self.require(count)
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self.forget(block_id)
            self._references[block_id] = 1
        return taken

    def require(self, count: int) -> None:
        """Check that `count` blocks are free.

        Raises:
            OutOfBlocksError: they are not.
        """
        if count > self.num_free:
            raise OutOfBlocksError(
                f"{count} blocks needed, {self.num_free} of {self.num_blocks} are free; "
                "free a sequence, or make the cache with more blocks"
            )

    def hold(self, block_id: int) -> None:
        """One more sequence holds the block, which may have been free."""
        self._free.pop(block_id, None)
        self._references[block_id] += 1

    def release(self, block_id: int) -> None:
        """One sequence less holds the block."""
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
        """The published block with this content."""
        return self._by_content.get(content)

    def forget(self, block_id: int) -> None:
        """Withdraw the block: its content is about to change."""
        content = self._content.pop(block_id, None)
        if content is not None:
            del self._by_content[content]


@dataclass(eq=False)
class Sequence:
    """A sequence's place in the cache, made by `PagedKVCache.allocate` and written by it only."""

    block_ids: list[int] = field(default_factory=list)
    length: int = 0  # tokens, including those appended but not yet written
    num_cached_tokens: int = 0  # found in the cache when it was allocated
    token_ids: list[int] | None = None  # None: unknown, so its blocks cannot be found by content
    digests: list[bytes] = field(default_factory=list)  # of the full blocks offered to others


def content_hashes(token_ids: SequenceOf[int], block_size: int, known: SequenceOf[bytes] = ()) -> list[bytes]:
    """Hash each full block with all tokens before it, past those whose digests are `known`."""
    digests: list[bytes] = []
    digest = known[-1] if known else b""
    for start in range(len(known) * block_size, len(token_ids) - block_size + 1, block_size):
        block = b"".join(int(t).to_bytes(8, "little") for t in token_ids[start : start + block_size])
        digest = hashlib.sha256(digest + block).digest()
        digests.append(digest)
    return digests
