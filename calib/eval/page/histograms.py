"""Magnitudes of K and V of one layer beside what FP8 can hold."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from calib.eval.page.drawing import Picture, draw, plain
from calib.eval.schema import Extremes, Layer, LayerRow, Magnitudes
from fp8kv_runtime.fp8 import FP8_DTYPES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _RANGE = "C0", "C8"
_COLORS = {"k": "C1", "v": "C2"}
_FLOOR = -6.0  # log10 of the smallest share that is drawn
_SIZE = (4.0, 1.9)


@dataclass(frozen=True)
class Panel:
    """One layer."""

    values: Layer
    row: LayerRow  # of the same layer
    fp8_dtype: str


def histogram(panel: Panel, limits: tuple[float, float]) -> Picture:
    """K upwards, V downwards, shares on a logarithmic axis; what FP8 can hold is shaded."""

    def paint(figure: "Figure") -> None:
        # dozens of these on a page: a layout worked out for each would take seconds
        figure.set_layout_engine("none")
        axes = figure.add_axes((0.01, 0.15, 0.98, 0.83))
        axes.set_xscale("log")
        for (letter, values), up in zip(panel.values.tensors.items(), (1.0, -1.0), strict=True):
            _shade(axes, scales_of(panel.row.scale[letter]), panel.fp8_dtype, up)
            _bars(axes, values, _COLORS[letter], up)
            axes.annotate(
                letter.upper(),
                (0.015, 0.5 + 0.43 * up),
                xycoords="axes fraction",
                va="center",
                weight="bold",
            )
        axes.axhline(0, color=_INK, linewidth=0.8)
        _frame(axes, limits)

    return draw(_SIZE, paint)


def limits(panels: list[Panel]) -> tuple[float, float]:
    """Magnitudes that all panels show: every range, what is above it, and a little below it."""
    low, high = [], []
    for panel in panels:
        smallest, _, largest = _ends(panel.fp8_dtype)
        for letter, values in panel.values.tensors.items():
            scales = scales_of(panel.row.scale[letter])
            # what is smaller is rounded to 0
            low.append(smallest * min(scales) / 16)
            high.append(largest * max(scales))
            high += [amax for amax in values.amax if np.isfinite(amax)]
    return min(low), max(high) * 2


def scales_of(scale: float | list[float] | Extremes) -> list[float]:
    """The scales of one tensor of one layer: a number, one for each head, or the extremes."""
    if isinstance(scale, Extremes):
        return [scale.min, scale.max]
    return scale if isinstance(scale, list) else [scale]


def _ends(fp8_dtype: str) -> tuple[float, float, float]:
    """The smallest, the smallest with all its bits, and the largest value of the format."""
    info = torch.finfo(FP8_DTYPES[fp8_dtype])
    return info.smallest_normal * info.eps, info.smallest_normal, info.max


def _shade(axes: "Axes", scales: list[float], fp8_dtype: str, up: float) -> None:
    """Shade what the smallest and the largest scale hold, and draw every scale."""
    smallest, normal, largest = _ends(fp8_dtype)
    half = {"ymin": 0.5, "ymax": 1.0} if up > 0 else {"ymin": 0.0, "ymax": 0.5}
    extremes = {min(scales), max(scales)}
    for scale in sorted(extremes):
        for start, strength in ((smallest, 0.12), (normal, 0.16)):
            axes.axvspan(
                start * scale,
                largest * scale,
                color=_RANGE,
                alpha=strength / len(extremes),
                linewidth=0,
                **half,
            )
    width = 1.0 if len(scales) == 1 else 0.5
    tops = np.array(scales) * largest
    axes.vlines(scales, 0, 1.05 * up, color=_INK, linewidth=width, linestyle=(0, (2, 2)))
    axes.vlines(tops, 0, 1.05 * up, color=_INK, linewidth=width)


def _bars(axes: "Axes", values: Magnitudes, color: str, up: float) -> None:
    edges, heights = _drawn(values)
    if len(heights):
        axes.stairs(up * heights, edges, fill=True, color=color, alpha=0.85, linewidth=0)


def _drawn(values: Magnitudes) -> tuple[Any, Any]:
    """Edges and heights, from 0 for a share of 10**_FLOOR to 1 for all values."""
    counts = np.array(values.counts, float)
    edges = 2.0 ** (values.log2_first + np.arange(len(counts) + 1) / 2)
    shares = counts / max(1.0, counts.sum() + values.zeros)
    floor = 10.0**_FLOOR
    return edges, 1 - np.log10(np.maximum(shares, floor)) / _FLOOR


def _frame(axes: "Axes", limits: tuple[float, float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xlim(*limits)
    axes.set_ylim(-1.05, 1.05)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
