"""The rows of a transformers cache as sequences of one `PagedKVCache`, under the kernels' masks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kv_runtime import blocks
from fp8kv_runtime.cache import PagedKVCache, PagedSequences
from fp8kv_runtime.errors import AttentionError

_START_BLOCKS = 16  # per row; the pool doubles when they are used up


class CacheRows:
    """The rows of one transformers cache: sequences of a `PagedKVCache`, shared by all its layers.

    The first FP8 layer is the lead: it is updated first in every forward pass, and what concerns
    all layers at once is done when transformers asks the lead for it.
    """

    def __init__(self, *, block_size: int, dtype: torch.dtype, use_triton: bool) -> None:
        self.cache: PagedKVCache | None = None
        self.block_size = block_size
        self.dtype = dtype
        self.use_triton = use_triton
        self.length = 0  # tokens of each row, those of the running forward included
        self.padding: Tensor | None = None  # [B, T] bool, False: padding; of the running forward
        self._rows: list[blocks.Sequence] = []
        self._slots = torch.empty(0, dtype=torch.int64)
        self._checked: list[tuple[Tensor, int | None]] = []
        self._where: dict[torch.device, tuple[PagedSequences, Tensor]] = {}

    def extend(self, num_rows: int, num_tokens: int) -> None:
        """Reserve `num_tokens` slots more for each row."""
        if self.cache is None:
            self.cache = PagedKVCache(num_rows * _START_BLOCKS, block_size=self.block_size, can_grow=True)
        if not self._rows:
            self._rows = [self.cache.allocate() for _ in range(num_rows)]
        start = self._rows[0].length
        self.cache.reserve(self._rows, num_tokens)
        self.length = start + num_tokens
        self._slots = self.cache.slots(self._rows, start, num_tokens).flatten()
        self._where = {}
        self._checked = []

    def where(self, device: torch.device) -> tuple[PagedSequences, Tensor]:
        """Where the rows lie, and the slots of the newest tokens [B * T]."""
        if device not in self._where:
            assert self.cache is not None
            sequences = self.cache.sequences(self._rows)
            starts = None if self.padding is None else left_padding(self.padding.cpu())
            sequences = PagedSequences(sequences.block_tables, sequences.seq_lens, starts)
            self._where[device] = sequences.to(device), self._slots.to(device)
        return self._where[device]

    def check_held(self, rows: int, tokens: int) -> None:
        """Check that a layer would hold as many tokens as the forward pass has reserved.

        Raises:
            AttentionError: it would hold others.
        """
        if (rows, tokens) != (len(self._rows), self.length):
            raise AttentionError(
                f"a layer of this cache would hold {rows} rows of {tokens} tokens, not "
                f"{len(self._rows)} of {self.length}: it can be used inside its fp8_attention "
                "block alone, by models that cache a token for each that they are given"
            )

    def check_once(
        self, mask: Tensor, num_tokens: int, sequences: PagedSequences, window: int | None
    ) -> None:
        """`check_mask`, once for each mask of a forward pass.

        Raises:
            AttentionError: the kernels apply another mask.
        """
        # a layer's mask is the same object in all layers of its type
        if not any(mask is seen and window == size for seen, size in self._checked):
            given = mask, num_tokens, sequences.seq_starts, window
            if torch.compiler.is_compiling():
                torch.ops.fp8kv.check_mask(*given, sequences.seq_lens)
            else:
                check_mask(*given)
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


def left_padding(mask: Tensor) -> Tensor | None:
    """Padding tokens before each row's first token, [B] int32, of a mask [B, T]; None: no padding.

    Padding elsewhere is not represented; `check_mask` finds it.
    """
    visible = mask.bool()
    if visible.all():
        return None
    return (visible.cumsum(1) == 0).sum(1).to(torch.int32)


def check_mask(mask: Tensor, num_tokens: int, starts: Tensor | None, window: int | None) -> None:
    """Check that a model's mask is the one the kernels apply.

    Args:
        mask: [B, T] bool, or [B, 1, T, N] bool or additive, for T new of N tokens.
        num_tokens: T.
        starts: width of each row's left padding, [B].
        window: sliding window in tokens.

    Raises:
        AttentionError: it differs, as for packed sequences, images or right padding.
    """
    length = mask.shape[-1]
    columns = torch.arange(length, device=mask.device)
    first = torch.zeros(1, device=mask.device) if starts is None else starts.to(mask.device)
    if mask.dim() == 2:
        is_ours = torch.equal(mask.bool(), (columns >= first[:, None]).expand_as(mask))
    else:
        visible = (mask if mask.dtype == torch.bool else mask >= 0)[:, 0]
        rows = torch.arange(length - num_tokens, length, device=mask.device)[:, None]
        expected = (columns <= rows) & (columns >= first[:, None, None])
        if window is not None:
            expected &= columns > rows - window
        matters = rows >= first[:, None, None]  # padding may attend to anything
        is_ours = torch.equal(visible & matters, (expected & matters).expand_as(visible))
    if not is_ours:
        raise AttentionError(
            "the Triton kernels apply causal masks with a sliding window and left padding; this "
            "model or input needs another one. Pad on the left, or use the torch backend"
        )


_LIBRARY: Any = torch.library.Library("fp8kv", "FRAGMENT")  # type: ignore[no-untyped-call]
# the lengths are not written to, but said to be: compilers drop what returns and writes nothing
_LIBRARY.define(
    "check_mask(Tensor mask, SymInt num_tokens, Tensor? starts, SymInt? window, Tensor(a!) seq_lens) -> ()"
)
_LIBRARY.impl("check_mask", lambda *given: check_mask(*given[:4]), "CompositeExplicitAutograd")
torch.library.register_fake("fp8kv::check_mask", lambda *_: None, lib=_LIBRARY)
