"""Errors of K, V and the attention output per layer and head, on held-out text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calib.capture.attention import map_attention
from calib.capture.loop import media_arguments
from calib.data import MediaSample
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
from calib.scales.places import LayerPlaces
from calib.scales.scales import KVScales, LayerScales
from calib.scales.stats import KVStats
from calib.scales.summary import clipped_tokens
from calib.scales.tail import ROUNDING, poisson_interval
from fp8kv_runtime.fp8 import FP8_DTYPES, fp8_max, quantize
from fp8kv_runtime.hf import EngineQuery, swap_attention
from fp8kv_runtime.hf.swap import Replacement

_LETTERS: tuple[Tensors, Tensors] = ("k", "v")

# half-octave bins of |x|: bin i holds [2**((i + FIRST_BIN) / 2), 2**((i + FIRST_BIN + 1) / 2))
FIRST_BIN = 2 * -149  # the smallest float32
NUM_BINS = 2 * 128 - FIRST_BIN


@dataclass(frozen=True)
class Clipping:
    """Values of one layer that its scales clip; K: KV heads, 2: K and V."""

    saturated: Tensor  # [documents, 2, K] int64, values beyond the format's largest
    values: Tensor  # [documents, 2] int64, per head, of K and of V
    clipped: Tensor  # [tokens of all documents, 2, K] bool, has a saturated value


@dataclass(frozen=True)
class LayerError(Clipping):
    """Sums, and `amax`, over each document's tokens of one layer; H: query heads."""

    underflowed: Tensor  # [documents, 2, K] int64, values that became 0
    amax: Tensor  # [documents, 2, K] float32, largest |x|, as a share of what the scale can hold
    error: Tensor  # [documents, H] float64, squared error of the attention output
    power: Tensor  # [documents, H] float64, squared attention output


@dataclass(frozen=True)
class LayerValues:
    """K and V of one layer as the reference holds them."""

    amax: Tensor  # [documents, 2, K] of K and V, float32
    histogram: Tensor  # [documents, 2, NUM_BINS] int64, zeros left out
    zeros: Tensor  # [documents, 2] int64


@torch.inference_mode()
def read_layers(
    setup: Setup,
    documents: Sequence[tuple[Tensor, MediaSample | None]],
    variants: Sequence[Variant],
    *,
    with_errors: bool = True,
) -> tuple[dict[str, dict[int, Any]], dict[int, LayerValues]]:
    """Read `documents` [T] and their media with the reference, and round its K and V as variants do.

    Return a `LayerError` by variant and layer_idx, and K and V by layer_idx; without errors, a `Clipping` and
    nothing. Each layer is given the reference's input; those that read another's cache are left out.
    """
    model = setup.model
    attention = map_attention(model)
    repeats = {m.layer_idx: m.kv_repeat for m in attention.cached.values()}
    probes = [
        (v.name, v.layers, FP8_DTYPES[v.scales.fp8_dtype], _rounded_attention(setup, v, v.scales))
        for v in variants
        if v.scales
    ]
    errors: dict[str, dict[int, list[Clipping]]] = {name: {} for name, *_ in probes}
    values: dict[int, list[LayerValues]] = {}

    def attend(
        original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
    ) -> Any:
        call = (module, query, key, value, *args)
        out = original(*call, **kw)
        idx = module.layer_idx
        if idx not in repeats:
            return out
        stored = key[:, :: repeats[idx]], value[:, :: repeats[idx]]
        if with_errors:
            values.setdefault(idx, []).append(layer_values(*stored))
        for name, layers, dtype, attend_rounded in probes:
            if idx in layers:
                outputs = (out, attend_rounded(original, *call, **kw)) if with_errors else None
                errors[name].setdefault(idx, []).append(_layer_error(stored, layers[idx], dtype, outputs))
        return out

    stage = "per-layer errors" if with_errors else "clipped values"
    with swap_attention(model, attend):
        for token_ids, sample in setup.progress.each(stage, documents, "samples"):
            attention.read(model, token_ids[None].to(model.device), **media_arguments(model, sample))
    joined = {name: {i: _join(e) for i, e in layers.items()} for name, layers in errors.items()}
    return joined, {idx: _join(parts) for idx, parts in values.items()}


def _rounded_attention(setup: Setup, variant: Variant, scales: KVScales) -> Replacement:
    """Return attention with q, k and v rounded as `variant` does, in the engine that `setup` simulates."""
    rounding, engine = fp8_rounding(scales, variant.tensors), variant.engine_attention(setup)

    def attend(
        original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
    ) -> Any:
        engine_query = EngineQuery.of(module, query, kw.get("scaling"))
        query = engine_query.undo(variant.round_query(module.layer_idx, engine_query.query))
        key, value = rounding(module.layer_idx, key, value)
        run = partial(engine, original) if engine else original
        return run(module, query, key, value, *args, **kw)

    return attend


def _join(documents: Sequence[Any]) -> Any:
    """Concatenate the tensors of records of one kind."""
    tensors = {name: torch.cat([vars(each)[name] for each in documents]) for name in vars(documents[0])}
    return type(documents[0])(**tensors)


def _layer_error(
    stored: tuple[Tensor, Tensor], scales: LayerScales, dtype: torch.dtype, outputs: tuple[Any, Any] | None
) -> Clipping:
    """Count in one document's K and V [1, K, T, D]; compare `outputs`, of attention with both and rounded."""
    pairs = ((stored[0], scales.k, scales.k_center), (stored[1], scales.v, None))
    largest = fp8_max(dtype)
    centred = [x if centre is None else x - broadcast_scale(centre, x) for x, _, centre in pairs]
    divisors = [broadcast_scale(scale, x) for x, scale, _ in pairs]
    scaled = [(x[0].float() / scale).abs() for x, scale in zip(centred, divisors, strict=True)]
    beyond = [x > largest * ROUNDING for x in scaled]
    clipping = Clipping(
        saturated=_stack(x.sum((1, 2)) for x in beyond),
        values=torch.tensor([[x.shape[1] * x.shape[2] for x in beyond]]),
        clipped=torch.stack([x.any(-1) for x in beyond]).movedim(-1, 0).cpu(),
    )
    if outputs is None:
        return clipping
    zeros = [
        (quantize(x[0], scale, dtype).float() == 0) & (x[0] != 0)
        for x, scale in zip(centred, divisors, strict=True)
    ]
    out, rounded = map(_tokens_last, outputs)
    error, power = (x.square().sum((0, 2))[None].double().cpu() for x in (rounded - out, out))
    return LayerError(
        **vars(clipping),
        underflowed=_stack(x.sum((1, 2)) for x in zeros),
        amax=_stack(x.amax((1, 2)) / largest for x in scaled),
        error=error,
        power=power,
    )


def _stack(tensors: Iterable[Tensor]) -> Tensor:
    """Stack those of K and V as [1, 2, ...]."""
    return torch.stack(list(tensors))[None].cpu()


def _tokens_last(out: Any) -> Tensor:
    """Return attention's output as [T, H, D]; its interface gives [B, T, H, D], SDPA itself [B, H, T, D]."""
    tokens: Tensor = out[0][0] if isinstance(out, tuple) else out[0].transpose(0, 1)
    return tokens.float()


def layer_values(key: Tensor, value: Tensor) -> LayerValues:
    """Count the magnitudes of `key` and `value` [B, K, T, D]."""
    return LayerValues(
        amax=_stack(x.abs().amax((0, 2, 3)).float() for x in (key, value)),
        histogram=_stack(_histogram(x) for x in (key, value)),
        zeros=_stack((x == 0).sum() for x in (key, value)),
    )


def _histogram(x: Tensor) -> Tensor:
    # exact at powers of two, where a rounded logarithm may fall on either side
    mantissa, exponent = x[(x != 0) & x.isfinite()].abs().float().frexp()  # mantissa in [0.5, 1)
    bins = 2 * (exponent.long() - 1) + (mantissa >= 0.5**0.5)
    return torch.bincount(bins - FIRST_BIN, minlength=NUM_BINS)


def predict_clipping(variant: Variant, stats: KVStats) -> dict[int, float]:
    """Estimate from `stats` the chance, by layer_idx, that a token is clipped."""
    chances = variant.scales and clipped_tokens(stats, variant.scales, variant.tensors)
    return chances.by_layer if chances else {}


def count_events(layers: Iterable[Clipping], tensors: str) -> Events:
    """Count the tokens that have a clipped value in any of `layers`, in the `tensors` named, K and V."""
    columns = [i for i, letter in enumerate(_LETTERS) if letter in tensors]
    masks = [layer.clipped[:, columns].flatten(1).any(1) for layer in layers]
    events, tokens = int(torch.stack(masks).any(0).sum()), len(masks[0])
    low, high = poisson_interval(events)
    return Events(tokens=tokens, events=events, low=low / tokens, high=min(1.0, high / tokens))


def clipped_layer(
    layer_idx: int, layer: Clipping, tensors: str = "kv", chance: float | None = None
) -> ClippedLayer:
    """Return shares of the values of one layer, and its clipped tokens in the `tensors` named.

    `chance` is what was predicted for a token to be clipped.
    """
    expected = {} if chance is None else {"expected": chance * len(layer.clipped)}
    counts = _letter_lists(layer.clipped.sum(0))
    by_head = {letter: heads for letter, heads in counts.items() if letter in tensors}
    whole = dict(count_events([layer], tensors))
    return ClippedLayer(
        layer_idx=layer_idx,
        saturated=_letter_lists(layer.saturated.sum(0) / layer.values.sum(0)[:, None]),
        exceedance=Exceedance(**whole, **expected, by_head=by_head),
    )


def _letter_lists(pair: Tensor) -> dict[Tensors, list[Any]]:
    return dict(zip(_LETTERS, pair.tolist(), strict=True))


def layer_row(
    layer_idx: int, layer: LayerError, scales: LayerScales, tensors: str = "kv", chance: float | None = None
) -> LayerRow:
    """Return errors of one layer, shares of its values, and its scales; `tensors` are those in FP8."""
    error, power = (x.sum(1).clamp(min=1e-30).numpy() for x in (layer.error, layer.power))
    # a root keeps the order, so the interval's ends are the roots of its ends
    all_heads = Figure(**{name: float(np.sqrt(value)) for name, value in ratio(error, power)})
    return LayerRow(
        **dict(clipped_layer(layer_idx, layer, tensors, chance)),
        rel_rms_layer=all_heads,
        rel_rms=(layer.error.sum(0) / layer.power.sum(0).clamp(min=1e-30)).sqrt().tolist(),
        underflowed=_letter_lists(layer.underflowed.sum(0) / layer.values.sum(0)[:, None]),
        range_used=_letter_lists(layer.amax.amax(0)),
        scale={"k": _show_scale(scales.k), "v": _show_scale(scales.v)},
    )


def _show_scale(scale: Tensor) -> float | list[float] | Extremes:
    if scale.dim() == 2:  # a number for each of thousands of channels would say less
        return Extremes(min=float(scale.min()), max=float(scale.max()))
    return scale.tolist() if len(scale) > 1 else float(scale)


def value_rows(values: dict[int, LayerValues], places: Iterable[LayerPlaces] = ()) -> list[Layer]:
    """Return amax per KV head and a histogram of |x| of K and V, a row per layer.

    `places` are of a calibration: how its amax grew with the tokens.
    """
    growth: dict[int, Any] = {
        each.layer: {"k": each.k.growth(each.read), "v": each.v.growth(each.read)} for each in places
    }
    return [
        Layer(layer_idx=idx, k=_magnitudes(layer, 0), v=_magnitudes(layer, 1), growth=growth.get(idx))
        for idx, layer in sorted(values.items())
    ]


def _magnitudes(layer: LayerValues, column: int) -> Magnitudes:
    counts = layer.histogram.sum(0)[column]
    bins = counts.nonzero()
    first, last = (int(bins[0]), int(bins[-1])) if len(bins) else (0, -1)
    return Magnitudes(
        amax=layer.amax.amax(0)[column].tolist(),
        zeros=int(layer.zeros.sum(0)[column]),
        log2_first=(first + FIRST_BIN) / 2,
        counts=counts[first : last + 1].tolist(),
    )
