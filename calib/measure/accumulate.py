"""Statistics in the making: what is added up, on the model's device, while batches run."""

import torch
from torch import Tensor

from calib.measure.attention import CachedAttention
from calib.scales.histogram import add_magnitudes
from calib.scales.stats import LayerStats, TensorStats

_GRID = 2.0**20


class RunningTensor:
    """Statistics so far of one of K, V or Q in one attention module."""

    def __init__(self, *, histogram: bool, means: bool) -> None:
        self.amax: Tensor | None = None  # [H * D] in the model's dtype
        self._histogram: Tensor | None = None
        self._total: Tensor | None = None
        self._low: Tensor | None = None  # [H, D], as `amax`
        self._high: Tensor | None = None
        self._wants = (histogram, means)

    def update(self, x: Tensor) -> None:
        """Add the tokens of `x` [N, H, D]."""
        # reducing over the leading dimension is what a CPU does at full width
        batch = x.flatten(1).abs().amax(0)
        self.amax = batch if self.amax is None else torch.maximum(self.amax, batch, out=self.amax)
        self._heads = x.shape[1]
        wants_histogram, wants_means = self._wants
        if wants_histogram:
            self._histogram = add_magnitudes(x, self._histogram)
        if wants_means:
            self._total = _add(self._total, _on_grid(x.sum(0, dtype=torch.float64)))
            low, high = x.aminmax(dim=0)
            self._low = low if self._low is None else torch.minimum(self._low, low)
            self._high = high if self._high is None else torch.maximum(self._high, high)

    def result(self) -> TensorStats:
        """The statistics, on the CPU."""
        assert self.amax is not None, "nothing was seen"
        return TensorStats(
            self.amax.float().cpu().view(self._heads, -1),
            None if self._histogram is None else self._histogram.cpu(),
            None if self._total is None else self._total.cpu(),
            None if self._low is None else self._low.float().cpu(),
            None if self._high is None else self._high.float().cpu(),
        )


class RunningLayer:
    """Statistics so far of one attention module."""

    def __init__(
        self, module: CachedAttention, *, targets: str, histogram: bool, means: bool
    ) -> None:
        self.module = module
        self.tokens = 0
        self.k = RunningTensor(histogram=histogram, means=means)
        self.v = RunningTensor(histogram=histogram, means=means)
        self.q = RunningTensor(histogram=histogram and targets == "qkv", means=False)

    def update(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Add query [B, H, T, D], key and value [B, K, T, D]; `valid` [N] indexes B * T."""
        repeat = self.module.kv_repeat
        self.q.update(_tokens(query, valid))
        self.k.update(_tokens(key, valid)[:, ::repeat])
        self.v.update(_tokens(value, valid)[:, ::repeat])
        self.tokens += query.shape[0] * query.shape[2] if valid is None else len(valid)

    def result(self) -> LayerStats:
        """The statistics, on the CPU."""
        return LayerStats(
            self.module.layer_idx, self.tokens, self.k.result(), self.v.result(), self.q.result()
        )


def _tokens(x: Tensor, valid: Tensor | None) -> Tensor:
    # [B, H, T, D] -> [B * T, H, D]: a view, because projections write token by token
    tokens = x.transpose(1, 2).flatten(0, 1)
    return tokens if valid is None else tokens[valid]


def _on_grid(total: Tensor) -> Tensor:
    # multiples of 2**-20 add up exactly in float64, below 2**33: batches in any order and on any
    # number of processes add up to the same bits
    return total.mul_(_GRID).round_().div_(_GRID)


def _add(total: Tensor | None, batch: Tensor) -> Tensor:
    return batch if total is None else total.add_(batch)
