"""Running statistics on the model's device: where amax is taken, and of which tokens of a batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.capture.attention import CachedAttention
from calib.data import Batch
from calib.recipe import Recipe
from calib.scales.observers import magnitude_histogram, make_observer
from calib.scales.places import BUCKETS, POSITION_BUCKETS
from calib.scales.stats import STATISTICS, LayerStats, TensorStats, bucket_indices
from calib.scales.tail import largest as largest_of

_GRID = 2.0**20


@dataclass(frozen=True)
class Counted:
    """The N tokens of a batch that are counted, and in which of `calib.scales.places`."""

    rows: Tensor | None  # [N] int64, among the batch's B * T; None: all of them
    read: int  # how many are real, counted or not
    buckets: Tensor  # [N] int64, by index in the run
    positions: Tensor  # [N] int64, by position in the sample

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.buckets)

    def to(self, device: torch.device) -> "Counted":
        """The same on `device`."""
        rows = None if self.rows is None else self.rows.to(device)
        return Counted(rows, self.read, self.buckets.to(device), self.positions.to(device))


def counted(batch: Batch) -> Counted:
    """Leave out padding and the first `skip_first` tokens of each sample of `batch`."""
    real = batch.attention_mask.bool()
    positions = torch.arange(real.shape[1], device=real.device).expand_as(real)
    kept = real & (positions >= batch.skip_first)
    indices = batch.first_token + real.flatten().cumsum(0).view_as(real) - 1
    rows = None if bool(kept.all()) else kept.flatten().nonzero().squeeze(-1)
    of_sample = bucket_indices(positions[kept]).clamp(max=POSITION_BUCKETS - 1)
    return Counted(rows, batch.num_tokens, bucket_indices(indices[kept]), of_sample)


def per_token_statistics(magnitudes: Tensor, tokens: Counted) -> dict[str, Tensor]:
    """Fields of `TensorStats` that come of each token's largest magnitude, of [N, H, D]."""
    heads = magnitudes.amax(-1).t()  # [H, N]

    def by(buckets: Tensor, count: int) -> Tensor:
        table = heads.new_zeros(len(heads), count)
        return table.scatter_reduce_(1, buckets.expand_as(heads), heads, "amax")

    return {
        "curve": by(tokens.buckets, BUCKETS),
        "positions": by(tokens.positions, POSITION_BUCKETS),
        "tail": largest_of(heads, heads[:, :0]),
    }


class RunningTensor:
    """Statistics so far of one of K, V or Q in one attention module."""

    def __init__(self, *, histogram: bool, means: bool, places: bool) -> None:
        self._histogram, self._means, self._places = histogram, means, places
        self._found: dict[str, Tensor] = {}  # by field of `TensorStats`; in the model's dtype

    @property
    def amax(self) -> Tensor | None:
        """The largest magnitudes so far, [H, D]; None before the first batch."""
        return self._found.get("amax")

    def update(self, x: Tensor, tokens: Counted) -> None:
        """Add the `tokens` `x` [N, H, D]."""
        magnitudes = x.flatten(1).abs()
        # reducing over the leading dimension is what a CPU does at full width
        batch = {"amax": magnitudes.amax(0).view(x.shape[1:])}
        if self._places:
            batch |= per_token_statistics(magnitudes.view(x.shape), tokens)
        if self._histogram:
            batch["histogram"] = magnitude_histogram(x)
        if self._means:
            batch["total"] = _on_grid(x.sum(0, dtype=torch.float64))
            batch["low"], batch["high"] = x.aminmax(dim=0)
        for field, new in batch.items():
            held = self._found.setdefault(field, new)
            if held is not new:
                STATISTICS[field].combine(held, new, out=held)

    def result(self) -> TensorStats:
        """The statistics, on the CPU."""
        assert self._found, "nothing was seen"
        return TensorStats(
            **{field: x.to("cpu", STATISTICS[field].dtype) for field, x in self._found.items()}
        )


class RunningLayer:
    """Statistics so far of one attention module."""

    def __init__(self, module: CachedAttention, recipe: Recipe) -> None:
        self.module = module
        self.tokens = self.read = 0
        histogram, means = make_observer(recipe.observer).needs_histogram, recipe.collects_means
        self.k = RunningTensor(histogram=histogram, means=means, places=True)
        self.v = RunningTensor(histogram=histogram, means=means, places=True)
        histogram = histogram and recipe.targets == "qkv"
        self.q = RunningTensor(histogram=histogram, means=False, places=False)

    def update(self, query: Tensor, key: Tensor, value: Tensor, tokens: Counted) -> None:
        """Add the `tokens` of query [B, H, T, D], key and value [B, K, T, D]."""
        repeat, tokens = self.module.kv_repeat, tokens.to(key.device)
        self.q.update(_tokens(query, tokens.rows), tokens)
        self.k.update(_tokens(key, tokens.rows)[:, ::repeat], tokens)
        self.v.update(_tokens(value, tokens.rows)[:, ::repeat], tokens)
        self.tokens += tokens.tokens
        self.read += tokens.read

    def result(self) -> LayerStats:
        """The statistics, on the CPU."""
        parts = (self.k.result(), self.v.result(), self.q.result())
        module = self.module
        return LayerStats(module.layer_idx, self.tokens, *parts, module.latent, self.read)


def _tokens(x: Tensor, rows: Tensor | None) -> Tensor:
    # [B, H, T, D] -> [B * T, H, D]: a view, because projections write token by token
    tokens = x.transpose(1, 2).flatten(0, 1)
    return tokens if rows is None else tokens[rows]


def _on_grid(total: Tensor) -> Tensor:
    # multiples of 2**-20 add up exactly in float64, below 2**33: batches in any order and on any
    # number of processes add up to the same bits
    return total.mul_(_GRID).round_().div_(_GRID)
