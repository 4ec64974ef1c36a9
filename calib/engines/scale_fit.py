"""How scales fit the absmax that was measured, read with torch: too small, too large, or of another kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from calib.files.cache_type import BLOCK_DIVISOR, FP8_DIVISOR, FP8_MAX, Convention
from calib.files.calibration import Amax
from calib.files.names import layer_of
from calib.files.stored_scales import StoredLayer, is_usable
from calib.files.text import show_layers

if TYPE_CHECKING:
    from calib.scales.stats_file import Calibration

_ROUNDING = 1.005  # rounding to bfloat16 takes 0.4 %
_NEAR = 0.02
_SMALLEST_SHARE = 1 / (16 * _ROUNDING)  # of the range, that scales use: headroom is 16 at most
_SIMILAR = 1.5  # another text has another absmax
_FAR = 4.0
# medians of the factor between a scale and an absmax, where it fits and where it does not
_FITTING, _MISFIT = 1 + _NEAR, (1 + _NEAR) ** 4
# the letters whose absmax K's and V's scales fit, and in which layer
_MISTAKES = {
    ("v", "k", 0): "K scales fit V's measured absmax and V scales K's: they are swapped",
    ("k", "v", -1): "scales fit the measured absmax of the layer before: they are shifted",
    ("k", "v", 1): "scales fit the measured absmax of the next layer: they are shifted",
}
# the share of its range that scales for another FP8 type use
_TYPE_FACTORS = {
    2.0: "half of",
    0.5: "twice",
    FP8_MAX["e4m3fnuz"] / FP8_MAX["e4m3fn"]: f"{FP8_MAX['e4m3fn']:g} / {FP8_MAX['e4m3fnuz']:g} times",
}

Scale = tuple[int, str]  # (layer, "k" | "v" | "q")


class MeasuredAmax(NamedTuple):
    """Measured absmax, and how much it tells."""

    amax: Amax
    headroom: float  # of the scales that the calibration made
    warnings: list[str]  # that too little text was read
    thresholds: Amax  # where an observer other than absmax clips, on purpose
    estimated: frozenset[Scale] = frozenset()  # absmax of what a watched cache clipped
    unbounded: frozenset[Scale] = frozenset()  # of these those whose largest value nothing tells
    least: Amax | None = None  # what was seen at least, of absmax that was read from FP8 codes


class Limits(NamedTuple):
    """The largest value that a cache can hold of x / scale, and the smallest above 0."""

    largest: float
    smallest: float


@dataclass(frozen=True)
class Fit:
    """The share of the FP8 range that the measured absmax of a layer takes."""

    layer: int
    used: dict[str, float]  # k, v, q -> amax / (the FP8 maximum * scale); above 1 it clips
    least: dict[str, float]  # the same at the scale with the smallest share
    zero: list[str]  # which of K, V and Q become all zeros at one of the scales
    is_draft: bool = False  # of a layer that drafts tokens (MTP)
    estimated: Sequence[str] = ()  # of K and V those whose absmax is an estimate
    sure: dict[str, float] = field(default_factory=dict)  # `used`, of what was seen at least

    @property
    def clipped(self) -> list[str]:
        """Letters of K, V and Q that are cut off."""
        return [letter for letter, used in (self.used | self.sure).items() if used > _ROUNDING]


@dataclass(frozen=True)
class Finding:
    """A contradiction between measured absmax and scales."""

    text: str
    scales: frozenset[Scale] = frozenset()  # none: whole layers are contradicted
    is_problem: bool = True  # else a warning


class _Share(NamedTuple):
    """A scale, and the measured absmax of all heads that share it."""

    layer: int
    letter: str
    scale: float
    amax: float


def measured_amax(calibration: Calibration, layers: Sequence[StoredLayer]) -> MeasuredAmax:
    """Take the absmax of `layers` out of a calibration's statistics."""
    from calib.scales.stats import derive_scales
    from calib.scales.text_summary import text_warnings

    stats = calibration.stats
    # scales of a layer that shares another's cache may be there, or not
    absent = {module.layer_idx for module in stats.shared.values()} - {layer.layer for layer in layers}
    amax = {key: heads for key, heads in stats.amax_by_head().items() if key[0] not in absent}
    recipe, thresholds = calibration.recipe() if calibration.report else None, Amax()
    if recipe and recipe.observer.name != "absmax":
        largest = FP8_MAX[recipe.fp8_dtype]
        scales = derive_scales(stats, recipe).layers
        pairs = [(layer.layer_idx, layer) for layer in scales.values()]
        pairs += [(module.layer_idx, scales[module.owner]) for module in stats.shared.values()]
        thresholds = {
            (index, letter): tuple((scale.flatten() * largest).tolist())
            for index, layer in pairs
            for letter, scale in layer.items()
        }
    headroom = 1.0 if recipe is None or recipe.headroom == "auto" else recipe.headroom
    warnings = text_warnings(stats.text, stats.tokens)
    estimated, unbounded = (
        frozenset((x.layer_idx, letter) for x in stats.layers.values() for letter in getattr(x, name))
        for name in ("estimated", "unbounded")
    )
    if clipped := sorted({layer for layer, _ in estimated - unbounded}):
        warnings.append(
            f"the cache that was watched clipped {show_layers(clipped)}: what is "
            "beyond its range is estimated; watch the new scales too"
        )
    return MeasuredAmax(
        amax, headroom, warnings, thresholds, estimated, unbounded, stats.least_by_head() or None
    )


def describe_unbounded(unbounded: Iterable[Scale]) -> str:
    """Say of which layers a watched cache clipped too much, and what tells more."""
    layers = {
        letter: sorted(layer for layer, other in unbounded if other == letter)
        for letter in sorted({letter for _, letter in unbounded})
    }
    where = " and ".join(f"{x.upper()} of {show_layers(layers[x])}" for x in layers)
    return (
        f"the cache that was watched clipped so much of {where} that the largest values are not known: "
        "calibrate the model, or watch a cache of 16 bits"
    )


def measured_convention(
    convention: Convention, layers: Sequence[StoredLayer], amax: Amax
) -> tuple[Convention, list[str]]:
    """Return the convention that measured absmax shows, and a problem where that of the files differs."""
    ratios = [
        max(amax[layer.layer, letter]) / max(values)
        for layer in layers
        for letter in "kv"
        if max(values := layer.values(letter), default=0) > 0 and (layer.layer, letter) in amax
    ]
    if not ratios:
        return convention, []
    divisor = BLOCK_DIVISOR if median(ratios) ** 2 > FP8_DIVISOR * BLOCK_DIVISOR else FP8_DIVISOR
    if divisor == convention.divisor:
        return convention, []
    measured = Convention(divisor, "as the statistics show")
    return measured, [f"the values are {measured}, and not {convention}"] if convention.divisor else []


def compare(layers: Sequence[StoredLayer], amax: Amax, limits: Limits) -> list[Fit]:
    """Compute how each layer's scales fit what was measured."""
    fits = []
    for layer in layers:
        ranges = defaultdict[str, list[float]](list)
        for share in _shares([layer], amax):
            limit = limits.largest * share.scale
            ranges[share.letter].append(share.amax / limit if share.scale > 0 else inf)
        # a head that saw only zeros has a scale of its neighbours
        least = {letter: min(filter(None, values), default=1.0) for letter, values in ranges.items()}
        # half a step is rounded to its even neighbour, 0
        zero = [x for x in least if least[x] * limits.largest <= limits.smallest / 2]
        fits.append(Fit(layer.layer, {letter: max(values) for letter, values in ranges.items()}, least, zero))
    return fits


def judge(
    layers: Sequence[StoredLayer], measured: MeasuredAmax, limits: Limits
) -> tuple[list[Fit], list[Finding]]:
    """Return how each layer's scales fit measured absmax, and how that contradicts them."""
    largest, indices = limits.largest, [layer.layer for layer in layers]
    amax = {place: heads for place, heads in measured.amax.items() if place not in measured.unbounded}
    fits = [
        replace(fit, estimated=[x for x in "kv" if (fit.layer, x) in measured.estimated], sure=sure.used)
        for fit, sure in zip(
            compare(layers, amax, limits), compare(layers, amax | (measured.least or {}), limits), strict=True
        )
    ]
    findings = _compare_head_counts(layers, amax)
    if measured.unbounded:
        findings.append(Finding(describe_unbounded(measured.unbounded)))
    mistake = _find_mistake(layers, amax, largest)
    if mistake:
        findings.append(Finding(mistake, _keys(indices, "kv")))
    elif any(fit.clipped for fit in fits):
        findings += _judge_clipping(layers, fits, measured, largest)
    ranges = [used for fit in fits for used in fit.used.values()]
    for factor, words in _TYPE_FACTORS.items():
        is_headroom = abs(factor * measured.headroom - 1) < _NEAR
        if ranges and not is_headroom and all(abs(used / factor - 1) < _NEAR for used in ranges):
            text = (
                f"every scale is {words} absmax / {largest:g}, as if made for another FP8 type: files hold "
                f"scales for e4m3fn ({FP8_MAX['e4m3fn']:g}) unless they name another"
            )
            findings.append(Finding(text, _keys(indices, "kvq")))
    shares = _shares(layers, amax)
    for letter in "q" if mistake else "kvq":
        findings += _judge_range(letter, [share for share in shares if share.letter == letter], fits, largest)
    stored = {fit.layer for fit in fits}
    if unpaired := stored ^ {layer for layer, _ in measured.amax}:
        has = "scales, and no statistics" if min(unpaired) in stored else "statistics, and no scales"
        findings.append(Finding(f"layer {min(unpaired)} has {has}"))
    return fits, findings


def judge_mtp(
    drafts: Sequence[StoredLayer], against: Calibration, measured: MeasuredAmax, limits: Limits
) -> tuple[list[Fit], list[Finding]]:
    """Judge the largest scales of layers that draft tokens (MTP) by the absmax that a report has of them."""
    rows = against.report.get("drafts", ())
    amax: Amax = {(layer_of(row["module"]) or 0, x): (row[f"{x}_amax"],) for row in rows for x in "kv"}
    layers = [StoredLayer(x.layer, (max(x.k),), (max(x.v),)) for x in drafts if x.k and x.v]
    if not layers or not amax or measured.thresholds:
        text = "draft: not compared, as its absmax is not in the report, or an observer chose its scales"
        return [], [Finding(text, is_problem=False)] if drafts else []
    fits, findings = judge(layers, measured._replace(amax=amax, unbounded=frozenset(), least=None), limits)
    findings = [replace(finding, text=f"draft: {finding.text}") for finding in findings]
    return [replace(fit, is_draft=True) for fit in fits], findings


def _keys(layers: Iterable[int], letters: str) -> frozenset[Scale]:
    return frozenset((layer, letter) for layer in layers for letter in letters)


def _shares(layers: Iterable[StoredLayer], amax: Amax) -> list[_Share]:
    """Return each scale with the measured absmax of its heads."""
    shares = []
    for layer, letter in product(layers, "kvq"):
        scales, heads = layer.values(letter), amax.get((layer.layer, letter), ())
        if letter == "q" and not is_usable(scales):
            continue  # the scales themselves are a problem already
        if len(scales) == 1 and heads:
            heads = (max(heads),)
        if len(scales) == len(heads):
            shares += [_Share(layer.layer, letter, *pair) for pair in zip(scales, heads, strict=True)]
    return shares


def _compare_head_counts(layers: Sequence[StoredLayer], amax: Amax) -> list[Finding]:
    """Find scales that cannot be compared, because the statistics are of another number of heads."""
    counts = {
        (layer.layer, letter): (len(layer.values(letter)), len(amax.get((layer.layer, letter), ())))
        for layer, letter in product(layers, "kvq")
    }
    wrong = {key: pair for key, pair in counts.items() if all(pair) and pair[0] not in (1, pair[1])}
    for (index, letter), (scales, heads) in wrong.items():
        text = (
            f"{letter.upper()} of layer {index} has {scales} scales, and the statistics are of {heads} heads"
        )
        return [Finding(text, frozenset(wrong))]
    return []


def _find_mistake(layers: Sequence[StoredLayer], amax: Amax, largest: float) -> str | None:
    """Say which other absmax the scales of K and V fit, if they do not fit their own."""

    def mismatch(letter: str, measured_letter: str, step: int) -> float:
        """Return the factor by which most scales miss the absmax that was measured `step` layers on."""
        ratios = [
            max(amax[layer.layer + step, measured_letter]) / (largest * max(layer.values(letter)))
            for layer in layers
            if max(layer.values(letter), default=0) > 0 and (layer.layer + step, measured_letter) in amax
        ]
        return median(max(r, 1 / r) if r > 0 else inf for r in ratios) if ratios else 0.0

    own = max(mismatch("k", "k", 0), mismatch("v", "v", 0))
    for (k, v, step), text in _MISTAKES.items():
        if own > _MISFIT and 0 < max(mismatch("k", k, step), mismatch("v", v, step)) < _FITTING:
            return text
    return None


def _judge_clipping(
    layers: Sequence[StoredLayer], fits: Sequence[Fit], measured: MeasuredAmax, largest: float
) -> list[Finding]:
    """Describe what is cut off: a problem, or a warning where the calibration's observer chose to.

    Scales that are not usable are a problem already.
    """
    by_layer = {layer.layer: layer for layer in layers}
    shares = {
        (fit.layer, letter): fit.sure[letter]
        for fit in fits
        for letter in fit.clipped
        if is_usable(by_layer[fit.layer].values(letter))
    }
    if not shares:
        return []
    wrong = {
        (index, letter): share
        for (index, letter), share in shares.items()
        if not _reach(by_layer[index].values(letter), measured.thresholds.get((index, letter), ()), largest)
    }
    shown = wrong or shares
    layer, letter = worst = max(shown, key=lambda key: shown[key])
    count = len({index for index, _ in shown})
    ending = ", at least" if worst in (measured.least or ()) else ""
    if worst in measured.estimated - measured.unbounded:
        ending = ", by an estimate"
    text = (
        f"{count} layer{'s clip' if count > 1 else ' clips'} what was measured, layer {layer} the most: "
        f"its {letter.upper()} is {shown[worst]:.2f} times what its scale can hold{ending}"
    )
    if wrong:
        return [Finding(text, frozenset(wrong))]
    return [Finding(f"{text}; the calibration's observer chose so", is_problem=False)]


def _reach(scales: Sequence[float], thresholds: Sequence[float], largest: float) -> bool:
    """Return whether scales hold their thresholds; of other counts, the smallest the largest."""
    if not (scales and thresholds):
        return False
    if len(scales) != len(thresholds):
        scales, thresholds = (min(scales),), (max(thresholds),)
    return all(_ROUNDING * largest * scale >= value for scale, value in zip(scales, thresholds, strict=True))


def _judge_range(
    letter: str, shares: Sequence[_Share], fits: Sequence[Fit], largest: float
) -> Iterator[Finding]:
    """Yield problems and warnings where the scales of a letter are too large, or of another kind."""
    name = letter.upper()
    zero = [fit.layer for fit in fits if letter in fit.zero]
    least = {fit.layer: fit.least[letter] for fit in fits if letter in fit.least and fit.layer not in zero}
    low = {layer: share for layer, share in least.items() if share < _SMALLEST_SHARE}
    is_odd = zero or low or any(letter in fit.clipped for fit in fits)
    kind = _describe_kind(shares, largest) if is_odd else None
    if kind:
        indices = sorted({share.layer for share in shares})
        text = f"{name} scales {kind} in {show_layers(indices)}: a writer's mistake"
        yield Finding(text, _keys(indices, letter))
    if zero:
        worst = max(share for share in shares if share.layer == zero[0])  # the head with the largest scale
        where = f" in layer {zero[0]}" if len(zero) > 1 else ""
        text = (
            f"{name} becomes all zeros in {show_layers(zero)}: scales are too large, "
            f"{worst.scale:.3g}{where}, where absmax / {largest:g} is {worst.amax / largest:.3g}"
        )
        yield Finding(text, _keys(zero, letter))
    if low and not kind:
        layer = min(low, key=lambda index: low[index])
        where = f" in layer {layer}" if len(low) > 1 else ""
        text = (
            f"{name} uses under 1/16 of the FP8 range in {show_layers([*low])}, "
            f"{100 * low[layer]:.2g}%{where}: scales are far larger than absmax / {largest:g}"
        )
        yield Finding(text, _keys(low, letter), is_problem=False)


def _describe_kind(shares: Sequence[_Share], largest: float) -> str | None:
    """Say what all of several scales look like, if they look like something else than scales."""
    pairs = [(share.scale, share.amax / largest) for share in shares if share.amax > 0]
    if len(pairs) < 2 or not all(0 < scale < inf for scale, _ in pairs):
        return None
    factors = [scale / right_scale for scale, right_scale in pairs]
    is_far = median(max(factor, 1 / factor) for factor in factors) > _FAR
    if is_far and all(1 / _SIMILAR < scale * right_scale < _SIMILAR for scale, right_scale in pairs):
        return f"look like 1/scale ({largest:g} / absmax)"
    if max(factors) < (1 + _NEAR) ** 2 * min(factors) and min(factors) > 1 / _SMALLEST_SHARE:
        if abs(median(factors) / largest - 1) < _NEAR:
            return f"look like absmax itself, not divided by {largest:g},"
        return f"are all {median(factors):.3g} times absmax / {largest:g}"
    return None
