"""Summary of a calibration: one row per layer, warnings in plain words, and what is expected of new text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from calib.choices import Strategy
from calib.files.cache_type import FP8_MAX
from calib.recipe import Recipe
from calib.scales.observers import group_amax
from calib.scales.places import LayerPlaces, first_of, middle_of
from calib.scales.scales import LATENT_NOTE, KVScales, LayerScales
from calib.scales.stats import KVStats, LayerStats
from calib.scales.tail import MIN_TOKENS, ROUNDING, TAIL, Tail
from calib.scales.text_summary import FEW_TOKENS, text_warnings

OUTLIER_HEAD = 20  # times the median of the other heads
GREW = 0.05  # share of growth in about the last half of the tokens
FLOAT16_MAX = torch.finfo(torch.float16).max
TOKENS_TO_GROW = FEW_TOKENS  # fewer say nothing of growth
OUTLIER_FIRST_TOKEN = 2  # times the amax of all other tokens: a bit of the FP8 range

TEXT_ALONE = (
    "this model takes more than text, and was measured on text alone, beyond which pictures and sound may "
    "raise K and V: read them, too, with --images or --audio COLUMN, --dataset builtin:pictures, or in an "
    "evaluation --also builtin:more-pictures"
)
_RAISED = 1.01  # times that of text

_MANY = 6  # layers named in a warning before it only counts them


@dataclass(frozen=True)
class LayerSummary:
    """The figures of one attention module; a scale is the largest of its groups."""

    module: str
    layer_idx: int
    k_amax: float
    v_amax: float
    k_scale: float
    v_scale: float
    k_range_used: float  # by the head with the smallest amax: its share of the FP8 range, at most 1
    v_range_used: float


def summarize(stats: KVStats, scales: KVScales) -> list[LayerSummary]:
    """Return one row per layer, in layer order."""
    limit = FP8_MAX[scales.fp8_dtype]

    def smallest_share(amax: Tensor, scale: Tensor) -> float:
        per_head = scale.amax(-1) if scale.dim() == 2 else scale
        return float((amax.amax(-1) / (per_head * limit)).min().clamp(max=1.0))

    rows = []
    for name, layer in stats.layers.items():
        own = scales.layers[name]
        stored_k = layer.k.amax if own.k_center is None else layer.centered_keys()[1]
        amax = float(layer.k.amax.max()), float(layer.v.amax.max())
        largest = float(own.k.max()), float(own.v.max())
        used = smallest_share(stored_k, own.k), smallest_share(layer.v.amax, own.v)
        rows.append(LayerSummary(name, layer.layer_idx, *amax, *largest, *used))
    return rows


def warnings_for(stats: KVStats, scales: KVScales, recipe: Recipe, takes_media: bool = False) -> list[str]:
    """Return one line for everything the user should know before trusting the scales."""
    warnings = [LATENT_NOTE] if stats.latent else []
    warnings += text_warnings(stats.text, stats.tokens)
    if takes_media and stats.places() and not stats.amax_by_modality():
        warnings.append(TEXT_ALONE)
    if few := {x.layer_idx: x.tokens for x in stats.layers.values() if x.tokens < stats.tokens}:
        warnings.append(
            f"only {min(few.values()):,} of {stats.tokens:,} tokens were counted in "
            f"{name_layers([*few])}: the scales there rest on less text"
        )
    if recipe.headroom != "auto" and recipe.headroom < 1:
        warnings.append(
            f"headroom {recipe.headroom:g}: scales hold {recipe.headroom:.0%} of the largest "
            "values that were seen, and clip what is beyond"
        )
    warnings += _scale_warnings(stats, scales)
    # places tell of whole K and whole heads, and growth matters to scales that leave no room
    if not (scales.has_center or scales.strategy == "channel"):
        leaves_room = recipe.headroom == "auto" or recipe.data.until is not None
        warnings += _place_warnings(stats.places(), scales.strategy, growth=not leaves_room)
    if recipe.observer.name == "percentile":
        warnings.append(
            "observer percentile clips the largest K and V: compare it with absmax before serving"
        )
    for name, module in stats.shared.items():
        warnings.append(f"{name} shares the cache of {module.owner}: left out, it gets that layer's scales")
    return warnings


def _scale_warnings(stats: KVStats, scales: KVScales) -> list[str]:
    """Return the warnings of amax and scales, each once for all layers that it is true of."""
    layers: dict[tuple[str, str], list[int]] = {}
    for letter in "kv":
        for name, layer in stats.layers.items():
            amax, scale = getattr(layer, letter).amax, getattr(scales.layers[name], letter)
            for text in _warning_templates(amax, scale, scales.strategy):
                layers.setdefault((text, letter.upper()), []).append(layer.layer_idx)
    return [text.format(letter, name_layers(indices)) for (text, letter), indices in layers.items()]


def _warning_templates(amax: Tensor, scale: Tensor, strategy: Strategy) -> Iterator[str]:
    """Yield the warnings of one layer's K or V, to be filled with the letter and the layers."""
    if scale.max() > 1:
        yield "{} scale > 1 in {}: unscaled FP8 would clip there, so never serve without these scales"
    if amax.max() > FLOAT16_MAX:
        yield f"{{}} exceeds {FLOAT16_MAX:,.0f} in {{}}, beyond float16; serve with --dtype bfloat16"
    heads = amax.amax(-1).sort().values
    heads = heads[heads > 0]  # a dead head says nothing of what is usual
    ratio = float(heads[-1] / heads[:-1].median()) if len(heads) > 1 else 1.0
    if strategy == "tensor" and ratio >= OUTLIER_HEAD:
        text = f"{{}}: one head is {OUTLIER_HEAD}x the others in {{}}"
        yield f"{text}; use --strategy attn_head where the engine reads it"
    if strategy == "tensor" and (amax.amax(1) == 0).any():
        yield "{}: a head held only zeros in {}; the layer's one scale is for it too"
    elif (group_amax(amax, strategy) == 0).any():
        yield "{}: a head or channel held only zeros in {}; it takes the layer's largest scale"


def _place_warnings(places: list[LayerPlaces], strategy: Strategy, *, growth: bool) -> list[str]:
    """Warn where amax still grew near the end, and where first tokens alone set it."""
    warnings, per_head = [], strategy != "tensor"
    for letter in "kv":
        parts = [(layer, getattr(layer, letter)) for layer in places]
        grew = {
            layer.layer: part.grew(middle_of(layer.read), per_head=per_head)
            for layer, part in parts
            if growth and layer.read >= TOKENS_TO_GROW
        }
        if indices := [layer for layer, share in grew.items() if share > GREW]:
            read = places[0].read
            warnings.append(
                f"{letter.upper()}: still grew by up to {max(grew.values()):.0%} in the last "
                f"{read - first_of(middle_of(read)):,} of {read:,} tokens in {name_layers(indices)}; "
                "calibrate on more text"
            )
        first = {layer.layer: part.first_alone(per_head=per_head) for layer, part in parts}
        if indices := [layer for layer, ratio in first.items() if ratio >= OUTLIER_FIRST_TOKEN]:
            warnings.append(
                f"{letter.upper()}: the first token of a sample is up to {max(first.values()):.0f}x all "
                f"others in {name_layers(indices)}, and alone sets their scale; `fp8kv inspect` shows "
                "amax without it"
            )
    return warnings


def modality_line(stats: KVStats, strategy: Strategy, name: str) -> str | None:
    """Say where a modality raises K and V the most beyond text, in a layer or head; None without it."""
    factors: dict[str, tuple[float, str]] = {}
    for row in (row for row in stats.amax_by_modality() if name in row):
        groups = ([max(x)] if strategy == "tensor" else x for x in (row["text"], row[name]))
        factor = max((other / text for text, other in zip(*groups, strict=True) if text), default=0.0)
        place = f"{row['tensor'].upper()} of layer {row['layer']} {factor:.3g} times"
        factors[row["tensor"]] = max(factors.get(row["tensor"], (0.0, "")), (factor, place))
    places = [place for factor, place in sorted(factors.values(), reverse=True) if factor >= _RAISED]
    raised = f"{'raises' if name == 'audio' else 'raise'} {' and '.join(places) or 'K and V of no layer'}"
    where = "" if strategy == "tensor" else " in a head"
    return f"{name} {raised} beyond text{where}" if factors else None


def name_layers(indices: Sequence[int]) -> str:
    """Return the layers in words, or only their number if they are many."""
    if len(indices) > _MANY:
        return f"{len(indices)} layers"
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


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
            scope = " of the other layers" if self.unknown else " layer"
            if _one_in(usual) == _one_in(self.by_layer[worst]):
                parts.append(f"{_one_in(usual)} in each{scope}, at most")
            else:
                of_worst = f"{_one_in(self.by_layer[worst])} in the worst, layer {worst}"
                parts.append(f"{_one_in(usual)} in the median{scope}, {of_worst}")
        if self.unknown:
            names = name_layers(self.unknown)
            parts.append(f"more than can be told in {names} (beyond the {TAIL} largest tokens)")
        return f"expected clipping in new text like this: {'; '.join(parts)}"


def _one_in(chance: float) -> str:
    if chance <= 1e-12:
        return "less than 1 token in 10^12"
    return f"1 token in {float(f'{1 / chance:.2g}'):,.0f}"  # two digits: it is an estimate


def clipped_tokens(stats: KVStats, scales: KVScales, tensors: str = "kv") -> ClippedTokens | None:
    """Estimate how often `scales` clip K or V, or the one of them that `tensors` names.

    None where `stats` cannot tell: they are of an engine's cache, or of few tokens, or the scales are by
    channel or of centred keys.
    """
    if scales.strategy == "channel" or scales.has_center:
        return None
    limit = FP8_MAX[scales.fp8_dtype]
    chances = {}
    for name, layer in stats.layers.items():
        own = stats.discount_repeats(layer)
        if own.k.tail is None or own.v.tail is None or own.tokens < MIN_TOKENS:
            return None
        if name in scales.layers:
            chances[layer.layer_idx] = clip_chance(own, scales.layers[name], limit, tensors)
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
    """Return the share of layers whose scales hold what more tokens are expected to reach.

    The scales are widened by `margin`; the tokens are `ahead` times those that were read.
    """
    limit = FP8_MAX[scales.fp8_dtype]
    covered = 0
    for name, layer in stats.layers.items():
        layer = stats.discount_repeats(layer)
        covered += all(
            bool((tail.reached_in(ahead * layer.tokens) <= level * (1 + margin)).all())
            for tail, level in _levels(layer, scales.layers[name], limit)
        )
    return covered / len(stats.layers)


def _levels(layer: LayerStats, scales: LayerScales, limit: float) -> list[tuple[Tail, Tensor]]:
    """Pair each tail of a layer with the largest values [G] that its scales hold."""
    tails = layer.tails("tensor" if len(scales.k) == 1 else "attn_head")
    return [(tail, scale.double() * limit) for tail, scale in zip(tails, (scales.k, scales.v), strict=False)]
