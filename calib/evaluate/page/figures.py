"""The report's charts with their captions and legends."""

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from calib.evaluate.page import plots
from calib.evaluate.page.frontier import GIVEN, Point, frontier, kl_by_bytes
from calib.evaluate.page.histograms import Axis, Histogram, Panel, histogram, shared_axis
from calib.evaluate.page.plots import HeatMap, Picture, Series
from calib.evaluate.report import LayerRow, Report, Tensors
from calib.evaluate.verdict import can_be_served
from calib.files.text import show_number

_BY_POSITION = ("none", "tensor", "attn_head", "channel", "e5m2", "random")
_BY_LAYER = ("none", "tensor", "attn_head", "k only", "v only", "e5m2")
_LAYERS_SHOWN = 6  # the others are folded
# colour, dashes and marker; the ink is for what the user gave
_LOOKS: dict[str, tuple[int, tuple[int, ...], str]] = {
    "tensor": (1, (), "o"),
    "attn_head": (2, (6, 2), "s"),
    "channel": (3, (2, 2), "^"),
    "none": (4, (), "D"),
    "e5m2": (5, (8, 2, 2, 2), "v"),
    "mse": (6, (6, 2, 2, 2), "h"),
    "random": (6, (1, 2), "P"),
    "k only": (6, (4, 2), "<"),
    "v only": (7, (4, 2), ">"),
}
_GIVEN_DASHES: tuple[tuple[int, ...], ...] = ((), (5, 2), (1, 2))  # no more are drawn


class Chart(NamedTuple):
    """A picture with its caption and legend, which the page escapes."""

    picture: Picture | Histogram
    label: str  # for who cannot see it
    caption: str
    legend: tuple[Series, ...] = ()
    title: str = ""


def charts(report: Report) -> dict[str, Any]:
    """All charts by their names in the template; None or no entry: it was not measured."""
    shown, folded = _histogram_charts(report)
    return {
        "bytes": _bytes_chart(report),
        "position": _position_chart(report),
        "layers": _layer_chart(report),
        "search": _search_chart(report),
        "heads": _head_charts(report),
        "growth": _growth_chart(report),
        "histograms": shown,
        "folded": folded,
    }


def _bytes_points(report: Report) -> list[Point]:
    whole = report.bytes_per_token["16bit"]
    return [
        Point(GIVEN if row.kind == "given" else name, row.bytes_per_token / whole, row.kl,
              name == report.subject)
        for name, row in report.variants.items()
        if row.bytes_per_token and row.kl.is_finite and row.kl.low > 0 and can_be_served(name, row)
    ]  # fmt: skip


def _bytes_chart(report: Report) -> Chart | None:
    """KL against bytes; None where all caches take the same."""
    points = _bytes_points(report)
    if len({point.share for point in points}) < 2:
        return None
    best = ", ".join(f"{each.name} ({each.kl.value:.2g})" for each in frontier(points))
    caption = (
        "Caches that engines have, with 95 % intervals; 100 % is "
        f"{report.bytes_per_token['16bit']:,} bytes a token. Filled: no other one has both fewer "
        f"bytes and a lower KL, from the smallest: {best}. Diamond: what the verdict is about. "
        "Dotted: the noise floor."
    )
    label = "Scatter plot: KL against bytes per token. " + caption
    return Chart(kl_by_bytes(points, report.noise_floor), label, caption)


def _position_chart(report: Report) -> Chart | None:
    series = _select(report, _BY_POSITION, "kl_by_position")
    if not any(b.low > 0 and isfinite(b.high) for each in series for b in each.row.kl_by_position):
        return None
    label = f"Line chart: KL against position in the text, of {_names(series)}"
    caption = (
        "Mean KL in bins of the position in the text, with 95 % intervals: whether errors grow "
        f"as the cache fills. The noise floor is {show_number(report.noise_floor)}."
    )
    if any(b.low == b.high for each in series for b in each.row.kl_by_position):
        caption += " Where there is no interval, one long document was read."
    return Chart(plots.kl_by_position(series), label, caption, tuple(series))


def _layer_chart(report: Report) -> Chart | None:
    series = _select(report, _BY_LAYER, "layers")
    if not series:
        return None
    subject = report.subject
    label = f"Line chart: error of the attention output by layer, of {_names(series)}"
    caption = (
        f"Each layer is given the reference's own input, so errors do not add up. Text: {_documents(report)}."
    )
    worst = _worst_first(report)
    if worst:
        first = worst[0]
        caption = (
            f"Largest with '{subject}': layer {first.layer_idx}, "
            f"{show_number(first.rel_rms_layer.value, '{:.2%}')}. {caption}"
        )
    return Chart(plots.layer_error(series, subject), label, caption, tuple(series))


def _search_chart(report: Report) -> Chart | None:
    found = report.search
    if found is None or not any(map(isfinite, found.kl_alone.values())):
        return None
    skipped = found.skipped
    caption = (
        f"With '{found.variant}' and the other layers in 16 bits. All in FP8: KL "
        f"{show_number(found.kl_of_all)}; with layers {', '.join(map(str, skipped)) or 'none'} in "
        f"16 bits (hollow): {show_number(found.kl)}, the budget is {found.budget:.2g}."
    )
    label = f"Bar chart: KL of each layer alone in FP8. {caption}"
    return Chart(plots.layers_alone(found.kl_alone, set(skipped)), label, caption)


def _head_charts(report: Report) -> list[Chart]:
    values, errors = report.layers, _subject_layers(report)
    if not values:
        return []
    layers = [layer.layer_idx for layer in values]
    amax = {"K": [layer.k.amax for layer in values], "V": [layer.v.amax for layer in values]}
    charts = [
        _heat_map(
            report,
            f"{letter} amax",
            f"The largest |x| of {letter} in each KV head.",
            HeatMap("KV head", layers, cells, False),
        )
        for letter, cells in amax.items()
    ]
    if errors:
        indices, cells = [x.layer_idx for x in errors], [x.rel_rms for x in errors]
        caption = f"Relative RMS error of each head's output with '{report.subject}'."
        panel = HeatMap("head", indices, cells, True)
        charts.append(_heat_map(report, "Error of the attention output", caption, panel))
    return charts


def _heat_map(report: Report, title: str, caption: str, panel: HeatMap) -> Chart:
    caption = f"{caption} Text: {_documents(report)}."
    label = f"Heat map by layer and head. {caption}"
    return Chart(plots.heat_map(panel), label, caption, title=title)


def _growth_chart(report: Report) -> Chart | None:
    """How amax grew in the calibration of this evaluation; None where that is not known."""
    if not any(layer.growth for layer in report.layers):
        return None
    tokens = report.data.calibration_tokens
    caption = (
        f"The amax of K and V by the number of tokens that the calibration has read, {tokens:,} "
        "in all, as a share of the last: a line per layer, and the median of the layers. Lines "
        "that still rise at the right end ask for more text."
    )
    label = "Line chart: amax against tokens. " + caption
    return Chart(plots.growth(report.layers), label, caption)


def _histogram_charts(report: Report) -> tuple[list[Chart], list[Chart]]:
    """One chart per layer, the layers of largest error apart from the others."""
    values = {layer.layer_idx: layer for layer in report.layers}
    rows = [row for row in _worst_first(report) if row.layer_idx in values]
    if not rows or report.judged is None or report.judged.fp8_dtype is None:
        return [], []
    panels = [Panel(values[row.layer_idx], row, report.judged.fp8_dtype) for row in rows]
    axis = shared_axis(panels)
    folded = sorted(panels[_LAYERS_SHOWN:], key=lambda panel: panel.row.layer_idx)
    shown = [_histogram(panel, axis) for panel in panels[:_LAYERS_SHOWN]]
    return shown, [_histogram(panel, axis) for panel in folded]


def _histogram(panel: Panel, axis: Axis) -> Chart:
    row = panel.row
    title = f"Layer {row.layer_idx}: error {show_number(row.rel_rms_layer.value, '{:.2%}')}"
    caption = ". ".join(_tensor_line(letter, panel) for letter in panel.values.tensors) + "."
    label = f"Histogram of the magnitudes of K and V. {title}. {caption}"
    return Chart(histogram(panel, axis), label, caption, title=title)


def _tensor_line(letter: Tensors, panel: Panel) -> str:
    row = panel.row
    zero, saturated = (float(np.mean(x[letter])) for x in (row.underflowed, row.saturated))
    largest = max(panel.values.tensors[letter].amax)
    line = f"{letter.upper()}: amax {show_number(largest, '{:.3g}')}, {zero:.2%} become 0"
    return line + (f", {saturated:.2g} of all saturate" if saturated else "")


def _select(report: Report, names: Sequence[str], needs: str) -> list[Series]:
    """Choose the user's scales first, then the measured variants in `names` that have `needs`."""
    rows = report.variants
    given = [name for name, row in rows.items() if row.kind == "given"]
    mine = [Series(n, 0, d, "X", rows[n]) for n, d in zip(given, _GIVEN_DASHES, strict=False)]
    known = [Series(n, *_LOOKS[n], rows[n]) for n in names if n in rows and n not in given]
    return [each for each in mine + known if getattr(each.row, needs)]


def _subject_layers(report: Report) -> list[LayerRow]:
    return report.judged.layers if report.judged else []


def _worst_first(report: Report) -> list[LayerRow]:
    """The subject's layers; one whose error is no number is the worst."""

    def rank(row: LayerRow) -> tuple[bool, float]:
        return row.rel_rms_layer.is_finite, -row.rel_rms_layer.value

    return sorted(_subject_layers(report), key=rank)


def _names(series: list[Series]) -> str:
    return ", ".join(each.name for each in series)


def _documents(report: Report) -> str:
    count = report.data.layer_documents
    return f"the first {count} documents" if count > 1 else "the first document"
