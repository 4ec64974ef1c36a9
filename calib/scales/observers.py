"""From statistics to scales: observers choose the amax of a scale, a rule makes the scale of it.

`absmax` covers every value seen. `percentile` and `mse` clip on purpose: they read a histogram per
head, made in one pass over the data, by which any clipping threshold can be judged. A bin is a
bfloat16 magnitude, 48 exponents of 128 steps each: so for a bfloat16 model the histogram loses
nothing inside its range, and other dtypes are rounded to bfloat16 first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from calib.choices import FP8Name, ObserverName, Strategy
from calib.errors import CalibrationError, InputError
from calib.files.stored_scales import is_usable
from calib.recipe import ObserverRecipe
from fp8kv_runtime.fp8 import FP8_DTYPES, dequantize, quantize, scale_from_amax

_MANTISSA_BITS = 7
# smaller than 2**-24 underflows in FP8 at every scale worth considering; 127 is the exponent bias
_FIRST_CODE = (127 - 24) << _MANTISSA_BITS
NUM_BINS = 48 << _MANTISSA_BITS


def bin_indices(x: Tensor) -> Tensor:
    """Return the bin of each magnitude of `x`, of any shape, in this shape: int16."""
    codes = x.to(torch.bfloat16).view(torch.int16) & 0x7FFF
    return codes.sub_(_FIRST_CODE).clamp_(0, NUM_BINS - 1)


def bin_values() -> Tensor:
    """Return the magnitude of each bin: [NUM_BINS] float32."""
    codes = torch.arange(NUM_BINS, dtype=torch.int16) + _FIRST_CODE
    return codes.view(torch.bfloat16).float()


@runtime_checkable
class Observer(Protocol):
    """A way to choose one amax per group of values that share a scale."""

    def amax(self, amax: Tensor, histogram: Tensor | None, strategy: Strategy) -> Tensor:
        """Return [1], [H] or [H, D], finite and >= 0, from `amax` [H, D] and `histogram` [H, NUM_BINS].

        Both are copies, which it may change. Raises an InputError where it needs a histogram and there is
        none, as of a channel.
        """


class AbsMax:
    """The largest magnitude seen, over all batches."""

    def amax(self, amax: Tensor, histogram: Tensor | None, strategy: Strategy) -> Tensor:
        """Reduce `amax` [H, D] to the strategy's groups by max; the histogram [H, NUM_BINS] is not needed."""
        return group_amax(amax, strategy)


@dataclass(frozen=True)
class Percentile:
    """An amax that `percentile` % of the magnitudes do not exceed. Larger values saturate."""

    percentile: float

    def amax(self, amax: Tensor, histogram: Tensor | None, strategy: Strategy) -> Tensor:
        """Return the percentile of `histogram` [H, NUM_BINS], at most the true `amax` [H, D]: [1] or [H]."""
        cumulative = _group_histogram(histogram, strategy).cumsum(-1).double()
        rank = (cumulative[:, -1:] * (self.percentile / 100)).ceil().clamp(min=1)
        bins = torch.searchsorted(cumulative, rank).squeeze(-1)
        return torch.minimum(bin_values()[bins], group_amax(amax, strategy))


@dataclass(frozen=True)
class Mse:
    """The clipping threshold with the least squared error at the FP8 grid's real rounding.

    FP8 is a floating-point grid, so halving the scale changes nothing but the range: one octave of
    candidates below the true amax finds every phase of the grid, a second allows real clipping.
    """

    fp8_dtype: torch.dtype
    candidates = torch.exp2(-torch.arange(64) / 32)  # from amax down to amax / 4, 2 % apart

    def amax(self, amax: Tensor, histogram: Tensor | None, strategy: Strategy) -> Tensor:
        """Search each group's candidates; `amax` is [H, D], `histogram` [H, NUM_BINS]. Return [1] or [H]."""
        groups = zip(_group_histogram(histogram, strategy), group_amax(amax, strategy), strict=True)
        best = []
        for counts, largest in groups:
            values, weights = bin_values()[counts > 0], counts[counts > 0].double()
            thresholds = largest * self.candidates
            scales = scale_from_amax(thresholds, self.fp8_dtype)[:, None]
            restored = dequantize(quantize(values, scales, self.fp8_dtype), scales)
            best.append(thresholds[((restored - values).double().square() * weights).sum(-1).argmin()])
        return torch.stack(best)


_CONSTRUCTORS: dict[ObserverName, Callable[[ObserverRecipe, FP8Name], Observer]] = {
    "absmax": lambda recipe, fp8_dtype: AbsMax(),
    "percentile": lambda recipe, fp8_dtype: Percentile(recipe.percentile),
    "mse": lambda recipe, fp8_dtype: Mse(FP8_DTYPES[fp8_dtype]),
}


def make_observer(recipe: ObserverRecipe, fp8_dtype: FP8Name = "e4m3fn") -> Observer:
    """Return the observer that `recipe` names, with its options."""
    return _CONSTRUCTORS[recipe.name](recipe, fp8_dtype)


def group_amax(amax: Tensor, strategy: Strategy) -> Tensor:
    """Reduce `amax` [H, D] by max to [1] (tensor), [H] (attn_head) or [H, D] (channel)."""
    if strategy == "tensor":
        return amax.amax().view(1)
    return amax.amax(dim=-1) if strategy == "attn_head" else amax


def _group_histogram(histogram: Tensor | None, strategy: Strategy) -> Tensor:
    """Return counts [1, NUM_BINS] (tensor) or [H, NUM_BINS]; an InputError for channels or without any."""
    if strategy == "channel":
        raise InputError("strategy 'channel' keeps no histogram per channel; use observer absmax")
    if histogram is None:
        raise InputError("these statistics hold no histogram; calibrate with observer mse")
    return histogram.sum(0, keepdim=True) if strategy == "tensor" else histogram


@dataclass(frozen=True)
class ScaleRule:
    """The rule of a scale: `amax * headroom / limit`, with the amax that an observer chooses."""

    strategy: Strategy
    observer: Observer
    headroom: float
    limit: float  # the largest FP8 value

    def scale(
        self, amax: Tensor, histogram: Tensor | None, where: str, centered: Tensor | None = None
    ) -> Tensor:
        """Return [1], [H] or [H, D] from `amax` [H, D] and `histogram` [H, NUM_BINS]; float32.

        The scale is for values whose amax is `centered` [H, D], where that is given. A CalibrationError, in
        which `where` names them, is raised where only zeros, NaN or Inf were seen.
        """
        if not torch.isfinite(amax).all():
            raise CalibrationError(f"{where}: NaN or Inf was seen, so no scale can be derived")
        if not (amax > 0).any():
            raise CalibrationError(
                f"{where}: only zeros were seen, so no scale can be derived; check the weights, or "
                "calibrate on other data"
            )
        # refuse an amax that is beyond float32 as a scale before an observer divides by it
        self._finish(_cover_zeros(group_amax(amax, self.strategy)), where, "the weights")
        chosen = _cover_zeros(self._observe(amax, histogram, where))
        if centered is not None:  # a constant is 0 when centered
            remaining = self._observe(centered, None, where)
            chosen = torch.where(remaining > 0, remaining, chosen)
        return self._finish(chosen, where, f"observer {type(self.observer).__name__}")

    def _observe(self, amax: Tensor, histogram: Tensor | None, where: str) -> Tensor:
        """Return the observer's amax, [1], [H] or [H, D]; an InputError where it returns anything else."""
        shape = group_amax(amax, self.strategy).shape
        copy = None if histogram is None else histogram.clone()
        result: object = self.observer.amax(amax.clone(), copy, self.strategy)
        if not isinstance(result, Tensor):
            problem = f"a {type(result).__name__}"
        elif result.shape != shape:
            problem = f"a tensor of shape {[*result.shape]}"
        elif not (result.isfinite() & (result >= 0)).all():
            problem = "NaN, Inf or a negative number"
        else:
            return result
        raise InputError(
            f"{where}: observer {type(self.observer).__name__} returned {problem}; for strategy "
            f"'{self.strategy}' it must return a tensor of shape {[*shape]}, finite and not negative"
        )

    def _finish(self, amax: Tensor, where: str, cause: str) -> Tensor:
        scale = amax.float() * self.headroom / self.limit
        if not is_usable(scale.flatten().tolist()):
            figures = dict.fromkeys(f"{float(x):.3g}" for x in (scale.min(), scale.max()))
            raise CalibrationError(
                f"{where}: a scale would be {' or '.join(figures)}, which no engine loads; check {cause}"
            )
        return scale


def _cover_zeros(amax: Tensor) -> Tensor:
    # a head or channel that is always zero may hold anything tomorrow: it takes the largest scale of
    # its layer, and the summary warns about it
    return torch.where(amax > 0, amax, amax.amax())
