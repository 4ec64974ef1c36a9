"""Charts of a report, as SVG by matplotlib; of text that others chose, only plain names are in them."""

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import product, zip_longest
from math import inf, isfinite, log10, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib import rcParams, style, ticker
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from calib.evaluate.report import Extremes, Layer, LayerRow, Report, Row, Tensors
from calib.evaluate.report import Figure as Interval
from calib.evaluate.verdict import can_be_served
from calib.scales.plot import draw_growth
from fp8kv_runtime.fp8 import FP8_DTYPES

_STYLE = Path(__file__).with_name("chart.mplstyle")
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_LETTERS: tuple[Tensors, ...] = ("k", "v")
_SMALLEST_SHARE = 1e-6  # of all values, in a bar that is drawn
_PLAIN = re.compile(r"[\w.+/-]{1,24}", re.ASCII)  # names of directories that may be drawn
# colour, dashes and marker
_LOOKS: dict[str, tuple[int, tuple[int, ...], str]] = {
    "tensor": (1, (), "o"),
    "attn_head": (2, (6, 2), "s"),
    "channel": (3, (2, 2), "^"),
    "none": (4, (), "D"),
    "e5m2": (5, (8, 2, 2, 2), "v"),
    "random": (6, (1, 2), "P"),
    "k only": (6, (4, 2), "<"),
    "v only": (7, (4, 2), ">"),
}
_CUSTOM_DASHES: tuple[tuple[int, ...], ...] = ((), (5, 2), (1, 2))  # as many of the user's scales are drawn
_BY_POSITION = ("none", "tensor", "attn_head", "channel", "e5m2", "random")
_BY_LAYER = ("none", "tensor", "attn_head", "k only", "v only", "e5m2")


class Point(NamedTuple):
    """A cache in the picture of KL against bytes."""

    name: str
    share: float  # its memory beside 16 bits
    kl: Interval
    is_subject: bool = False
    label: str = ""  # drawn in place of a name that is not ours


class Series(NamedTuple):
    """A variant as a line."""

    name: str
    color: int  # `--cN` of the page; 0 is the ink
    dashes: tuple[int, ...]  # empty: solid
    marker: str  # matplotlib's word
    row: Row

    def draw(self, axes: Axes, xs: Sequence[float], ys: Sequence[float], size: float) -> None:
        """Draw a marker of `size` at each point, and the line that joins them."""
        dashes = (0, self.dashes) if self.dashes else "solid"
        axes.plot(xs, ys, color=f"C{self.color}", linestyle=dashes, marker=self.marker, markersize=size)


class Chart(NamedTuple):
    """A picture, and what the page writes beside it."""

    svg: str
    legend: Sequence[Series] = ()
    points: Sequence[Point] = ()
    frontier: Sequence[Point] = ()
    by_tokens: bool = False  # its axis: tokens that fit, not bytes
    omitted: Sequence[str] = ()  # that are not drawn
    layer: Layer | None = None
    row: LayerRow | None = None  # of the same layer, or of the worst


def charts(report: Report) -> dict[str, Any]:
    """Return charts by their names in the template, None for what was not measured, and `custom_drawn`."""
    with chart_style():
        return {
            "bytes": _bytes_chart(report),
            "position": _position_chart(report),
            "layers": _layer_chart(report),
            "search": _search_chart(report),
            "heads": _head_charts(report),
            "growth": _growth_chart(report),
            "histograms": _histograms(report),
            "custom_drawn": len(_CUSTOM_DASHES),
        }


def chart_style() -> AbstractContextManager[None]:
    """Let matplotlib draw as the page does, whatever a user's own matplotlibrc says."""
    return style.context(["default", _STYLE])


def new_figure(width: float = 5.0, height: float = 3.5) -> tuple[Figure, Axes]:
    """Return a picture of this size in inches, whose letters can be read on a phone, and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def write_svg(figure: Figure) -> str:
    """Return the picture as SVG whose colours are the variables of `report.css`."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=_NO_METADATA)
    svg = text.getvalue()
    variables = {color: f"c{i}" for i, color in enumerate(rcParams["axes.prop_cycle"].by_key()["color"])}
    variables |= {rcParams["axes.edgecolor"]: "muted", rcParams["grid.color"]: "rule"}
    for color, variable in variables.items():
        svg = svg.replace(to_hex(color), f"var(--{variable})")
    return svg


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other one beats in both bytes and KL, by their bytes."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.share, point.kl.value)):
        if not best or point.kl.value < best[-1].kl.value:
            best.append(point)
    return best


def _bytes_chart(report: Report) -> Chart | None:
    """Draw KL against tokens that fit, or bytes where these are not known; None where all are the same."""
    whole, answer = report.bytes_per_token["16bit"], report.recommended
    served = [x for x in (answer.chosen, *answer.alternatives) if x.tokens_per_gb] if answer else []
    memory = {cache.cache: cache.memory for cache in served}
    by_bytes = {cache.bytes_per_token: cache.memory for cache in served}
    custom = _custom_rows(report)
    labels = {n: n if _PLAIN.fullmatch(n) else f"--scales {i}" for i, n in enumerate(custom, 1)}
    points, omitted = list[Point](), list[str]()
    for name, row in report.variants.items():
        if not (row.bytes_per_token and row.kl.is_finite and row.kl.low > 0 and can_be_served(name, row)):
            continue
        share = row.bytes_per_token / whole
        if memory:
            share = memory.get(name, by_bytes.get(row.bytes_per_token, 0) if name in labels else 0)
        if share:
            points.append(Point(name, share, row.kl, name == report.subject, labels.get(name, "")))
        else:
            omitted.append(name)
    if len({point.share for point in points}) < 2:
        return None
    svg = draw_kl_by_bytes(points, report.noise_floor, by_tokens=bool(memory))
    return Chart(svg, points=points, frontier=frontier(points), by_tokens=bool(memory), omitted=omitted)


def draw_kl_by_bytes(points: Sequence[Point], floor: float, *, by_tokens: bool = False) -> str:
    """Draw mean KL with its interval, above 0, against bytes or tokens that fit; steps join the frontier."""
    best = frontier(points)
    figure, axes = new_figure()
    places = {x: (1 / x.share if by_tokens else x.share, x.kl.value) for x in points}
    for point, (x, y) in places.items():
        color = "C2" if point.is_subject else "C1" if point in best else "C8"
        fill = color if point.is_subject or point in best else "none"
        marker = "D" if point.is_subject else "o"
        axes.vlines(x, point.kl.low, point.kl.high, color=color, linewidth=1.2)
        axes.plot(x, y, marker, color=color, markerfacecolor=fill, markersize=6)
    axes.margins(x=0.12)
    left, right = axes.get_xlim()
    xs, ys = zip(*(places[point] for point in best), strict=True)
    end = left if by_tokens else right  # the one of most memory
    axes.step([*xs, end], [*ys, ys[-1]], where="post", color="C1", linewidth=1.0, zorder=1)
    if floor > 0:
        axes.axhline(floor, color="C8", linestyle=(0, (2, 2)), linewidth=1.0)
    axes.set_xlim(left, right)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6))
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel("bytes per token, beside a 16-bit cache")
    if by_tokens:
        axes.xaxis.set_major_formatter("{x:.3g}x")
        axes.set_xlabel("tokens that fit, beside a 16-bit cache")
    _scale_logarithmically(axes, "KL, nats per token", "{x:g}")
    figure.draw_without_rendering()
    ranks = {point: number for number, point in enumerate(best)}
    ordered = sorted(points, key=lambda point: (ranks.get(point, len(best)), point.kl.value))
    ordered.sort(key=lambda point: (not point.is_subject, not point.label))
    _annotate(axes, {point.label or point.name: places[point] for point in ordered})
    return write_svg(figure)


def _annotate(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Write names beside points, the first ones first, where they cover neither a point nor another name."""
    centres = axes.transData.transform([*points.values()])
    boxes = [Bbox.from_bounds(x - 3, y - 3, 6, 6) for x, y in centres]
    for name, place in points.items():
        for height, (side, offset) in product((6, -7), (("left", 7), ("right", -7))):
            label = axes.annotate(
                name, place, (offset, height), textcoords="offset points",
                fontsize=9, verticalalignment="center", horizontalalignment=side,
            )  # fmt: skip
            label.set_in_layout(False)
            box = label.get_window_extent()
            if axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1 and not box.count_overlaps(boxes):
                boxes.append(box)
                break
            label.remove()


def _position_chart(report: Report) -> Chart | None:
    """Draw mean KL in each bin of positions, with its interval."""
    series = _select(report, _BY_POSITION, "kl_by_position")
    bins = [place for line in series for place in line.row.furthest_bins]
    if not any(place.low > 0 and isfinite(place.high) for place in bins):
        return None
    figure, axes = new_figure()
    # the first, which the user gave, lies above the others
    for number, line in reversed([*enumerate(series)]):
        # side by side, so that the intervals do not cover each other
        shift = 0.08 * (number - (len(series) - 1) / 2)
        visible = {i + shift: x for i, x in enumerate(line.row.furthest_bins) if 0 < x.low <= x.high < inf}
        low, high = [x.low for x in visible.values()], [x.high for x in visible.values()]
        axes.vlines([*visible], low, high, color=f"C{line.color}")
        line.draw(axes, [*visible], [x.value for x in visible.values()], 4.5)
    # a long text is read with some variants only
    ends = [0, *(place.to for place in max((line.row.furthest_bins for line in series), key=len))]
    axes.set_xticks(np.arange(len(ends)) - 0.5, [_tokens(end) for end in ends])
    axes.set_xlabel("position in the text, tokens")
    _scale_logarithmically(axes, "KL, nats per token", "{x:g}")
    return Chart(write_svg(figure), series, omitted=_custom_rows(report)[len(_CUSTOM_DASHES) :])


def _layer_chart(report: Report) -> Chart | None:
    """Draw the error of each layer's attention output, of the subject with its interval."""
    series = _select(report, _BY_LAYER, "layers")
    if not series:
        return None
    figure, axes = new_figure()
    for line in reversed(series):
        layers = [layer.layer_idx for layer in line.row.layers]
        errors = [layer.rel_rms_layer for layer in line.row.layers]
        # a layer without error has no place on a logarithmic axis
        visible = [error.value if 0 < error.value < inf else nan for error in errors]
        line.draw(axes, layers, visible, 3.5 if len(layers) <= 48 else 2)
        if line.name == report.subject:
            low, high = [error.low for error in errors], [error.high for error in errors]
            axes.fill_between(layers, low, high, color=f"C{line.color}", alpha=0.2, linewidth=0)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.margins(x=0.02)
    axes.set_xlabel("layer")
    _scale_logarithmically(axes, "relative RMS error of attention output", _percent)
    omitted = _custom_rows(report)[len(_CUSTOM_DASHES) :]
    return Chart(write_svg(figure), series, row=next(iter(_worst_layers(report)), None), omitted=omitted)


def _search_chart(report: Report) -> Chart | None:
    """Draw the KL of each layer alone in FP8; those left in 16 bits are hollow."""
    search = report.search
    kl = {i: x for i, x in sorted(search.kl_alone.items()) if isfinite(x)} if search else {}
    if search is None or not kl:
        return None
    figure, axes = new_figure()
    colors = ["C2" if layer in search.skipped else "C1" for layer in kl]
    fills = ["none" if layer in search.skipped else "C1" for layer in kl]
    axes.bar([*kl], [*kl.values()], 0.7, facecolor=fills, edgecolor=colors)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(visible=False, axis="x")
    axes.margins(x=0.02)
    axes.set(xlabel="layer", ylabel="KL, nats per token")
    return Chart(write_svg(figure))


def _head_charts(report: Report) -> dict[str, Chart]:
    """Draw amax of K and V, and the subject's error, of each head of each layer."""
    if not report.layers:
        return {}
    k, v = ({x.layer_idx: x.tensors[letter].amax for x in report.layers} for letter in _LETTERS)
    charts = {"k": _heat_map(k, "KV head", is_share=False), "v": _heat_map(v, "KV head", is_share=False)}
    if report.judged and report.judged.layers:
        errors = {layer.layer_idx: layer.rel_rms for layer in report.judged.layers}
        charts["error"] = _heat_map(errors, "head", is_share=True)
    return charts


def _heat_map(values: dict[int, list[float]], rows: str, *, is_share: bool) -> Chart:
    """Draw `values` of heads by layer, in percent from zero if `is_share`, logarithmically otherwise."""
    # nothing is drawn where it is NaN: layers may differ in heads
    cells = np.array([*zip_longest(*values.values(), fillvalue=nan)], dtype=float)  # [heads, layers]
    heads, layers = cells.shape
    figure, axes = new_figure(height=float(np.clip(0.17 * heads, 1.0, 3.2)) + 0.65)
    visible = cells[(cells > 0) & np.isfinite(cells)]
    low, high = (float(visible.min()), float(visible.max())) if visible.size else (1.0, 1.0)
    high = max(high, 1.01 * low)  # a value alone is not a range
    norm = Normalize(0, high) if is_share else LogNorm(low, high)
    # an image: thousands of cells as paths would be most of the page
    extent = (-0.5, layers - 0.5, heads - 0.5, -0.5)
    image = axes.imshow(cells, "viridis", norm, aspect="auto", interpolation="none", extent=extent)
    axes.grid(visible=False)
    axes.set(xlabel="layer", ylabel=rows)
    axes.yaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(8, integer=True))
    names = dict(enumerate(map(str, values)))
    axes.xaxis.set_major_formatter(lambda i, _: names.get(round(i), ""))
    ticks = ticker.MaxNLocator(4) if is_share else _log_ticks(low, high, 5)
    form = ticker.FuncFormatter(_percent) if is_share else "{x:g}"
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=8, fraction=0.1, ticks=ticks, format=form)
    assert bar.solids is not None
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    bar.minorticks_off()
    return Chart(write_svg(figure))


def _growth_chart(report: Report) -> Chart | None:
    """Draw how amax grew in the calibration of this evaluation; None where that is not known."""
    growths = [layer.growth for layer in report.layers if layer.growth]
    if not growths:
        return None
    figure, axes = new_figure()
    lines = {"k": [growth["k"] for growth in growths], "v": [growth["v"] for growth in growths]}
    draw_growth(axes, lines, {"k": "C1", "v": "C2"})
    axes.xaxis.set_major_formatter(lambda count, _: _tokens(round(count)))
    axes.yaxis.set_major_formatter(_percent)
    return Chart(write_svg(figure))


def _histograms(report: Report) -> list[Chart]:
    """Draw K and V of each layer beside the range of FP8, the layers of largest error first."""
    subject, layers = report.judged, {layer.layer_idx: layer for layer in report.layers}
    if subject is None or subject.fp8_dtype is None:
        return []
    pairs = [(layers[row.layer_idx], row) for row in _worst_layers(report) if row.layer_idx in layers]
    info = torch.finfo(FP8_DTYPES[subject.fp8_dtype])
    scales = [scale for _, row in pairs for letter in _LETTERS for scale in _scales(row, letter)]
    amax = [x for layer, _ in pairs for letter in _LETTERS for x in layer.tensors[letter].amax]
    if not pairs:
        return []
    # all ranges, what is above them, and a little below, which is rounded to 0
    low = info.smallest_normal * info.eps * min(scales) / 16
    high = 2 * max(info.max * max(scales), *filter(isfinite, amax))
    return [Chart(_histogram(*pair, info, (low, high)), layer=pair[0], row=pair[1]) for pair in pairs]


def _histogram(layer: Layer, row: LayerRow, fp8: torch.finfo, limits: tuple[float, float]) -> str:
    """Draw K upwards, V downwards, shares on a logarithmic axis; what FP8 can hold is shaded."""
    figure = Figure(figsize=(4.0, 1.8))
    axes = figure.add_axes((0.01, 0.14, 0.98, 0.85))
    for letter, sign, color in zip(_LETTERS, (1, -1), ("C1", "C2"), strict=True):
        values, scales = layer.tensors[letter], sorted({*_scales(row, letter)})
        counts = np.array(values.counts, float)
        shares = counts / max(1.0, counts.sum() + values.zeros)
        # from 0 for the smallest share to 1 for all values
        heights = 1 - np.log10(np.maximum(shares, _SMALLEST_SHARE)) / log10(_SMALLEST_SHARE)
        edges = 2.0 ** (values.log2_first + np.arange(len(counts) + 1) / 2)
        axes.stairs(sign * heights, edges, fill=True, color=color, alpha=0.85)
        half = (0.5, 1.0) if sign > 0 else (0.0, 0.5)
        extremes = {scales[0], scales[-1]}
        for scale in extremes:
            # subnormal numbers are paler
            for start, opacity in ((fp8.smallest_normal * fp8.eps, 0.12), (fp8.smallest_normal, 0.16)):
                span, alpha = (start * scale, fp8.max * scale), opacity / len(extremes)
                axes.axvspan(*span, *half, color="C8", alpha=alpha, linewidth=0, zorder=0)
        axes.vlines(scales, 0, sign, color="C0", linewidth=0.7, linestyle=(0, (2, 2)))
        axes.vlines([fp8.max * scale for scale in scales], 0, sign, color="C0", linewidth=0.7)
        axes.text(
            limits[0], sign, f" {letter.upper()}", fontweight="bold", va="top" if sign > 0 else "bottom"
        )
    axes.axhline(0, color="C0", linewidth=0.7)
    axes.set(xscale="log", xlim=limits, ylim=(-1.05, 1.05), yticks=[])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(ticker.LogLocator(numticks=7))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    return write_svg(figure)


def _worst_layers(report: Report) -> list[LayerRow]:
    """Return the subject's layers; one whose error is not a number is the worst."""
    layers = report.judged.layers if report.judged else []
    return sorted(layers, key=lambda row: (row.rel_rms_layer.is_finite, -row.rel_rms_layer.value))


def _scales(row: LayerRow, letter: Tensors) -> list[float]:
    """Return the scales of one tensor of one layer: one, one for each head, or the extremes."""
    scale = row.scale[letter]
    if isinstance(scale, Extremes):
        return [scale.min, scale.max]
    return scale if isinstance(scale, list) else [scale]


def _select(report: Report, names: Sequence[str], needs: str) -> list[Series]:
    """Choose the user's scales first, then the measured variants in `names` that have `needs`."""
    rows, custom = report.variants, _custom_rows(report)
    own = [Series(n, 0, d, "X", rows[n]) for n, d in zip(custom, _CUSTOM_DASHES, strict=False)]
    ours = [Series(n, *_LOOKS[n], rows[n]) for n in names if n in rows and n not in custom]
    return [line for line in own + ours if getattr(line.row, needs)]


def _custom_rows(report: Report) -> list[str]:
    return [name for name, row in report.variants.items() if row.kind == "given"]


def _scale_logarithmically(axes: Axes, title: str, form: Any) -> None:
    """Make the axis of values logarithmic; `form` writes its numbers, without marking up powers of ten."""
    axes.set_yscale("log")
    if not 0 < axes.get_ylim()[0] < axes.get_ylim()[1]:  # nothing was drawn
        axes.set_ylim(0.1, 1)
    axes.yaxis.set_major_locator(_log_ticks(*axes.get_ylim(), 12))
    axes.yaxis.set_major_formatter(form)
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_ylabel(title)


def _log_ticks(low: float, high: float, most: int) -> ticker.Locator:
    """Return at most about `most` ticks between `low` and `high` of a logarithmic axis."""
    decades = log10(high / low)
    if decades < 0.7:
        return ticker.MaxNLocator(most - 1)
    if 3 * decades < most:
        return ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=most)
    return ticker.LogLocator(numticks=most)


def _percent(value: float, _: Any) -> str:
    return f"{100 * value:g}%"


def _tokens(count: int) -> str:
    return str(count) if count < 1024 or count % 1024 else f"{count // 1024}k"
