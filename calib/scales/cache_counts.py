"""Statistics of what an engine's cache holds: how often each FP8 code occurs, or the largest 16-bit values.

An FP8 cache measures by itself. A value at the end of the range was clipped, or nearly; a zero is mostly a
value that was too small. The largest value of a head lies in the interval that rounds to its code, whose
upper end is taken. Where tokens were clipped, and not by chance, what the largest of them had is estimated:
beyond half of the range the largest values of tokens fall off about exponentially (Pickands 1975).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from calib.scales.stats import KVStats, LayerStats, TensorStats

_CHANCE = 0.025
_RARE = 1e-3  # of the tokens: so many are expected beyond what a calibration has seen
_MOST_BEYOND = 4.0  # times the end of the range: what is estimated to be further is not known
_MAGNITUDES = 128  # codes without their sign


@dataclass(frozen=True)
class CodeTable:
    """The values of an FP8 type's codes."""

    values: Tensor  # [256] float32; NaN and infinite ones too
    upper: Tensor  # [128] float32: the largest magnitude that rounds to a code without its sign
    top: int  # the code of the largest finite value

    @property
    def edge(self) -> float:
        """The magnitude, over the scale, from which a value has the last code."""
        return float(self.upper[self.top - 1])


@cache
def code_table(dtype: torch.dtype, cuts_off: bool = False) -> CodeTable:
    """Return the table of an FP8 type, to which an engine rounds to nearest or by cutting digits off."""
    values = torch.arange(256).to(torch.uint8).view(dtype).float()
    positive = values[:_MAGNITUDES]
    top = int(positive.isfinite().sum()) - 1
    upper = positive.clone()
    upper[:top] = positive[1 : top + 1] if cuts_off else (positive[:top] + positive[1 : top + 1]) / 2
    return CodeTable(values, upper, top)


@dataclass(frozen=True)
class CacheCounts:
    """K and V that were seen in the cache of one layer. `add` sums, and takes the larger."""

    tokens: int
    amax: Tensor  # [2, K, D]: the largest magnitude; uint8 codes of an FP8 cache, else float32
    codes: Tensor  # [2, K, 256] int64: values by code; [2, K, 0]: the cache is not FP8
    largest: Tensor  # [2, K, 128] int64: tokens by the code of their largest magnitude; so too

    @classmethod
    def of(cls, x: Tensor) -> "CacheCounts":
        """Count K and V [N, 2, K, D] of N tokens: FP8 codes as uint8, or 16-bit values."""
        if x.dtype != torch.uint8:
            none = torch.zeros(*x.shape[1:3], 0, dtype=torch.int64, device=x.device)
            return cls(len(x), x.abs().amax(0).float(), none, none)
        magnitudes = x & (_MAGNITUDES - 1)
        largest = _count(magnitudes.amax(-1, keepdim=True), _MAGNITUDES)
        return cls(len(x), magnitudes.amax(0), _count(x, 256), largest)

    def add(self, counts: "CacheCounts") -> "CacheCounts":
        """Combine with what was seen of other tokens."""
        amax = torch.maximum(self.amax, counts.amax)
        codes, largest = self.codes + counts.codes, self.largest + counts.largest
        return CacheCounts(self.tokens + counts.tokens, amax, codes, largest)

    def to_cpu(self) -> "CacheCounts":
        """Return the same counts in the CPU's memory."""
        return CacheCounts(self.tokens, self.amax.cpu(), self.codes.cpu(), self.largest.cpu())


@dataclass(frozen=True)
class WatchedLayer:
    """A layer of an engine: counts of its cache, and how to read them. Tensors are on the CPU."""

    layer: int
    counts: CacheCounts
    dtype: torch.dtype | None = None  # the FP8 type; None: 16 bits
    scales: Tensor | None = None  # [2, K] float32, what K and V are stored with; None: 16 bits
    cuts_off: bool = False  # how values become codes; else they are rounded to nearest

    @property
    def clipped(self) -> Tensor:
        """Tokens with a value at the end of the range, or beyond every number: [2, K] int64."""
        if self.dtype is None:
            return torch.zeros(self.counts.amax.shape[:2], dtype=torch.int64)
        return self.counts.largest[..., code_table(self.dtype).top :].sum(-1)

    def values(self, kind: str) -> Tensor:
        """Count values that are `saturated`, or `zero`: [2, K] int64."""
        if self.dtype is None:
            return torch.zeros(self.counts.amax.shape[:2], dtype=torch.int64)
        magnitudes = code_table(self.dtype).values.abs()
        end = torch.finfo(self.dtype).max
        chosen = magnitudes == 0 if kind == "zero" else ~(magnitudes < end)  # NaN too
        return self.counts.codes[..., chosen].sum(-1)

    @property
    def tokens(self) -> Tensor:
        """The tokens that were counted of each head, [2, K] int64: ranks count their own samples."""
        if self.dtype is None:
            return torch.full(self.counts.amax.shape[:2], self.counts.tokens)
        return self.counts.largest.sum(-1)

    @property
    def is_beyond(self) -> Tensor:
        """Heads that clip more than one token in a thousand, which chance does not do: [2, K] bool."""
        clipped, rare = self.clipped.double(), _RARE * self.tokens.double()
        # the chance of as many: where it is this small, the whole 95 % interval of Poisson's lies beyond
        chance: Tensor = torch.special.gammainc(clipped.clamp(min=1), rare)
        return (clipped > rare) & (chance < _CHANCE)

    @property
    def is_unbounded(self) -> Tensor:
        """Heads that clip so much that nothing tells their largest value: [2, K] bool."""
        is_unbounded = torch.zeros_like(self.is_beyond)
        for part, head in self.is_beyond.nonzero().tolist():
            is_unbounded[part, head] = self._estimate(part, head) is None
        return is_unbounded

    @property
    def amax(self) -> Tensor:
        """The largest magnitude per channel, [2, K, D] float32.

        It is estimated of heads beyond the range, and the end of the range of unbounded ones.
        """
        if self.dtype is None or self.scales is None:
            return self.counts.amax
        table = code_table(self.dtype, self.cuts_off)
        codes = self.counts.amax.long()
        amax = table.upper[codes.clamp(max=table.top)]
        for part, head in self.is_beyond.nonzero().tolist():
            if estimate := self._estimate(part, head):
                amax[part, head, codes[part, head] >= table.top] = estimate
        return amax * self.scales[..., None]

    @property
    def least(self) -> Tensor:
        """The magnitude from which each head's largest code begins, [2, K, 1] float32; of 16 bits amax."""
        amax = self.amax.amax(-1, keepdim=True)
        if self.dtype is None or self.scales is None:
            return amax
        table = code_table(self.dtype, self.cuts_off)
        codes = self.counts.amax.long().amax(-1, keepdim=True).clamp(max=table.top)
        begin = torch.where(codes > 0, table.upper[(codes - 1).clamp(min=0)], 0.0) * self.scales[..., None]
        return torch.where(self.is_beyond[..., None], amax, begin)

    def _estimate(self, part: int, head: int) -> float | None:
        """Return what the largest of the clipped tokens had, over the scale; None where that is not known."""
        assert self.dtype is not None
        table, tokens = code_table(self.dtype, self.cuts_off), self.counts.largest[part, head].double()
        end, edge = float(table.values[table.top]), table.edge
        values = table.values[:_MAGNITUDES].double()
        below = (values >= edge / 2) & (torch.arange(_MAGNITUDES) < table.top)
        clipped, inside = int(tokens[table.top :].sum()), float(tokens[below].sum())
        if inside < clipped:  # no tail
            return None
        excess = float((tokens[below] * (values[below] - edge / 2)).sum()) + clipped * edge / 2
        # the largest of n exponential values is expected at their mean times 1 + 1/2 + ... + 1/n
        largest = excess / inside * float((1 / torch.arange(1, clipped + 1)).sum())
        return max(end, edge + largest) if edge + largest <= _MOST_BEYOND * end else None

    def to_json(self) -> dict[str, Any]:
        """Return the counts by head of K and V, a few numbers each: plain data for a report."""
        channels = self.counts.amax.shape[-1]
        answer: dict[str, Any] = {"layer": self.layer, "channels": channels, "tokens": self.counts.tokens}
        if self.dtype is None:
            return answer
        answer["edge"] = edge = code_table(self.dtype, self.cuts_off).edge
        rows = {"tokens": self.tokens, "clipped": self.clipped}
        rows |= {kind: self.values(kind) for kind in ("saturated", "zero")}
        for part, letter in enumerate("kv"):
            answer[letter] = {name: row[part].tolist() for name, row in rows.items()}
            scales = torch.zeros(1) if self.scales is None else self.scales[part]
            if (scales.isfinite() & (scales > 0)).all():  # an engine that holds other ones has no limit
                answer[letter]["limit"] = (scales * edge).tolist()
        return answer


def _count(x: Tensor, size: int) -> Tensor:
    """Count the values 0 to `size` - 1 of `x` [N, 2, K, D] uint8: [2, K, size] int64."""
    _, parts, heads, _ = x.shape
    if x.device.type == "cpu":  # a row of bytes after the other is 15 times as fast as int64 at once
        rows = [torch.bincount(row.reshape(-1), minlength=size) for row in x.flatten(1, 2).unbind(1)]
        return torch.stack(rows).view(parts, heads, size)
    offsets = size * torch.arange(parts * heads, device=x.device).view(1, parts, heads, 1)
    return torch.bincount((x + offsets).flatten(), minlength=size * parts * heads).view(parts, heads, size)


def join_heads(parts: Sequence[Tensor], kv_heads: int) -> Tensor:
    """Join tensors [2, K, ...] of tensor-parallel ranks; of a head that several ranks hold, take one."""
    return torch.cat([*parts], dim=1)[:, :: max(1, len(parts) // kv_heads)]


def join_watched(ranks: Sequence[WatchedLayer], kv_heads: int) -> WatchedLayer:
    """Join one layer's parts of all tensor-parallel ranks."""
    first, counts = ranks[0], [rank.counts for rank in ranks]

    def join(name: str) -> Tensor:
        return join_heads([getattr(count, name) for count in counts], kv_heads)

    scales = None
    if first.scales is not None:
        scales = join_heads([rank.scales for rank in ranks if rank.scales is not None], kv_heads)
    joined = CacheCounts(min(count.tokens for count in counts), join("amax"), join("codes"), join("largest"))
    return replace(first, counts=joined, scales=scales)


def watched_stats(layers: Mapping[str, WatchedLayer]) -> KVStats:
    """Return statistics of the watched layers, by module; of queries nothing is known."""
    stats = {}
    for name, watched in layers.items():
        if watched.counts.tokens:
            k, v = (TensorStats(x, least=y) for x, y in zip(watched.amax, watched.least, strict=True))
            estimated, unbounded = (
                tuple(letter for letter, heads in zip("kv", flags, strict=True) if heads.any())
                for flags in (watched.is_beyond, watched.is_unbounded)
            )
            tokens = watched.counts.tokens
            stats[name] = LayerStats(watched.layer, tokens, k, v, estimated=estimated, unbounded=unbounded)
    return KVStats(stats)
