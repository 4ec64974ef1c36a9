"""Errors of K, V and the attention output per layer and head, on held-out text."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calib.capture.attention import map_attention
from calib.evaluate.report import (
    ClippedLayer,
    Events,
    Exceedance,
    Extremes,
    Figure,
    Layer,
    LayerRow,
    Magnitudes,
    Tensors,
)
from calib.evaluate.statistics import ratio
from calib.evaluate.variants import Setup, Variant, broadcast_scale, fp8_rounding
from calib.scales.clipping import clipped_tokens
from calib.scales.places import LayerPlaces
from calib.scales.scales import LayerScales
from calib.scales.stats import KVStats
from calib.scales.tail import ROUNDING
from fp8kv_runtime.fp8 import FP8_DTYPES, fp8_max, quantize
from fp8kv_runtime.hf import EngineQuery, swap_attention

_TAIL = 0.025  # on each side of a 95 % interval
_HALVINGS = 60  # of an interval: what is left is below the last bit of its ends
_LETTERS: tuple[Tensors, Tensors] = ("k", "v")


class Clipped(NamedTuple):
    """What scales clip in one layer, of all documents; K: KV heads, 2: K and V."""

    saturated: Tensor  # [documents, 2, K] values beyond the format's largest
    values: Tensor  # [documents, 2] per head, of K and of V
    tokens: Tensor  # [tokens, 2, K] bool, has such a value


def scaled_magnitudes(x: Tensor, scale: Tensor, centre: Tensor | None) -> Tensor:
    """|x - centre| / scale [K, T, D] of one document's K or V [1, K, T, D]."""
    x = x if centre is None else x - broadcast_scale(centre, x)
    return (x[0].float() / broadcast_scale(scale, x)).abs()


@torch.inference_mode()
def count_clipped(
    setup: Setup, documents: Sequence[Tensor], variants: Sequence[Variant]
) -> dict[str, dict[int, Clipped]]:
    """Count by variant and layer, in the K and V that the reference makes of `documents` [T] each.

    Layers that read another layer's cache are left out.
    """
    model = setup.model
    attention = map_attention(model)
    repeats = {m.layer_idx: m.kv_repeat for m in attention.cached.values()}
    largest = {v.name: fp8_max(FP8_DTYPES[v.scales.fp8_dtype]) for v in variants if v.scales}
    found: dict[str, dict[int, list[Clipped]]] = {v.name: {} for v in variants}

    def attend(
        original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
    ) -> Any:
        idx = module.layer_idx
        for variant in variants:
            if idx in repeats and idx in variant.layers:
                stored = key[:, :: repeats[idx]], value[:, :: repeats[idx]]
                counts = _count(*stored, variant.layers[idx], largest[variant.name])
                found[variant.name].setdefault(idx, []).append(counts)
        return original(module, query, key, value, *args, **kw)

    with swap_attention(model, attend):
        for token_ids in setup.progress.each("clipped values", documents, "documents"):
            attention.read(model, token_ids[None].to(model.device))
    return {
        name: {idx: Clipped(*map(torch.cat, zip(*each, strict=True))) for idx, each in rows.items()}
        for name, rows in found.items()
    }


def _count(key: Tensor, value: Tensor, scales: LayerScales, largest: float) -> Clipped:
    """Count in one document's `key` and `value` [1, K, T, D]."""
    pairs = ((key, scales.k, scales.k_center), (value, scales.v, None))
    beyond = [scaled_magnitudes(*pair) > largest * ROUNDING for pair in pairs]
    saturated = torch.stack([x.sum((1, 2)) for x in beyond])[None].cpu()
    values = torch.tensor([[x.shape[1] * x.shape[2] for x in beyond]])
    tokens = torch.stack([x.any(-1) for x in beyond]).movedim(-1, 0).cpu()
    return Clipped(saturated, values, tokens)


def clipped_layer(layer_idx: int, layer: Clipped, tensors: str) -> ClippedLayer:
    """Shares and counts of one layer."""
    shares = layer.saturated.sum(0) / layer.values.sum(0)[:, None]
    return ClippedLayer(
        layer_idx=layer_idx,
        saturated=dict(zip(_LETTERS, shares.tolist(), strict=True)),
        exceedance=exceedance(layer.tokens, tensors),
    )


def exceedance(clipped: Tensor, tensors: str, chance: float | None = None) -> Exceedance:
    """Count the tokens of `clipped` [T, 2, K] bool, in those of K and V that `tensors` names.

    `chance` is what was predicted of each.
    """
    rows = {letter: clipped[:, i] for i, letter in enumerate(_LETTERS) if letter in tensors}
    whole = anywhere([clipped], tensors).model_dump()
    expected: dict[str, float] = {} if chance is None else {"expected": chance * len(clipped)}
    by_head = {name: x.sum(0).tolist() for name, x in rows.items()}
    return Exceedance(**whole, **expected, by_head=by_head)


def predicted(variants: Iterable[Variant], stats: KVStats) -> dict[str, dict[int, float]]:
    """The chance, by variant and layer, that a token is clipped, by what `stats` tell."""
    found = {v.name: clipped_tokens(stats, v.scales, v.tensors) for v in variants if v.scales}
    return {name: each.by_layer for name, each in found.items() if each is not None}


def anywhere(layers: Iterable[Tensor], tensors: str) -> Events:
    """Count the tokens that have a clipped value in any of `layers`, [T, 2, K] bool each."""
    kept = [i for i, letter in enumerate(_LETTERS) if letter in tensors]
    masks = [layer[:, kept].flatten(1).any(1) for layer in layers]
    events, tokens = int(torch.stack(masks).any(0).sum()), len(masks[0])
    low, high = poisson_interval(events)
    return Events(tokens=tokens, events=events, low=low / tokens, high=min(1.0, high / tokens))


def poisson_interval(events: int) -> tuple[float, float]:
    """The exact 95 % interval of a Poisson mean of which `events` were seen.

    Garwood, Fiducial limits for the Poisson distribution, Biometrika 28 (1936): half a quantile of
    chi-square with 2n degrees of freedom, and with 2n + 2, which are those of a gamma distribution.
    """
    low = _gamma_quantile(events, _TAIL) if events else 0.0
    return low, _gamma_quantile(events + 1, 1 - _TAIL)


def _gamma_quantile(shape: int, share: float) -> float:
    """Where the gamma distribution of `shape` and scale 1 has `share` below it, by bisection."""
    a = torch.tensor(float(shape), dtype=torch.float64)
    # ten standard deviations, and enough where the shape is small
    low, high = 0.0, shape + 10 * math.sqrt(shape) + 10
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = float(torch.special.gammainc(a, torch.tensor(middle, dtype=torch.float64)))
        low, high = (middle, high) if below < share else (low, middle)
    return (low + high) / 2


# half-octave bins of |x|: bin i holds [2**((i + FIRST_BIN) / 2), 2**((i + FIRST_BIN + 1) / 2))
FIRST_BIN = 2 * -149  # the smallest float32
NUM_BINS = 2 * 128 - FIRST_BIN


class LayerError(NamedTuple):
    """Sums, and `amax`, over each document's tokens; K: KV heads, H: query heads, 2: K and V."""

    error: Tensor  # [documents, H] squared error of the attention output
    power: Tensor  # [documents, H] squared attention output
    saturated: Tensor  # [documents, 2, K] values beyond the format's largest
    underflowed: Tensor  # [documents, 2, K] values that became 0
    values: Tensor  # [documents, 2] per head, of K and of V
    amax: Tensor  # [documents, 2, K] largest |x| / scale
    clipped: Tensor  # [tokens of all documents, 2, K] bool, has a saturated value


class LayerValues(NamedTuple):
    """K and V of one layer as the reference holds them."""

    amax: Tensor  # [2, K] of K and V, float32
    histogram: Tensor  # [2, NUM_BINS] int64, zeros left out
    zeros: Tensor  # [2] int64


@torch.inference_mode()
def layer_errors(
    setup: Setup, documents: Sequence[Tensor], variants: Sequence[Variant]
) -> tuple[dict[str, dict[int, LayerError]], dict[int, LayerValues]]:
    """Errors by variant and layer, and K and V by layer; each layer is given the reference's input.

    Layers that read another layer's cache are left out.
    """
    model = setup.model
    attention = map_attention(model)
    repeats = {m.layer_idx: m.kv_repeat for m in attention.cached.values()}
    scaled = [(v, v.scales) for v in variants if v.scales]
    probes = [
        (v, FP8_DTYPES[s.fp8_dtype], fp8_rounding(s, v.tensors), v.engine_attention(setup) or _as_it_is)
        for v, s in scaled
    ]
    errors: dict[str, dict[int, list[LayerError]]] = {variant.name: {} for variant, *_ in probes}
    values: dict[int, list[LayerValues]] = {}

    def attend(
        original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
    ) -> Any:
        out = original(module, query, key, value, *args, **kw)
        idx = module.layer_idx
        if idx not in repeats:
            return out
        stored = (key[:, :: repeats[idx]], value[:, :: repeats[idx]])
        values.setdefault(idx, []).append(layer_values(*stored))
        for variant, dtype, rounding, through in probes:
            if idx in variant.layers:
                asked = EngineQuery.of(module, query, kw.get("scaling"))
                q, (k, v) = variant.round_query(idx, asked.query), rounding(idx, key, value)
                other = through(original, module, asked.undo(q), k, v, *args, **kw)
                outputs = _tokens_last(out), _tokens_last(other)
                error = _layer_error(*outputs, *stored, variant.layers[idx], dtype)
                errors[variant.name].setdefault(idx, []).append(error)
        return out

    with swap_attention(model, attend):
        for token_ids in setup.progress.each("per-layer errors", documents, "documents"):
            attention.read(model, token_ids[None].to(model.device))
    joined = {name: {i: _joined(e) for i, e in layers.items()} for name, layers in errors.items()}
    return joined, {idx: _added(each) for idx, each in values.items()}


def _as_it_is(original: Any, *args: Any, **kw: Any) -> Any:
    return original(*args, **kw)


def _joined(documents: Sequence[LayerError]) -> LayerError:
    return LayerError(*map(torch.cat, zip(*documents, strict=True)))


def _added(documents: Sequence[LayerValues]) -> LayerValues:
    amax, histogram, zeros = map(torch.stack, zip(*documents, strict=True))
    return LayerValues(amax.amax(0), histogram.sum(0), zeros.sum(0))


def _tokens_last(out: Any) -> Tensor:
    # [B, T, H, D] from the attention interface; [B, H, T, D] from SDPA itself
    tokens: Tensor = out[0][0] if isinstance(out, tuple) else out[0].transpose(0, 1)
    return tokens.float()


def _layer_error(
    out: Tensor, other: Tensor, key: Tensor, value: Tensor, scales: LayerScales, dtype: torch.dtype
) -> LayerError:
    """Compare the attention output of one document with `other`, for which K and V were rounded."""
    counted = []
    largest = fp8_max(dtype)
    for x, scale, centre in ((key, scales.k, scales.k_center), (value, scales.v, None)):
        scaled = scaled_magnitudes(x, scale, centre)
        scale = broadcast_scale(scale, x)
        x = x if centre is None else x - broadcast_scale(centre, x)
        zero = (quantize(x[0], scale, dtype).float() == 0) & (x[0] != 0)
        beyond = scaled > largest * ROUNDING
        sums = (beyond.sum((1, 2)), zero.sum((1, 2)), scaled.amax((1, 2)) / largest)
        counted.append((*sums, beyond.any(-1)))
    counts = (torch.stack(pair)[None].cpu() for pair in zip(*counted, strict=True))
    saturated, underflowed, amax, clipped = counts
    error, power = (x.square().sum((0, 2))[None].double().cpu() for x in (other - out, out))
    values = torch.tensor([[x.shape[2] * x.shape[3] for x in (key, value)]])
    by_token = clipped[0].movedim(-1, 0)
    return LayerError(error, power, saturated, underflowed, values, amax, by_token)


def layer_values(key: Tensor, value: Tensor) -> LayerValues:
    """Look at `key` and `value` [B, K, T, D]."""
    amax = [x.abs().amax((0, 2, 3)).float() for x in (key, value)]
    zeros = [(x == 0).sum() for x in (key, value)]
    histogram = [_histogram(x) for x in (key, value)]
    return LayerValues(*(torch.stack(pair).cpu() for pair in (amax, histogram, zeros)))


def _histogram(x: Tensor) -> Tensor:
    # exact at powers of two, where a rounded logarithm may fall on either side
    mantissa, exponent = x[(x != 0) & x.isfinite()].abs().float().frexp()  # mantissa in [0.5, 1)
    bins = 2 * (exponent.long() - 1) + (mantissa >= 0.5**0.5)
    return torch.bincount(bins - FIRST_BIN, minlength=NUM_BINS)


def layer_row(
    layer_idx: int,
    layer: LayerError,
    scales: LayerScales,
    tensors: str = "kv",
    chance: float | None = None,
) -> LayerRow:
    """Errors of one layer, shares of its values, and its scales; `tensors` are those in FP8.

    `chance` is what was predicted for a token to be clipped.
    """
    heads = (layer.error.sum(0) / layer.power.sum(0).clamp(min=1e-30)).sqrt()
    values = layer.values.sum(0)[:, None]
    return LayerRow(
        layer_idx=layer_idx,
        rel_rms_layer=_over_heads(layer),
        rel_rms=heads.tolist(),
        saturated=_by_letter(layer.saturated.sum(0) / values),
        underflowed=_by_letter(layer.underflowed.sum(0) / values),
        range_used=_by_letter(layer.amax.amax(0)),
        scale={"k": _scale(scales.k), "v": _scale(scales.v)},
        exceedance=exceedance(layer.clipped, tensors, chance),
    )


def _by_letter(shares: Tensor) -> dict[Tensors, list[float]]:
    return {"k": shares[0].tolist(), "v": shares[1].tolist()}


def _over_heads(layer: LayerError) -> Figure:
    error, power = (x.sum(1).clamp(min=1e-30).numpy() for x in (layer.error, layer.power))
    # a root keeps the order, so the interval's ends are the roots of its ends
    return Figure(**{name: float(np.sqrt(value)) for name, value in ratio(error, power)})


def _scale(scale: Tensor) -> float | list[float] | Extremes:
    if scale.dim() == 2:  # a number for each of thousands of channels would say less
        return Extremes(min=float(scale.min()), max=float(scale.max()))
    return scale.tolist() if len(scale) > 1 else float(scale)


def value_rows(values: dict[int, LayerValues], places: Iterable[LayerPlaces] = ()) -> list[Layer]:
    """One row per layer: amax per KV head and histogram of |x| of K and V.

    `places` are of a calibration: how its amax grew with the tokens.
    """
    growth: dict[int, Any] = {
        each.layer: {"k": each.k.growth(each.read), "v": each.v.growth(each.read)} for each in places
    }
    return [
        Layer(layer_idx=idx, k=_magnitudes(layer, 0), v=_magnitudes(layer, 1), growth=growth.get(idx))
        for idx, layer in sorted(values.items())
    ]


def _magnitudes(layer: LayerValues, which: int) -> Magnitudes:
    counts = layer.histogram[which]
    seen = counts.nonzero()
    first, last = (int(seen[0]), int(seen[-1])) if len(seen) else (0, -1)
    return Magnitudes(
        amax=layer.amax[which].tolist(),
        zeros=int(layer.zeros[which]),
        log2_first=(first + FIRST_BIN) / 2,
        counts=counts[first : last + 1].tolist(),
    )
