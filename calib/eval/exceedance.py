"""Tokens whose K or V static FP8 scales clip: counted, and the exact interval of their share."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calib.capture.attention import map_attention
from calib.eval.found import ClippedLayer, Events, Exceedance, Tensors
from calib.eval.variants import Setup, Variant, broadcast_scale
from calib.scales.clipping import clipped_tokens
from calib.scales.scales import LayerScales
from calib.scales.stats import KVStats
from calib.scales.tail import ROUNDING
from fp8kv_runtime.fp8 import FP8_DTYPES, fp8_max
from fp8kv_runtime.hf import swap_attention

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
