"""What scales hold of text that was not read: how often a token is clipped, and for how long."""

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from calib.scales.scales import KVScales, LayerScales
from calib.scales.stats import KVStats, LayerStats
from calib.scales.summary import name_layers
from calib.scales.tail import MIN_TOKENS, ROUNDING, TAIL, Tail
from fp8kv_runtime.fp8 import FP8_DTYPES, fp8_max


class ClippedTokens(NamedTuple):
    """The chance that a new token has any value of K or V beyond a layer's scales."""

    by_layer: dict[int, float]  # by layer_idx
    unknown: tuple[int, ...] = ()  # layers whose scales clip more tokens than tails hold

    @property
    def line(self) -> str:
        """Both ends in words, and where it is more than can be told."""
        found = [self._ends] if self.by_layer else []
        if self.unknown:
            where = name_layers(self.unknown)
            found.append(f"more than can be told in {where} (beyond the {TAIL} largest tokens)")
        return f"expected of new text like this: {'; '.join(found)}"

    @property
    def _ends(self) -> str:
        worst = max(self.by_layer, key=self.by_layer.__getitem__)
        usual = median(self.by_layer.values())
        which = "one of the other layers" if self.unknown else "a layer"
        return (
            f"{_one_in(usual)} has a value beyond the scales in {which} (the median), "
            f"{_one_in(self.by_layer[worst])} in layer {worst}"
        )


def _one_in(chance: float) -> str:
    return f"one token in {1 / chance:,.0f}" if chance > 1e-12 else "less than one token in 10^12"


def clipped_tokens(stats: KVStats, scales: KVScales, tensors: str = "kv") -> ClippedTokens | None:
    """What to expect of `scales` of those of K and V that `tensors` names.

    None where `stats` cannot tell: they are old, or of few tokens, or the scales are by channel or
    of centred keys. Of layers whose scales clip more than the largest tokens no chance is known.
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
    return ClippedTokens(known, tuple(sorted(found.keys() - known.keys()))) if found else None


def clip_chance(layer: LayerStats, scales: LayerScales, limit: float, tensors: str = "kv") -> float | None:
    """That a new token has a value of K or V beyond `limit` times its scale.

    None where a scale holds less than the largest tokens that were kept.
    """
    below = _of_groups(layer, scales, limit, _below_tail)
    if any(bool(each.any()) for each in below):
        return None
    chances = _of_groups(layer, scales, limit, lambda tail, level: tail.chance_above(level))
    if not layer.latent:
        chances = [each for name, each in zip("kv", chances, strict=True) if name in tensors]
    return float(1 - torch.cat(chances).neg().clamp(min=-1).log1p().sum().exp())


def _below_tail(tail: Tail, level: Tensor) -> Tensor:
    # where the largest tokens all tie, a rounded scale may lie under them
    return level * ROUNDING < tail.threshold


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
