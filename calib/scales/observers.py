"""Observers: choose the amax of a scale from the statistics.

`absmax` covers every value seen. `percentile` and `mse` clip on purpose: they read a histogram per
head, made in one pass over the data, by which any clipping threshold can be judged. A bin is a
bfloat16 magnitude, 48 exponents of 128 steps each: so for a bfloat16 model the histogram loses
nothing inside its range, and other dtypes are rounded to bfloat16 first.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from calib.choices import ObserverName, Strategy
from calib.errors import InputError
from fp8kv_runtime.fp8 import dequantize, quantize, scale_from_amax

MANTISSA_BITS = 7
NUM_BINS = 48 << MANTISSA_BITS

# smaller than 2**-24 underflows in FP8 at every scale worth considering; 127 is the exponent bias
_FIRST_CODE = (127 - 24) << MANTISSA_BITS


def magnitude_histogram(x: Tensor) -> Tensor:
    """Count the magnitudes of `x` [N, H, D] per head: [H, NUM_BINS] int64."""
    counts = []
    # head by head: bincount wants int64, and eight times the input would leave the CPU's cache
    for head in x.unbind(1):
        codes = head.to(torch.bfloat16).contiguous().view(torch.int16) & 0x7FFF
        bins = codes.sub_(_FIRST_CODE).clamp_(0, NUM_BINS - 1)
        counts.append(torch.bincount(bins.long().flatten(), minlength=NUM_BINS))
    return torch.stack(counts)


def bin_values() -> Tensor:
    """The magnitude each bin stands for: [NUM_BINS] float32."""
    codes = torch.arange(NUM_BINS, dtype=torch.int16) + _FIRST_CODE
    return codes.view(torch.bfloat16).float()


@runtime_checkable
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
        raise InputError("these statistics hold no histogram; calibrate with observer mse")
    return histogram.sum(0, keepdim=True) if strategy == "tensor" else histogram


# from a percentile and an FP8 type, of which each observer needs one at most
OBSERVERS: dict[ObserverName, Callable[[float, torch.dtype], Observer]] = {
    "absmax": lambda percentile, fp8_dtype: AbsMax(),
    "percentile": lambda percentile, fp8_dtype: Percentile(percentile),
    "mse": lambda percentile, fp8_dtype: Mse(fp8_dtype),
}
