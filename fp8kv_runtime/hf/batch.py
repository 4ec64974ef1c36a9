"""The rows of a transformers cache as sequences of one `PagedKVCache`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8kv_runtime import blocks
from fp8kv_runtime.cache import PagedKVCache, PagedSequences
from fp8kv_runtime.hf.masks import check_mask, left_padding

_START_BLOCKS = 16  # per row; the pool doubles when they are used up


class Batch:
    """The rows of one transformers cache: sequences of a `PagedKVCache`, shared by all its layers.

    The first FP8 layer is the lead: it is updated first in every forward pass, and what concerns
    all layers at once is done when transformers asks the lead for it.
    """

    def __init__(self, *, block_size: int, dtype: torch.dtype, use_triton: bool) -> None:
        self.cache: PagedKVCache | None = None
        self.block_size = block_size
        self.dtype = dtype
        self.use_triton = use_triton
        self.padding: Tensor | None = None  # [B, T] bool, False: padding; of the running forward
        self._rows: list[blocks.Sequence] = []
        self._slots = torch.empty(0, dtype=torch.int64)
        self._checked: list[tuple[Tensor, int | None]] = []
        self._where: dict[torch.device, tuple[PagedSequences, Tensor]] = {}

    def extend(self, num_rows: int, num_tokens: int) -> None:
        """Reserve `num_tokens` slots more for each row."""
        if self.cache is None:
            self.cache = PagedKVCache(
                num_rows * _START_BLOCKS, block_size=self.block_size, can_grow=True
            )
        if not self._rows:
            self._rows = [self.cache.allocate() for _ in range(num_rows)]
        start = self._rows[0].length
        self.cache.reserve(self._rows, num_tokens)
        self._slots = self.cache.slots(self._rows, start, num_tokens).flatten()
        self._where = {}
        self._checked = []

    def where(self, device: torch.device) -> tuple[PagedSequences, Tensor]:
        """Where the rows lie, and the slots of the newest tokens [B * T]."""
        if device not in self._where:
            assert self.cache is not None
            sequences = self.cache.sequences(self._rows)
            starts = None if self.padding is None else left_padding(self.padding)
            sequences = PagedSequences(sequences.block_tables, sequences.seq_lens, starts)
            self._where[device] = sequences.to(device), self._slots.to(device)
        return self._where[device]

    def check_once(
        self, mask: Tensor, num_tokens: int, starts: Tensor | None, window: int | None
    ) -> None:
        """`check_mask`, once for each mask of a forward pass.

        Raises:
            AttentionError: the kernels apply another mask.
        """
        # a layer's mask is the same object in all layers of its type
        if not any(mask is seen and window == size for seen, size in self._checked):
            check_mask(mask, num_tokens, starts, window)
            self._checked.append((mask, window))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of every row."""
        for row in self._rows:
            self.cache.truncate(row, length)  # type: ignore[union-attr]

    def select(self, indices: Sequence[int]) -> None:
        """Make row `i` a copy of row `indices[i]`; blocks are shared, not copied."""
        if self.cache is None or list(indices) == list(range(len(self._rows))):
            return
        chosen = [self.cache.fork(self._rows[index]) for index in indices]
        for row in self._rows:
            self.cache.free(row)
        self._rows = chosen

    def repeat(self, repeats: int) -> None:
        """Every row `repeats` times, one after the other."""
        self.select([index for index in range(len(self._rows)) for _ in range(repeats)])
