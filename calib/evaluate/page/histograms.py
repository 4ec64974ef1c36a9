"""Histograms of K and V of one layer beside the range of FP8, as shapes that the page draws."""

import math
from typing import NamedTuple

import numpy as np
import torch

from calib.evaluate.report import Extremes, Layer, LayerRow, Magnitudes
from fp8kv_runtime.fp8 import FP8_DTYPES

# units of the page's view box, 288 wide: K stands on the middle, V hangs from it
_WIDTH, _MIDDLE, _HALF = 288.0, 58.0, 54.0
_REACH = 1.05 * _HALF  # lines are a little longer than any bar
_FLOOR = -6.0  # log10 of the smallest share that is drawn
_TICKS = 6


class Panel(NamedTuple):
    """One layer."""

    values: Layer
    row: LayerRow  # of the same layer
    fp8_dtype: str


class Half(NamedTuple):
    """One tensor: SVG paths, and what is shaded."""

    letter: str
    bars: str
    scales: str
    tops: str
    shades: list[tuple[float, float, float]]  # x, width, opacity
    sign: float  # 1: upwards


class Histogram(NamedTuple):
    """Both tensors and the numbers below them."""

    halves: list[Half]
    ticks: list[tuple[float, str]]  # x and text


class Axis(NamedTuple):
    """Magnitudes to units of a width, logarithmically."""

    low: float
    high: float
    width: float = _WIDTH

    def place(self, value: float) -> float:
        """Where `value` is, within the axis; 0 for what is too small to be on it, or no number."""
        if not value > self.low:
            return 0.0
        share = math.log(min(value, self.high) / self.low) / math.log(self.high / self.low)
        return round(self.width * share, 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Powers of ten that have room, and where they are."""
        decades = range(math.ceil(math.log10(self.low)), math.ceil(math.log10(self.high)))
        stride = math.ceil(len(decades) / _TICKS)
        found = [(self.place(10.0**n), f"{10.0**n:g}") for n in decades if n % stride == 0]
        return [(x, text) for x, text in found if 15 < x < self.width - 15]


def histogram(panel: Panel, axis: Axis) -> Histogram:
    """K upwards, V downwards, shares on a logarithmic axis; what FP8 can hold is shaded."""
    halves = []
    for (letter, values), sign in zip(panel.values.tensors.items(), (1.0, -1.0), strict=True):
        scales = _scales(panel.row.scale[letter])
        largest = _ends(panel.fp8_dtype)[2]
        lines, tops = (_lines(axis, x, sign) for x in (scales, [largest * s for s in scales]))
        shades = _shades(axis, scales, panel.fp8_dtype)
        halves.append(Half(letter.upper(), _bars(axis, values, sign), lines, tops, shades, sign))
    return Histogram(halves, axis.ticks())


def shared_axis(panels: list[Panel]) -> Axis:
    """Magnitudes that all panels show: every range, what is above it, and a little below it."""
    low, high = [], []
    for panel in panels:
        smallest, _, largest = _ends(panel.fp8_dtype)
        for letter, values in panel.values.tensors.items():
            scales = _scales(panel.row.scale[letter])
            # what is smaller is rounded to 0
            low.append(smallest * min(scales) / 16)
            high.append(largest * max(scales))
            high += [amax for amax in values.amax if np.isfinite(amax)]
    return Axis(min(low), max(high) * 2)


def _scales(scale: float | list[float] | Extremes) -> list[float]:
    """The scales of one tensor of one layer: a number, one for each head, or the extremes."""
    if isinstance(scale, Extremes):
        return [scale.min, scale.max]
    return scale if isinstance(scale, list) else [scale]


def _ends(fp8_dtype: str) -> tuple[float, float, float]:
    """The smallest, the smallest with all its bits, and the largest value of the format."""
    info = torch.finfo(FP8_DTYPES[fp8_dtype])
    return info.smallest_normal * info.eps, info.smallest_normal, info.max


def _shades(axis: Axis, scales: list[float], fp8_dtype: str) -> list[tuple[float, float, float]]:
    """Ranges that FP8 holds with the smallest and the largest scale; subnormal parts are paler."""
    smallest, normal, largest = _ends(fp8_dtype)
    shades = []
    extremes = sorted({min(scales), max(scales)})
    for scale in extremes:
        for start, strength in ((smallest, 0.12), (normal, 0.16)):
            x, end = axis.place(start * scale), axis.place(largest * scale)
            shades.append((x, round(end - x, 1), strength / len(extremes)))
    return shades


def _lines(axis: Axis, magnitudes: list[float], sign: float) -> str:
    places = dict.fromkeys(map(axis.place, magnitudes))  # heads may have the same scale
    return "".join(f"M{x} {_MIDDLE}v{-sign * _REACH:.1f}" for x in places)


def _bars(axis: Axis, values: Magnitudes, sign: float) -> str:
    """Heights from 0 for a share of 10**_FLOOR to 1 for all values."""
    counts = np.array(values.counts, float)
    shares = counts / max(1.0, counts.sum() + values.zeros)
    heights = 1 - np.log10(np.maximum(shares, 10.0**_FLOOR)) / _FLOOR
    edges = [axis.place(2.0 ** (values.log2_first + i / 2)) for i in range(len(counts) + 1)]
    tops = _MIDDLE - sign * _HALF * heights
    steps = (f"V{top:.1f}H{edge}" for top, edge in zip(tops, edges[1:], strict=True))
    return f"M{edges[0]} {_MIDDLE}{''.join(steps)}V{_MIDDLE}"
