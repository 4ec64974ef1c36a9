"""Observers: choose the amax of a scale from the statistics.

`absmax` covers every value seen. `percentile` and `mse` clip on purpose; both read the histogram.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from calib.choices import ObserverName, Strategy
from calib.scales.histogram import bin_values
from fp8kv_runtime.fp8 import dequantize, quantize, scale_from_amax


class Observer(Protocol):
    """Derives one amax per scale group."""

    needs_histogram: bool

    def amax(self, amax: Tensor, histogram: Tensor | None, strategy: Strategy) -> Tensor:
        """Return [1], [H] or [H, D] from `amax` [H, D] and `histogram` [H, NUM_BINS]."""


class AbsMax:
    """The largest magnitude seen, over all batches."""

    needs_histogram = False

    def amax(self, amax: Tensor, histogram: Tensor | None, strategy: Strategy) -> Tensor:
        """Reduce [H, D] to the strategy's groups by max."""
        return group_amax(amax, strategy)


class Percentile:
    """The magnitude below which `percentile` % of the values lie; the rest saturates."""

    needs_histogram = True

    def __init__(self, percentile: float) -> None:
        self._share = percentile / 100

    def amax(self, amax: Tensor, histogram: Tensor | None, strategy: Strategy) -> Tensor:
        """Read the percentile off the histogram, never above the true amax."""
        counts = _group_histogram(histogram, strategy)
        cumulative = counts.cumsum(-1).double()
        wanted = (cumulative[:, -1:] * self._share).ceil().clamp(min=1)
        bins = torch.searchsorted(cumulative, wanted).squeeze(-1)
        return torch.minimum(bin_values()[bins], group_amax(amax, strategy))


class Mse:
    """The clipping threshold with the least squared error at the FP8 grid's real rounding.

    FP8 is a floating-point grid, so halving the scale changes nothing but the range: one octave of
    candidates below the true amax finds every phase of the grid, a second allows real clipping.
    """

    needs_histogram = True
    candidates = torch.exp2(-torch.arange(64) / 32)  # from amax down to amax / 4, 2 % apart

    def __init__(self, fp8_dtype: torch.dtype) -> None:
        self._fp8_dtype = fp8_dtype

    def amax(self, amax: Tensor, histogram: Tensor | None, strategy: Strategy) -> Tensor:
        """Search the candidates of each group."""
        largest = group_amax(amax, strategy)
        groups = zip(_group_histogram(histogram, strategy), largest, strict=True)
        return torch.stack([self._search(counts, top) for counts, top in groups])

    def _search(self, counts: Tensor, largest: Tensor) -> Tensor:
        populated = counts.nonzero().squeeze(-1)
        values, weights = bin_values()[populated], counts[populated].double()
        thresholds = largest * self.candidates
        scales = scale_from_amax(thresholds, self._fp8_dtype)[:, None]
        restored = dequantize(quantize(values, scales, self._fp8_dtype), scales)
        errors = ((restored - values).double().square() * weights).sum(-1)
        return thresholds[errors.argmin()]


def group_amax(amax: Tensor, strategy: Strategy) -> Tensor:
    """Reduce `amax` [H, D] by max to [1] (tensor), [H] (attn_head) or [H, D] (channel)."""
    if strategy == "tensor":
        return amax.amax().view(1)
    return amax.amax(dim=-1) if strategy == "attn_head" else amax


def _group_histogram(histogram: Tensor | None, strategy: Strategy) -> Tensor:
    if histogram is None:
        raise ValueError("these statistics hold no histogram; calibrate with observer mse")
    return histogram.sum(0, keepdim=True) if strategy == "tensor" else histogram


def make_observer(name: ObserverName, *, percentile: float, fp8_dtype: torch.dtype) -> Observer:
    """Build the observer called `name`; only one of the options concerns each."""
    return OBSERVERS[name](percentile, fp8_dtype)


OBSERVERS: dict[ObserverName, Callable[[float, torch.dtype], Observer]] = {
    "absmax": lambda percentile, fp8_dtype: AbsMax(),
    "percentile": lambda percentile, fp8_dtype: Percentile(percentile),
    "mse": lambda percentile, fp8_dtype: Mse(fp8_dtype),
}
