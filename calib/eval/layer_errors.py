"""Errors of K, V and the attention output per layer and head, on held-out text."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.eval.schema import Extremes, Figure, Layer, LayerRow, Magnitudes
from calib.eval.statistics import ratio
from calib.eval.variants import Variant, broadcast_scale, fp8_rounding
from calib.measure.attention import map_attention
from calib.scales.scales import LayerScales
from fp8kv_runtime.fp8 import FP8_DTYPES, fp8_max, quantize
from fp8kv_runtime.hf import swap_attention

# half-octave bins of |x|: bin i holds [2**((i + FIRST_BIN) / 2), 2**((i + FIRST_BIN + 1) / 2))
FIRST_BIN = 2 * -149  # the smallest float32
NUM_BINS = 2 * 128 - FIRST_BIN


@dataclass(frozen=True)
class LayerError:
    """Sums over tokens, of one layer and variant; K counts KV heads, H query heads."""

    error: Tensor  # [documents, H] squared error of the attention output
    power: Tensor  # [documents, H] squared attention output
    saturated: Tensor  # [2, K] values of K and V beyond the format's largest
    underflowed: Tensor  # [2, K] values that became 0
    values: int  # per head, of each of K and V
    amax: Tensor  # [2, K] largest |x| / scale

    def merge(self, other: "LayerError") -> "LayerError":
        """Combine with the same layer on other documents."""
        return LayerError(
            torch.cat([self.error, other.error]),
            torch.cat([self.power, other.power]),
            self.saturated + other.saturated,
            self.underflowed + other.underflowed,
            self.values + other.values,
            torch.maximum(self.amax, other.amax),
        )


@dataclass(frozen=True)
class LayerValues:
    """K and V of one layer as the reference holds them."""

    amax: Tensor  # [2, K] of K and V, float32
    histogram: Tensor  # [2, NUM_BINS] int64, zeros left out
    zeros: Tensor  # [2] int64

    def merge(self, other: "LayerValues") -> "LayerValues":
        """Combine with the same layer on other text."""
        return LayerValues(
            torch.maximum(self.amax, other.amax),
            self.histogram + other.histogram,
            self.zeros + other.zeros,
        )


@torch.inference_mode()
def layer_errors(
    model: PreTrainedModel, documents: Iterable[Tensor], variants: Sequence[Variant]
) -> tuple[dict[str, dict[int, LayerError]], dict[int, LayerValues]]:
    """Errors by variant and layer, and K and V by layer; each layer is given the reference's input.

    Layers that read another layer's cache are left out.
    """
    repeats = {m.layer_idx: m.kv_repeat for m in map_attention(model).cached.values()}
    probes = [(v, v.scales, fp8_rounding(v.scales, v.tensors)) for v in variants if v.scales]
    found: dict[str, dict[int, LayerError]] = {variant.name: {} for variant, *_ in probes}
    values: dict[int, LayerValues] = {}

    def attend(
        original: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        out = original(module, query, key, value, *args, **kwargs)
        layer_idx: Any = module.layer_idx
        if layer_idx not in repeats:
            return out
        stored = (key[:, :: repeats[layer_idx]], value[:, :: repeats[layer_idx]])
        held = layer_values(*stored)
        values[layer_idx] = values[layer_idx].merge(held) if layer_idx in values else held
        for variant, scales, rounding in probes:
            if layer_idx not in variant.layers:
                continue
            other = original(module, *rounding(layer_idx, query, key, value), *args, **kwargs)
            outputs = _tokens_last(out), _tokens_last(other)
            dtype = FP8_DTYPES[scales.fp8_dtype]
            error = _layer_error(*outputs, *stored, variant.layers[layer_idx], dtype)
            layers = found[variant.name]
            layers[layer_idx] = layers[layer_idx].merge(error) if layer_idx in layers else error
        return out

    with swap_attention(model, attend):
        for token_ids in documents:
            model.get_decoder()(input_ids=token_ids[None].to(model.device), use_cache=False)
    return found, values


def _tokens_last(out: Any) -> Tensor:
    # [B, T, H, D] from the attention interface; [B, H, T, D] from SDPA itself
    tokens: Tensor = out[0][0] if isinstance(out, tuple) else out[0].transpose(0, 1)
    return tokens.float()


def _layer_error(
    out: Tensor, other: Tensor, key: Tensor, value: Tensor, scales: LayerScales, dtype: torch.dtype
) -> LayerError:
    """Compare the attention output of one document with `other`, for which K and V were rounded."""
    counted = []
    for x, scale, centre in ((key, scales.k, scales.k_center), (value, scales.v, None)):
        scale = broadcast_scale(scale, x)
        x = x if centre is None else x - broadcast_scale(centre, x)
        scaled = (x[0].float() / scale).abs()
        zero = (quantize(x[0], scale, dtype).float() == 0) & (x[0] != 0)
        largest = fp8_max(dtype)
        saturated = (scaled > largest).sum((1, 2))
        counted.append((saturated, zero.sum((1, 2)), scaled.amax((1, 2)) / largest))
    saturated, underflowed, amax = (torch.stack(pair).cpu() for pair in zip(*counted, strict=True))
    error, power = (x.square().sum((0, 2))[None].double().cpu() for x in (other - out, out))
    values = key.shape[2] * key.shape[3]
    return LayerError(error, power, saturated, underflowed, values, amax)


def layer_values(key: Tensor, value: Tensor) -> LayerValues:
    """Look at `key` and `value` [B, K, T, D]."""
    amax = [x.abs().amax((0, 2, 3)).float() for x in (key, value)]
    zeros = [(x == 0).sum() for x in (key, value)]
    histogram = [_histogram(x) for x in (key, value)]
    return LayerValues(*(torch.stack(pair).cpu() for pair in (amax, histogram, zeros)))


def _histogram(x: Tensor) -> Tensor:
    # exact at powers of two, where a rounded logarithm may fall on either side
    mantissa, exponent = x[x != 0].abs().float().frexp()  # mantissa in [0.5, 1)
    bins = 2 * (exponent.long() - 1) + (mantissa >= 0.5**0.5)
    return torch.bincount(bins - FIRST_BIN, minlength=NUM_BINS)


def layer_rows(layers: dict[int, LayerError], scales: dict[int, LayerScales]) -> list[LayerRow]:
    """One row per layer: errors, shares of values, and the scales."""
    return [_row(idx, layer, scales[idx]) for idx, layer in sorted(layers.items())]


def _row(layer_idx: int, layer: LayerError, scales: LayerScales) -> LayerRow:
    heads = (layer.error.sum(0) / layer.power.sum(0).clamp(min=1e-30)).sqrt()
    saturated, underflowed = layer.saturated / layer.values, layer.underflowed / layer.values
    return LayerRow(
        layer_idx=layer_idx,
        rel_rms_layer=_over_heads(layer),
        rel_rms=heads.tolist(),
        saturated={"k": saturated[0].tolist(), "v": saturated[1].tolist()},
        underflowed={"k": underflowed[0].tolist(), "v": underflowed[1].tolist()},
        range_used={"k": layer.amax[0].tolist(), "v": layer.amax[1].tolist()},
        scale={"k": _scale(scales.k), "v": _scale(scales.v)},
    )


def _over_heads(layer: LayerError) -> Figure:
    error, power = (x.sum(1).clamp(min=1e-30).numpy() for x in (layer.error, layer.power))
    # a root keeps the order, so the interval's ends are the roots of its ends
    squared = ratio(error, power).model_dump()
    return Figure(**{name: float(np.sqrt(value)) for name, value in squared.items()})


def _scale(scale: Tensor) -> float | list[float] | Extremes:
    if scale.dim() == 2:  # a number for each of thousands of channels would say less
        return Extremes(min=float(scale.min()), max=float(scale.max()))
    return scale.tolist() if len(scale) > 1 else float(scale)


def value_rows(values: dict[int, LayerValues]) -> list[Layer]:
    """One row per layer: amax per KV head and histogram of |x| of K and V."""
    return [
        Layer(layer_idx=idx, k=_magnitudes(layer, 0), v=_magnitudes(layer, 1))
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
