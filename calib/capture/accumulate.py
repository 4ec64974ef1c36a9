"""Running statistics, on the model's device, while batches run."""

import torch
from torch import Tensor

from calib.capture.attention import CachedAttention
from calib.capture.counted import Counted, per_token_statistics
from calib.recipe import Recipe
from calib.scales.derive import recipe_observer
from calib.scales.observers import magnitude_histogram
from calib.scales.stats import STATISTICS, LayerStats, TensorStats

_GRID = 2.0**20


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
        histogram, means = recipe_observer(recipe).needs_histogram, recipe.collects_means
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
