"""The chance that scales clip a new token, and how much more text the scales still cover."""

from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from calib.files.cache_type import FP8_MAX
from calib.scales.scales import KVScales, LayerScales
from calib.scales.stats import KVStats, LayerStats
from calib.scales.summary import name_layers
from calib.scales.tail import MIN_TOKENS, ROUNDING, TAIL, Tail


class ClippedTokens(NamedTuple):
    """The chance that a new token has any value of K or V beyond a layer's scales."""

    by_layer: dict[int, float]  # by layer_idx
    unknown: tuple[int, ...] = ()  # layers whose scales clip more tokens than tails hold

    @property
    def line(self) -> str:
        """The median and the largest chance in words, and the layers whose chance is unknown."""
        parts = []
        if self.by_layer:
            usual = median(self.by_layer.values())
            worst = max(self.by_layer, key=self.by_layer.__getitem__)
            layer = "one of the other layers" if self.unknown else "a layer"
            parts.append(
                f"{_one_in(usual)} has a value beyond the scales in {layer} (the median), "
                f"{_one_in(self.by_layer[worst])} in layer {worst}"
            )
        if self.unknown:
            names = name_layers(self.unknown)
            parts.append(f"more than can be told in {names} (beyond the {TAIL} largest tokens)")
        return f"expected of new text like this: {'; '.join(parts)}"


def _one_in(chance: float) -> str:
    return f"one token in {1 / chance:,.0f}" if chance > 1e-12 else "less than one token in 10^12"


def clipped_tokens(stats: KVStats, scales: KVScales, tensors: str = "kv") -> ClippedTokens | None:
    """Estimate how often `scales` clip K or V, or the one of them that `tensors` names.

    None where `stats` cannot tell: they are old, or of few tokens, or the scales are by channel or
    of centred keys.
    """
    if scales.strategy == "channel" or scales.has_center:
        return None
    limit = FP8_MAX[scales.fp8_dtype]
    chances = {}
    for name, layer in stats.layers.items():
        if layer.k.tail is None or layer.v.tail is None or layer.tokens < MIN_TOKENS:
            return None
        if name in scales.layers:
            chances[layer.layer_idx] = clip_chance(layer, scales.layers[name], limit, tensors)
    by_layer = {layer: chance for layer, chance in chances.items() if chance is not None}
    return ClippedTokens(by_layer, tuple(sorted(chances.keys() - by_layer.keys()))) if chances else None


def clip_chance(layer: LayerStats, scales: LayerScales, limit: float, tensors: str = "kv") -> float | None:
    """Return the chance that a new token has a value of K or V beyond `limit` times its scale.

    None where a scale holds less than the largest tokens that were kept.
    """
    levels = _levels(layer, scales, limit)
    # where the largest tokens all tie, a rounded scale may lie under them
    if any(bool((level * ROUNDING < tail.threshold).any()) for tail, level in levels):
        return None
    if not layer.latent:
        levels = [pair for letter, pair in zip("kv", levels, strict=True) if letter in tensors]
    chances = torch.cat([tail.chance_above(level) for tail, level in levels])
    return float(1 - chances.neg().clamp(min=-1).log1p().sum().exp())


def covered_share(stats: KVStats, scales: KVScales, ahead: int, margin: float) -> float:
    """Return the share of layers in which new tokens reach at most `1 + margin` times the scales.

    `ahead` times as many tokens as were read are expected to reach it.
    """
    limit = FP8_MAX[scales.fp8_dtype]
    covered = 0
    for name, layer in stats.layers.items():
        covered += all(
            bool((tail.reached_in(ahead * layer.tokens) <= level * (1 + margin)).all())
            for tail, level in _levels(layer, scales.layers[name], limit)
        )
    return covered / len(stats.layers)


def _levels(layer: LayerStats, scales: LayerScales, limit: float) -> list[tuple[Tail, Tensor]]:
    """Pair each tail of a layer with the largest values [G] that its scales hold."""
    tails = layer.tails("tensor" if len(scales.k) == 1 else "attn_head")
    return [(tail, scale.double() * limit) for tail, scale in zip(tails, (scales.k, scales.v), strict=False)]
