"""Errors of K, V and the attention output per layer and head, on held-out text."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calib.capture.attention import map_attention
from calib.eval.exceedance import exceedance, scaled_magnitudes
from calib.eval.schema import Extremes, Figure, Layer, LayerRow, Magnitudes, Tensors
from calib.eval.statistics import ratio
from calib.eval.variants import Setup, Variant, broadcast_scale, fp8_rounding
from calib.scales.places import LayerPlaces
from calib.scales.scales import LayerScales
from calib.scales.tail import ROUNDING
from fp8kv_runtime.fp8 import FP8_DTYPES, fp8_max, quantize
from fp8kv_runtime.hf import EngineQuery, swap_attention

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
        (v, FP8_DTYPES[s.fp8_dtype], fp8_rounding(s, v.tensors), v.engine(setup) or _as_it_is)
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
                q, k, v = rounding(idx, asked.query, key, value)
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
