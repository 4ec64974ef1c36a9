"""Per-layer figures as JSON: what scales cost, and what K and V look like."""

from typing import Any

import numpy as np
from torch import Tensor

from calib.eval.intervals import as_json, ratio
from calib.eval.layers import LayerError
from calib.eval.measure import Measured
from calib.eval.values import FIRST_BIN, LayerValues
from calib.scales import LayerScales


def layer_rows(measured: Measured) -> list[dict[str, Any]]:
    """One row per layer: errors, shares of values, and the scales."""
    assert measured.variant is not None
    assert measured.variant.scales is not None
    scales = {layer.layer_idx: layer for layer in measured.variant.scales.layers.values()}
    return [_row(layer, scales[idx]) for idx, layer in sorted(measured.layers.items())]


def _row(layer: LayerError, scales: LayerScales) -> dict[str, Any]:
    pairs = {
        "saturated": layer.saturated / layer.values,
        "underflowed": layer.underflowed / layer.values,
        "range_used": layer.amax,
    }
    return {
        "layer_idx": layer.layer_idx,
        "rel_rms_layer": _over_heads(layer),
        "rel_rms": layer.rel_rms.tolist(),
        **{name: {"k": x[0].tolist(), "v": x[1].tolist()} for name, x in pairs.items()},
        "scale": {"k": _scale(scales.k), "v": _scale(scales.v)},
    }


def _over_heads(layer: LayerError) -> dict[str, float]:
    error, power = (x.sum(1).clamp(min=1e-30).numpy() for x in (layer.error, layer.power))
    # a root keeps the order, so the interval's ends are the roots of its ends
    squared = as_json(ratio(error, power))
    return {name: float(np.sqrt(value)) for name, value in squared.items()}


def _scale(scale: Tensor) -> float | list[float] | dict[str, float]:
    if scale.dim() == 2:  # a number for each of thousands of channels would say less
        return {"min": float(scale.min()), "max": float(scale.max())}
    return scale.tolist() if len(scale) > 1 else float(scale)


def value_rows(values: dict[int, LayerValues]) -> list[dict[str, Any]]:
    """One row per layer: amax per KV head and histogram of |x| of K and V."""
    return [
        {"layer_idx": idx, "k": _values(layer, 0), "v": _values(layer, 1)}
        for idx, layer in sorted(values.items())
    ]


def _values(layer: LayerValues, which: int) -> dict[str, Any]:
    counts = layer.histogram[which]
    seen = counts.nonzero()
    first, last = (int(seen[0]), int(seen[-1])) if len(seen) else (0, -1)
    return {
        "amax": layer.amax[which].tolist(),
        "zeros": int(layer.zeros[which]),
        "log2_first": (first + FIRST_BIN) / 2,
        "counts": counts[first : last + 1].tolist(),
    }
