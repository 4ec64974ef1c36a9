"""Lines, bars and heat maps: KL against position, error by layer and head."""

import base64
import io
import math
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import style, ticker
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from calib.evaluate.report import Layer, Row
from calib.scales.plot import draw_growth

_STYLES = Path(__file__).parent
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
# inches: on a phone letters are still as large as one can read
SIZE = (5.0, 3.5)
_HEAD = 0.17  # inches for each head, within bounds
_LEAST, _MOST = 1.0, 3.2


class Picture(NamedTuple):
    """One chart as data URIs of SVG, without any text that others chose."""

    light: str
    dark: str


def draw(size: tuple[float, float], paint: Callable[[Figure], None]) -> Picture:
    """Draw `size` inches, of 96 CSS pixels each; C0 is the page's ink, C1 to C8 its colours."""
    return Picture(_drawn("light", size, paint), _drawn("dark", size, paint))


def _drawn(scheme: str, size: tuple[float, float], paint: Callable[[Figure], None]) -> str:
    # "default" first: a user's own matplotlibrc is not for this page
    own = (_STYLES / f"{name}.mplstyle" for name in ("chart", scheme))
    with style.context(["default", *own]):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        written = io.BytesIO()
        figure.savefig(written, format="svg", metadata=_NO_METADATA)
    return f"data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode()}"


class Series(NamedTuple):
    """One variant as a line."""

    name: str
    color: int  # `--cN` of the page; 0 is the ink
    dashes: tuple[int, ...]  # empty: solid
    marker: str  # matplotlib's word
    row: Row


def kl_by_position(series: list[Series]) -> Picture:
    """Mean KL in each bin of positions, with its interval; both axes are logarithmic."""
    # a long text is read with some variants only
    bins = max((each.row.kl_by_position for each in series), key=len)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        # the first, which the user gave, lies above the others
        for number, each in reversed(list(enumerate(series))):
            # side by side, so that the intervals do not cover each other
            shift = 0.08 * (number - (len(series) - 1) / 2)
            _points(axes, each, shift)
        ends = [0, *(each.to for each in bins)]
        axes.set_xticks([i - 0.5 for i in range(len(ends))], list(map(_tokens, ends)))
        axes.set_xlabel("position in the text, tokens")
        log_axis(axes, "KL, nats per token", plain_number)

    return draw(SIZE, paint)


def layer_error(series: list[Series], subject: str | None) -> Picture:
    """Relative RMS error of each layer's attention output; that of `subject` with its interval."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for each in reversed(series):
            layers = each.row.layers
            errors = [layer.rel_rms_layer for layer in layers]
            # a layer without error has no place on a logarithmic axis
            shown = [x.value if 0 < x.value < math.inf else math.nan for x in errors]
            xs = [layer.layer_idx for layer in layers]
            _line(axes, each, xs, shown, 3.5 if len(xs) <= 48 else 2)
            if each.name == subject:
                low, high = [x.low for x in errors], [x.high for x in errors]
                axes.fill_between(xs, low, high, color=f"C{each.color}", alpha=0.2, linewidth=0)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.margins(x=0.02)
        axes.set_xlabel("layer")
        log_axis(axes, "relative RMS error of attention output", _percent)

    return draw(SIZE, paint)


def layers_alone(kl: dict[int, float], skipped: set[int]) -> Picture:
    """KL of each layer alone in FP8; those left in 16 bits are hollow."""
    from_zero = {i: value for i, value in sorted(kl.items()) if math.isfinite(value)}

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for layer, value in from_zero.items():
            color = "C2" if layer in skipped else "C1"
            fill = "none" if layer in skipped else color
            axes.bar(layer, value, 0.7, facecolor=fill, edgecolor=color)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(plain_number)
        axes.grid(visible=False, axis="x")
        axes.margins(x=0.02)
        axes.set(xlabel="layer", ylabel="KL, nats per token")

    return draw(SIZE, paint)


def growth(layers: list[Layer]) -> Picture:
    """Amax of K and V over the tokens of the calibration, a line per layer and their median."""
    known = [layer.growth for layer in layers if layer.growth]
    lines: dict[str, list[list[tuple[int, float]]]] = {
        "k": [each["k"] for each in known],
        "v": [each["v"] for each in known],
    }

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        draw_growth(axes, lines, {"k": "C1", "v": "C2"})
        axes.xaxis.set_major_formatter(lambda count, _: _tokens(round(count)))
        axes.yaxis.set_major_formatter(_percent)
        axes.tick_params(which="minor", length=0)

    return draw(SIZE, paint)


def _points(axes: Axes, series: Series, shift: float) -> None:
    figures = [(i + shift, f) for i, f in enumerate(series.row.kl_by_position)]
    shown = [(x, f) for x, f in figures if 0 < f.low <= f.high < math.inf]
    xs, ys = [x for x, _ in shown], [f.value for _, f in shown]
    low, high = [f.low for _, f in shown], [f.high for _, f in shown]
    axes.vlines(xs, low, high, color=f"C{series.color}")
    _line(axes, series, xs, ys, 4.5)


def _tokens(count: int) -> str:
    return str(count) if count < 1024 or count % 1024 else f"{count // 1024}k"


def _line(axes: Axes, series: Series, xs: Any, ys: Any, size: float) -> None:
    color, dashes = f"C{series.color}", (0, series.dashes) if series.dashes else "solid"
    axes.plot(xs, ys, color=color, linestyle=dashes, marker=series.marker, markersize=size)


def log_axis(axes: Axes, title: str, form: Any) -> None:
    """Make the axis of values logarithmic; `form` writes its numbers."""
    axes.set_yscale("log")
    if not 0 < axes.get_ylim()[0] < axes.get_ylim()[1]:  # nothing was drawn
        axes.set_ylim(0.1, 1)
    axes.yaxis.set_major_locator(_log_ticks(*axes.get_ylim(), 12))
    axes.yaxis.set_major_formatter(form)
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_ylabel(title)
    axes.tick_params(which="minor", length=0)


class HeatMap(NamedTuple):
    """One value of each head of each layer."""

    heads: str  # what is on its second axis
    layers: list[int]
    cells: list[list[float]]  # [layers][heads]; layers may differ in heads
    is_share: bool  # percent from zero; else logarithmic


def heat_map(panel: HeatMap) -> Picture:
    """Layers from left to right, heads from the top."""
    height = float(np.clip(max(map(len, panel.cells)) * _HEAD, _LEAST, _MOST)) + 0.65
    return draw((SIZE[0], height), lambda figure: _paint(figure, figure.subplots(), panel))


def _paint(figure: Figure, axes: Axes, panel: HeatMap) -> None:
    rows = zip_longest(*panel.cells, fillvalue=np.nan)
    cells = np.array([*rows], dtype=float)  # [heads, layers]; nothing is drawn where it is NaN
    # an image: thousands of cells as paths would be most of the page
    image = axes.imshow(
        cells,
        aspect="auto",
        interpolation="none",
        cmap="viridis",
        norm=_norm(cells, panel.is_share),
        extent=(-0.5, cells.shape[1] - 0.5, cells.shape[0] - 0.5, -0.5),
    )
    axes.grid(visible=False)
    axes.set(xlabel="layer", ylabel=panel.heads)
    axes.yaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(8, integer=True))
    labels = dict(enumerate(map(str, panel.layers)))
    axes.xaxis.set_major_formatter(lambda i, _: labels.get(round(i), ""))
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=8, fraction=0.1)
    assert bar.solids is not None
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    bar.formatter = ticker.FuncFormatter(_percent if panel.is_share else plain_number)
    bar.locator = ticker.MaxNLocator(4) if panel.is_share else _log_ticks(*image.get_clim(), 5)
    bar.update_ticks()
    bar.ax.yaxis.set_minor_locator(ticker.NullLocator())


def _norm(cells: NDArray[Any], is_share: bool) -> Normalize:
    shown = cells[(cells > 0) & np.isfinite(cells)]
    low, high = (float(shown.min()), float(shown.max())) if shown.size else (1.0, 1.0)
    if is_share:
        return Normalize(0, high)
    # one value alone is no range
    return LogNorm(low, high if high > low else 2 * low)


def plain_number(value: float, _: Any) -> str:
    """A number on an axis."""
    # not matplotlib's own, which marks up powers of ten
    return f"{value:g}"


def _percent(value: float, _: Any) -> str:
    return f"{100 * value:g}%"


def _log_ticks(low: float, high: float, most: int) -> ticker.Locator:
    """At most about `most` ticks between `low` and `high` of a logarithmic axis."""
    decades = math.log10(high / low)
    if decades < 0.7:
        return ticker.MaxNLocator(most - 1)
    if 3 * decades < most:
        return ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=most)
    return ticker.LogLocator(numticks=most)
