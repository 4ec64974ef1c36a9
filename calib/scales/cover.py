"""What scales hold of text that was not read: how often a token is clipped, and for how long."""

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from calib.scales.scales import KVScales, LayerScales
from calib.scales.stats import KVStats, LayerStats
from calib.scales.tail import MIN_TOKENS, Tail
from fp8kv_runtime.fp8 import FP8_DTYPES, fp8_max


class ClippedTokens(NamedTuple):
    """The chance that a new token has any value of K or V beyond a layer's scales."""

    by_layer: dict[int, float]  # by layer_idx

    @property
    def line(self) -> str:
        """Both ends in words."""
        worst = max(self.by_layer, key=self.by_layer.__getitem__)
        usual = median(self.by_layer.values())
        return (
            f"expected of new text like this: {_one_in(usual)} has a value beyond the scales in a "
            f"layer (the median), {_one_in(self.by_layer[worst])} in layer {worst}"
        )


def _one_in(chance: float) -> str:
    return f"one token in {1 / chance:,.0f}" if chance > 1e-12 else "no token"


def clipped_tokens(stats: KVStats, scales: KVScales, tensors: str = "kv") -> ClippedTokens | None:
    """What to expect of `scales` of those of K and V that `tensors` names.

    None where `stats` cannot tell: they are old, or of few tokens, or the scales are by channel or
    of centred keys. Layers whose scales clip more than the largest tokens are left out.
    """
    knows = all(
        layer.k.tail is not None and layer.v.tail is not None and layer.tokens >= MIN_TOKENS
        for layer in stats.layers.values()
    )
    if not knows or scales.strategy == "channel" or scales.has_center:
        return None
    limit = fp8_max(FP8_DTYPES[scales.fp8_dtype])
    found = {
        layer.layer_idx: clip_chance(layer, scales.layers[name], limit, tensors)
        for name, layer in stats.layers.items()
        if name in scales.layers
    }
    known = {layer: chance for layer, chance in found.items() if chance is not None}
    return ClippedTokens(known) if known else None


def clip_chance(
    layer: LayerStats, scales: LayerScales, limit: float, tensors: str = "kv"
) -> float | None:
    """That a new token has a value of K or V beyond `limit` times its scale.

    None where a scale holds less than the largest tokens that were kept.
    """
    below = _of_groups(layer, scales, limit, lambda tail, level: level < tail.threshold)
    if any(bool(each.any()) for each in below):
        return None
    chances = _of_groups(layer, scales, limit, lambda tail, level: tail.chance_above(level))
    if not layer.latent:
        chances = [each for name, each in zip("kv", chances, strict=True) if name in tensors]
    return float(1 - torch.cat(chances).neg().clamp(min=-1).log1p().sum().exp())


def holds(stats: KVStats, scales: KVScales, ahead: int, share: float) -> float:
    """The share of layers in which what the next tokens reach is at most `share` beyond the scales.

    `ahead` times as many tokens as were read are expected to reach it.
    """
    limit = fp8_max(FP8_DTYPES[scales.fp8_dtype])

    def stays(layer: LayerStats, own: LayerScales) -> bool:
        tokens = ahead * layer.tokens
        within = _of_groups(
            layer, own, limit, lambda tail, level: tail.reached_in(tokens) <= level * (1 + share)
        )
        return all(bool(each.all()) for each in within)

    found = [stays(layer, scales.layers[name]) for name, layer in stats.layers.items()]
    return sum(found) / len(found)


def _of_groups(
    layer: LayerStats, scales: LayerScales, limit: float, of: Callable[[Tail, Tensor], Tensor]
) -> list[Tensor]:
    """`of` each tail of K and V and of the largest value that its scales [G] hold."""
    letters = scales.items()[: 1 if layer.latent else 2]
    tails = layer.tails("tensor" if len(scales.k) == 1 else "attn_head")
    return [of(tail, own.double() * limit) for tail, (_, own) in zip(tails, letters, strict=True)]
