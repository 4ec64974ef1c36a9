"""Which slots of vLLM's cache were written since they were last read, and where in a block a slot lies."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Blocks = Sequence[int]


class WrittenSlots:
    """The slots that steps have written and nobody has read yet, by group of layers.

    A step is what vLLM's scheduler hands to workers: for each request its blocks, the tokens computed before,
    and the tokens of this step. So a prefix that was found in the cache is not written, a prompt in several
    parts is written once, and one that was computed again after it gave way is written again.
    """

    def __init__(self, block_sizes: Sequence[int]) -> None:
        self._block_sizes = block_sizes
        self._blocks: dict[str, list[list[int]]] = {}  # of each request, by group
        self._written: list[dict[int, list[int]]] = [{} for _ in block_sizes]  # block -> [first, end)
        self.tokens = 0  # that were written, of the first group

    def is_overwritten(self, step: Any) -> bool:
        """Return whether a step may write into slots that nobody has read, because their request is over."""
        return any(
            not written.keys().isdisjoint(blocks)
            for _, new, _, _ in _requests(step)
            for written, blocks in zip(self._written, new, strict=False)
        )

    def note(self, step: Any, *, with_slots: bool = True) -> None:
        """Note the blocks of a step's requests, and the slots that it writes."""
        for name in step.finished_req_ids:
            self._blocks.pop(name, None)
        for name, new, start, is_new in _requests(step):
            if is_new:
                self._blocks[name] = [[] for _ in self._block_sizes]
            for blocks, added in zip(self._blocks.get(name, ()), new, strict=False):
                blocks.extend(added)
            count = step.num_scheduled_tokens.get(name, 0)
            if with_slots and count and name in self._blocks:
                self.tokens += count
                self._add(self._blocks[name], start, start + count)

    def _add(self, blocks_by_group: list[list[int]], start: int, end: int) -> None:
        for size, blocks, written in zip(self._block_sizes, blocks_by_group, self._written, strict=True):
            for index in range(start // size, (end - 1) // size + 1):
                block = blocks[index] if index < len(blocks) else 0
                if not block:  # the null block, of what has left a window
                    continue
                first, last = max(start - index * size, 0), min(end - index * size, size)
                span = written.setdefault(block, [first, last])
                span[:] = min(span[0], first), max(span[1], last)

    def take(self) -> list[Tensor]:
        """Return the slots of each group, [N] int64 each, and forget them."""
        slots = []
        for size, written in zip(self._block_sizes, self._written, strict=True):
            ranges = [torch.arange(first, end) + block * size for block, (first, end) in written.items()]
            slots.append(torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64))
        self.forget()
        return slots

    def forget(self) -> None:
        """Forget the slots that were noted."""
        self.tokens = 0
        for written in self._written:
            written.clear()


def _requests(step: Any) -> Iterator[tuple[str, Sequence[Blocks], int, bool]]:
    """Yield requests: name, new blocks by group, tokens computed before, whether these are all its blocks."""
    for request in step.scheduled_new_reqs:
        yield request.req_id, request.block_ids, request.num_computed_tokens, True
    cached = step.scheduled_cached_reqs
    rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
    for name, new, start in rows:
        yield name, new or (), start, name in cached.resumed_req_ids


class BlockMap:
    """The place of each value of a slot in a block of a layer's cache, as the backend's own writer shows it.

    Backends order a block in their own ways: K beside V or after it, heads or tokens first, packed for AMX. A
    block is written here as steps write it, with digits of each value's place for the values.

    Raises `ValueError` where what was written does not tell each place once.
    """

    def __init__(self, module: Any, dtype: torch.dtype, fp8: torch.dtype | None, scales: Tensor) -> None:
        """Find out the places of `module`, which takes K and V as `dtype`; `scales` [2, K] it stores with."""
        cache, heads, size = layer_cache(module), module.num_kv_heads, module.head_size
        self.shape = 2, heads, cache.shape[2], size
        block = cache.new_empty_strided((1, *cache.shape[1:]), cache.stride())
        count = 2 * heads * cache.shape[2] * size
        if block.numel() != count or getattr(module, "head_size_v", size) != size:
            raise ValueError(f"a block of shape {[*cache.shape[1:]]} holds more than K and V")
        slots = torch.arange(cache.shape[2], device=cache.device)
        factors = scales.to(cache.device)[:, :, None, None]

        def write(x: Tensor) -> Tensor:
            """Write `x` times the scales; return what the block then holds, over the scales."""
            k, v = (x * factors).transpose(1, 2).to(dtype).contiguous()
            block.zero_()
            module.impl.do_kv_cache_update(module, k, v, block, slots)
            return (_codes(block).view(fp8) if fp8 else block).reshape(-1).float()

        numbers = torch.arange(count, device=cache.device).view(self.shape)
        places, weight = torch.zeros(count, dtype=torch.int64, device=cache.device), 1
        while weight < count:
            # 1 to 4 and a little more is 1 to 4 in every type, rounded or cut off; 0 is what nobody wrote
            digits = write((numbers // weight % 4 + 1) * 1.01).round().long()
            places += torch.where(digits > 0, (digits - 1) * weight, -(4**20))
            weight *= 4
        order = places.argsort()
        if not torch.equal(places[order], numbers.flatten()):
            raise ValueError(f"where {type(module.impl).__name__} keeps K and V in a block cannot be told")
        # offsets in memory of what a slot holds, [block_size, 2 * K * D]
        steps = torch.tensor(cache.stride()[1:], device=cache.device)
        indices = torch.stack(torch.unravel_index(order, block.shape[1:]), -1)
        self._offsets: Tensor = (indices * steps).sum(-1).view(self.shape).permute(2, 0, 1, 3).flatten(1)
        # between 1 and the next value, nearer to that
        above_1 = 1 + 0.8 * torch.finfo(fp8).eps if fp8 else 1.0
        self.cuts_off = fp8 is not None and bool((write(numbers * 0 + above_1) == 1).all())

    def read(self, cache: Tensor, slots: Tensor) -> Tensor:
        """Return K and V of `slots` [N]: [N, 2, K, D], FP8 codes as uint8; for `cache` see `layer_cache`."""
        slots = slots.to(cache.device)
        _, heads, count, size = self.shape
        values = cache.untyped_storage().nbytes() // cache.element_size()
        memory: Tensor = torch.as_strided(_codes(cache), (values,), (1,), 0)
        starts = torch.add(slots // count * cache.stride(0), int(cache.storage_offset()))
        return memory[starts[:, None] + self._offsets[slots % count]].view(len(slots), 2, heads, size)


def layer_cache(module: Any) -> Tensor:
    """Return a layer's cache, [num_blocks, K, block_size, 2 * D]; a ValueError unless it has 4 dimensions."""
    cache = module.kv_cache
    if not isinstance(cache, Tensor) or cache.dim() != 4:
        raise ValueError("the cache is not laid out as in vLLM 0.32 and newer")
    return cache


def _codes(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache
