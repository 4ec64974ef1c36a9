"""`CacheRows`: the rows of a transformers cache as sequences of a `PagedKVCache`."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8kv_runtime.cache import PagedKVCache, PagedSequences
from fp8kv_runtime.errors import AttentionError

_START_BLOCKS = 16  # per row; the pool doubles when they are used up


class CacheRows:
    """The rows of one transformers cache: sequences of a `PagedKVCache`, shared by all its layers.

    What concerns all layers at once is done when transformers asks the layer `lead` for it.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        block_size: int,
        dtype: torch.dtype,  # of K and V
        use_triton: bool,  # whether kernels read the blocks, not the model's own attention function
        restore: bool,  # whether layers return all of K and V in the model's own type
        lead: int,  # index of the first layer in FP8
        # of K and V [1], [K] or [K, D], and the centre [K, D], on devices, by layers; shared with other rows
        moved_scales: dict[Any, list[Any]],
    ) -> None:
        self.cache = PagedKVCache(num_rows * _START_BLOCKS, block_size=block_size, can_grow=True)
        self.dtype = dtype
        self.use_triton = use_triton
        self.restore = restore
        self.lead = lead
        self.moved_scales = moved_scales
        self._layers: list[weakref.ref[Any]] = []  # of the cache, which has these rows
        self.selections = 0  # how often the rows have changed
        self._sequences = [self.cache.allocate() for _ in range(num_rows)]
        self._slots = torch.empty(0, dtype=torch.int64)
        # of the running forward pass
        self.length = 0  # tokens of each row, the new ones included
        self.padding: Tensor | None = None  # [B, N], 0: padding
        self.checked_masks: list[tuple[Tensor, int | None]] = []  # with their windows
        self.unread: list[Tensor] = []  # whether earlier masks were right, as a device knows it: one, or none
        self._is_padded: bool | None = None  # as the last prompt was
        self.is_recorded = False  # whether the pass is recorded: its masks are not those of replays
        self._located: dict[torch.device, tuple[PagedSequences, Tensor]] = {}
        self._places: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def layers(self) -> list[Any]:
        """Its layers, `Fp8CacheLayer`."""
        return [layer for ref in self._layers if (layer := ref()) is not None]

    def set_layers(self, layers: Sequence[Any]) -> None:
        """Let those of a cache's layers that have these rows share them: a copy of a cache has its own."""
        self._layers = [weakref.ref(layer) for layer in layers if getattr(layer, "rows", None) is self]

    def add_layer(self, layer: Any) -> None:
        """Let a layer share these rows."""
        self._layers.append(weakref.ref(layer))

    def set_lengths(self, length: int) -> None:
        """Let every layer hold `length` tokens, which a recorded pass has stored, or is to store anew."""
        for layer in self.layers:
            layer.length = length

    @property
    def num_rows(self) -> int:
        """Rows of the cache."""
        return len(self._sequences)

    @property
    def table_width(self) -> int:
        """Blocks of a row that recorded tables have room for: a power of two."""
        return max(16, 1 << (len(self._sequences[0].block_ids) - 1).bit_length())

    @property
    def is_step(self) -> bool:
        """Return whether the pass is of one token after others, and it is known which rows are padded."""
        is_known = self.padding is None or self._is_padded is not None
        return self._slots.shape[1] == 1 and self.length > 1 and is_known

    @property
    def is_padded(self) -> bool:
        """Return whether rows begin with padding."""
        return self.padding is not None and bool(self._is_padded)

    def extend(self, num_tokens: int) -> None:
        """Reserve `num_tokens` slots more for each row."""
        start = self._sequences[0].length
        self.cache.reserve(self._sequences, num_tokens)
        self.length = start + num_tokens
        self._slots = self.cache.slots(self._sequences, start, num_tokens)
        self._located, self._places = {}, {}
        self.checked_masks = []
        tokens: dict[Any, Any] = {}  # `StepTokens`, which layers share
        with torch.inference_mode(False):  # or other modes could not write to what this makes
            for layer in self.layers:
                layer.prepare(tokens)

    def locate(self, device: torch.device) -> tuple[PagedSequences, Tensor]:
        """Return the block tables of the rows, and the slots of the newest tokens [B * T] int64."""
        if device not in self._located:
            (sequences, slots), starts = self.host_tables(), None
            if self.padding is not None:
                if not self.defers(self.padding):
                    self._is_padded = not bool(self.padding.all())
                starts = left_padding(self.padding) if self._is_padded else None
                if starts is not None and not self.is_step:
                    starts = starts.cpu()  # once, for `spans` in every layer
            if starts is None or starts.is_cpu:
                located = PagedSequences(sequences.block_tables, sequences.seq_lens, starts).to(device)
            else:
                located = replace(sequences.to(device), seq_starts=starts.to(device))
            self._located[device] = located, slots.to(device, non_blocking=True)
        return self._located[device]

    def host_tables(self) -> tuple[PagedSequences, Tensor]:
        """Return block tables and lengths of the rows, and the slots of the newest tokens [B * T] int64."""
        return self.cache.sequences(self._sequences), self._slots.flatten()

    def use(self, sequences: PagedSequences, slots: Tensor) -> None:
        """Have this pass read its block tables, lengths and slots [B * T] int64 from these tensors."""
        self._located = {slots.device: (sequences, slots)}

    def defers(self, mask: Tensor) -> bool:
        """Return whether a mask, of any shape, is not to be read now: on a GPU, of one token after others."""
        return self.is_step and self._is_padded is not None and self.waits(mask)

    @staticmethod
    def waits(tensor: Tensor) -> bool:
        """Return whether a program that reads this tensor, of any shape, waits for a device."""
        return tensor.device.type != "cpu"

    def note(self, is_applied: Tensor) -> None:
        """Note whether a mask was the one that kernels apply, a bool [], without reading it."""
        before = self.unread[0].to(is_applied.device) if self.unread else is_applied
        self.unread[:] = [before & is_applied]

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the blocks of the newest tokens, and their places in these, [B, T] int64 each."""
        if device not in self._places:
            slots, block_size = self._slots.to(device), self.cache.block_size
            self._places[device] = slots // block_size, slots % block_size
        return self._places[device]

    def check_size(self, num_rows: int, num_tokens: int) -> None:
        """Check that a layer would hold as many tokens as the pass has reserved; else an AttentionError."""
        if (num_rows, num_tokens) != (len(self._sequences), self.length):
            raise AttentionError(
                f"a layer of this cache would hold {num_rows} rows of {num_tokens} tokens, not "
                f"{len(self._sequences)} of {self.length}. Use it inside its fp8_attention block alone, "
                "and with a model that caches every token of its input"
            )

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of every row."""
        for sequence in self._sequences:
            self.cache.truncate(sequence, length)

    def select(self, indices: Sequence[int]) -> None:
        """Make row `i` a copy of row `indices[i]`; blocks are shared, not copied."""
        if list(indices) == list(range(len(self._sequences))):
            return
        copies = [self.cache.fork(self._sequences[index]) for index in indices]
        for sequence in self._sequences:
            self.cache.free(sequence)
        self._sequences = copies
        self.selections += 1


def left_padding(mask: Tensor) -> Tensor:
    """Return the padding tokens before each row's first token, [B] int32, of a mask [B, N].

    Padding elsewhere is not represented; `check_mask` finds it.
    """
    return (mask.bool().cumsum(1) == 0).sum(1).to(torch.int32)


def is_applied(mask: Tensor, num_tokens: int, starts: Tensor | None, window: int | None) -> Tensor:
    """Return whether the kernels apply a mask [B, N] bool, or [B, 1, T, N] bool or additive: a bool [] there.

    T of N tokens are new. `starts` [B] is the width of left padding, `window` that of a sliding one.
    """
    length = mask.shape[-1]
    columns = torch.arange(length, device=mask.device)
    first = torch.zeros(1, device=mask.device) if starts is None else starts.to(mask.device)
    if mask.dim() == 2:
        return (mask.bool() == (columns >= first[:, None])).all()
    visible = (mask if mask.dtype == torch.bool else mask >= 0)[:, 0]
    rows = torch.arange(length - num_tokens, length, device=mask.device)[:, None]
    expected = (columns <= rows) & (columns >= first[:, None, None])
    if window is not None:
        expected &= columns > rows - window
    matters = rows >= first[:, None, None]  # padding may attend to anything
    return ((visible == expected) | ~matters).all()
