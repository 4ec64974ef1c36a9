"""The report's charts with their captions and legends."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from calib.eval.charts.heatmaps import HeatMap, heat_maps
from calib.eval.charts.histograms import Panel, histogram, limits
from calib.eval.charts.lines import kl_by_position, layer_error, layers_alone
from calib.eval.charts.series import Series, select

_BY_POSITION = ("none", "tensor", "attn_head", "channel", "e5m2", "random")
_BY_LAYER = ("none", "tensor", "attn_head", "k only", "v only", "e5m2")
_LAYERS_SHOWN = 6  # the others are folded


@dataclass(frozen=True)
class Chart:
    """A picture and what is said about it in words that the page escapes."""

    svg: Markup
    caption: str
    legend: tuple[Series, ...] = ()
    title: str = ""


def position_chart(report: dict[str, Any]) -> Chart | None:
    """KL against position, or None where no FP8 cache was measured."""
    series = select(report, _BY_POSITION, "kl_by_position")
    if not series:
        return None
    label = f"Line chart: KL against position in the text, of {_names(series)}"
    caption = (
        "Mean KL in bins of the position in the text, with 95 % intervals: whether errors grow "
        f"as the cache fills. The noise floor is {report['noise_floor']:.2g}."
    )
    if any(b["low"] == b["high"] for each in series for b in each.row["kl_by_position"]):
        caption += " Where there is no interval, one long document was read."
    return Chart(kl_by_position(series, label), caption, tuple(series))


def layer_chart(report: dict[str, Any]) -> Chart | None:
    """Error of each layer, or None where no layers were measured."""
    series = select(report, _BY_LAYER, "layers")
    if not series:
        return None
    subject = report["subject"]
    label = f"Line chart: error of the attention output by layer, of {_names(series)}"
    caption = (
        "Each layer is given the reference's own input, so errors do not add up. "
        f"Text: {_documents(report)}."
    )
    worst = _worst_first(report)
    if worst:
        first = worst[0]
        caption = (
            f"Largest with '{subject}': layer {first['layer_idx']}, "
            f"{first['rel_rms_layer']['value']:.2%}. {caption}"
        )
    return Chart(layer_error(series, subject, label), caption, tuple(series))


def search_chart(report: dict[str, Any]) -> Chart | None:
    """KL of each layer alone, or None where no layers were searched for."""
    found = report["search"]
    if found is None:
        return None
    alone = {int(layer): kl for layer, kl in found["kl_alone"].items()}
    skipped = found["skipped"]
    caption = (
        f"With '{found['variant']}' and the other layers in 16 bits. All in FP8: KL "
        f"{found['kl_of_all']:.2g}; with layers {', '.join(map(str, skipped)) or 'none'} in "
        f"16 bits (hollow): {found['kl']:.2g}, the budget is {found['budget']:.2g}."
    )
    label = f"Bar chart: KL of each layer alone in FP8. {caption}"
    return Chart(layers_alone(alone, set(skipped), label), caption)


def head_chart(report: dict[str, Any]) -> Chart | None:
    """K amax, V amax and the subject's error by layer and head."""
    values, errors, subject = report["layers"], _subject_layers(report), report["subject"]
    if not values:
        return None
    layers = [layer["layer_idx"] for layer in values]
    panels = [
        HeatMap(
            f"{letter.upper()} amax", "KV head", layers, [x[letter]["amax"] for x in values], False
        )
        for letter in ("k", "v")
    ]
    if errors:
        indices, cells = [x["layer_idx"] for x in errors], [x["rel_rms"] for x in errors]
        panels.append(HeatMap("error of the attention output", "head", indices, cells, True))
    return Chart(
        heat_maps(panels, "Heat maps: K amax, V amax and error by layer and head"),
        "Layers from left to right; the largest |x| of each KV head, and the relative RMS error "
        f"of each head's output with '{subject}'. Text: {_documents(report)}.",
    )


def histogram_charts(report: dict[str, Any]) -> tuple[list[Chart], list[Chart]]:
    """One chart per layer, the layers of largest error apart from the others."""
    row = report["variants"].get(report["subject"], {})
    values = {layer["layer_idx"]: layer for layer in report["layers"]}
    layers = [layer for layer in _worst_first(report) if layer["layer_idx"] in values]
    panels = [
        Panel(x["layer_idx"], values[x["layer_idx"]], x["scale"], row["fp8_dtype"]) for x in layers
    ]
    shared = limits(panels) if panels else (1.0, 2.0)
    charts = [_histogram(p, layer, shared) for p, layer in zip(panels, layers, strict=True)]
    rest = sorted(zip(panels, charts, strict=True), key=lambda pair: pair[0].layer_idx)
    shown = charts[:_LAYERS_SHOWN]
    return shown, [chart for _, chart in rest if chart not in shown]


def _histogram(panel: Panel, layer: dict[str, Any], shared: tuple[float, float]) -> Chart:
    title = f"Layer {panel.layer_idx}: error {layer['rel_rms_layer']['value']:.2%}"
    caption = ". ".join(_tensor_line(letter, panel, layer) for letter in ("k", "v")) + "."
    label = f"Histogram of the magnitudes of K and V. {title}. {caption}"
    return Chart(histogram(panel, shared, label), caption, title=title)


def _tensor_line(letter: str, panel: Panel, layer: dict[str, Any]) -> str:
    zero, saturated = (float(np.mean(layer[x][letter])) for x in ("underflowed", "saturated"))
    line = f"{letter.upper()}: amax {max(panel.values[letter]['amax']):.3g}, {zero:.2%} become 0"
    return line + (f", {saturated:.2g} of all saturate" if saturated else "")


def _subject_layers(report: dict[str, Any]) -> list[dict[str, Any]]:
    layers: list[dict[str, Any]] = report["variants"].get(report["subject"], {}).get("layers", [])
    return layers


def _worst_first(report: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(_subject_layers(report), key=lambda x: -x["rel_rms_layer"]["value"])


def _names(series: list[Series]) -> str:
    return ", ".join(each.name for each in series)


def _documents(report: dict[str, Any]) -> str:
    count = report["data"]["layer_documents"]
    return f"the first {count} documents" if count > 1 else "the first document"
