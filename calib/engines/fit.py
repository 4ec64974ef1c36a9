"""How scales fit the absmax that was measured: too small, too large, of another kind."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from calib.choices import FP8Name
from calib.engines.measured import Measured
from calib.files.cache_type import FP8_MAX, FP8_SMALLEST
from calib.files.calibration import Amax
from calib.files.stored_scales import StoredLayer, is_usable
from calib.files.text import show_layers

# rounding to bfloat16 takes 0.4 %
_ROUNDING = 1.005
_NEAR = 0.02
# headroom is 16 at most
_LEAST = 1 / (16 * _ROUNDING)
# other text has another absmax
_LIKE = 1.5
_FAR = 4.0
# medians of what a scale and another's absmax differ by
_ALIKE, _APART = 1 + _NEAR, (1 + _NEAR) ** 4
# the letters whose absmax K's and V's scales fit, and in which layer
_MISTAKES = {
    ("v", "k", 0): "K scales fit V's measured absmax and V scales K's: they are swapped",
    ("k", "v", -1): "scales fit the measured absmax of the layer before: they are shifted",
    ("k", "v", 1): "scales fit the measured absmax of the next layer: they are shifted",
}
# the share of its range that scales for another FP8 type use
_OTHER_TYPES = {2.0: "half of", 0.5: "twice", 240 / 448: "448 / 240 times"}


Scale = tuple[int, str]  # (layer, "k" | "v" | "q")


class Limits(NamedTuple):
    """The largest value that a cache can hold of x / scale, and the smallest above 0."""

    largest: float
    smallest: float


@dataclass(frozen=True)
class Fit:
    """One layer: the share of the FP8 range that the measured absmax takes."""

    layer: int
    used: dict[str, float]  # k, v, q -> amax / (the FP8 maximum * scale); above 1 it clips
    least: dict[str, float]  # the same at the scale with the smallest share
    zero: list[str]  # which of K, V and Q become all zeros at one of the scales

    @property
    def clipped(self) -> list[str]:
        """Which of K, V and Q are cut off."""
        return [letter for letter, used in self.used.items() if used > _ROUNDING]

    def is_low(self, letter: str) -> bool:
        """Whether one of the scales leaves more than 15/16 of the range unused."""
        return self.least.get(letter, 1.0) < _LEAST


@dataclass(frozen=True)
class Finding:
    """What measured absmax says against scales, and against which of them."""

    text: str
    scales: frozenset[Scale] = frozenset()  # none: of whole layers
    is_problem: bool = True  # else a warning


class _Share(NamedTuple):
    """One scale, and the absmax of what shares it."""

    layer: int
    scale: float
    amax: float


def compare(layers: Sequence[StoredLayer], amax: Amax, limits: Limits) -> list[Fit]:
    """How each layer's scales fit what was measured."""
    fits = []
    for layer in layers:
        used, least = {}, {}
        for letter in "kvq":
            shares = [
                share.amax / (limits.largest * share.scale) if share.scale > 0 else float("inf")
                for share in _shares(layer, letter, amax)
            ]
            if shares:
                used[letter] = max(shares)
                # a head that saw only zeros has the scale of others
                least[letter] = min(filter(None, shares), default=1.0)
        # half a step is rounded to its even neighbour, 0
        zero = [x for x in least if least[x] * limits.largest <= limits.smallest / 2]
        fits.append(Fit(layer.layer, used, least, zero))
    return fits


def judge(
    layers: Sequence[StoredLayer], fits: Sequence[Fit], measured: Measured, largest: float
) -> list[Finding]:
    """Return what the comparison shows."""
    amax = measured.amax
    findings = _other_heads(layers, amax)
    clipped = [fit for fit in fits if fit.clipped]
    if mistaken := _mistaken(layers, amax, largest):
        findings.append(Finding(mistaken, _all(layers, "kv")))
    elif clipped:
        findings.append(_clipping(layers, clipped, measured, largest))
    used = [value for fit in fits for value in fit.used.values()]
    for factor, what in _OTHER_TYPES.items():
        as_meant = abs(factor * measured.headroom - 1) < _NEAR
        if used and not as_meant and all(abs(value / factor - 1) < _NEAR for value in used):
            text = (
                f"every scale is {what} absmax / {largest:g}, as if made for another FP8 "
                "type: files hold scales for e4m3fn (448) unless they name another"
            )
            findings.append(Finding(text, _all(layers, "kvq")))
    for letter in "q" if mistaken else "kvq":
        shares = [share for layer in layers for share in _shares(layer, letter, amax)]
        findings += _judge_range(letter, shares, fits, largest)
    absent = {fit.layer for fit in fits} ^ {layer for layer, _ in amax}
    if absent:
        text = f"layer {min(absent)} is only in the scales, or only in the statistics"
        findings.append(Finding(text))
    return findings


def _clipping(
    layers: Sequence[StoredLayer], clipped: Sequence[Fit], measured: Measured, largest: float
) -> Finding:
    """What is cut off: a problem, or a warning where the calibration's observer chose to."""
    thresholds = measured.thresholds or {}
    chosen = {
        (layer.layer, letter)
        for layer in layers
        for letter in "kvq"
        if _holds(getattr(layer, letter), thresholds.get((layer.layer, letter)), largest)
    }
    shares = {(fit.layer, letter): fit.used[letter] for fit in clipped for letter in fit.clipped}
    wrong = {at: used for at, used in shares.items() if at not in chosen}
    shown = wrong or shares
    layer, letter = worst = max(shown, key=lambda at: shown[at])
    text = (
        f"{len({at[0] for at in shown})} layers clip what was measured, layer {layer} the most: "
        f"its {letter.upper()} is {shown[worst]:.2f} times what its scale can hold"
    )
    if wrong:
        return Finding(text, frozenset(wrong))
    return Finding(f"{text}; the calibration's observer chose so", is_problem=False)


def _holds(scales: tuple[float, ...] | None, thresholds: tuple[float, ...] | None, largest: float) -> bool:
    """Whether each scale holds its threshold; of other counts, the smallest holds the largest."""
    if not (scales and thresholds):
        return False
    if len(scales) != len(thresholds):
        scales, thresholds = (min(scales),), (max(thresholds),)
    return all(_ROUNDING * largest * scale >= value for scale, value in zip(scales, thresholds, strict=True))


def contradictions(layers: Sequence[StoredLayer], measured: Measured, fp8_dtype: FP8Name) -> list[Finding]:
    """Return what measured absmax says against FP8 scales."""
    limits = Limits(FP8_MAX[fp8_dtype], FP8_SMALLEST[fp8_dtype])
    return judge(layers, compare(layers, measured.amax, limits), measured, limits.largest)


def _all(layers: Sequence[StoredLayer], letters: str) -> frozenset[Scale]:
    return frozenset((layer.layer, letter) for layer in layers for letter in letters)


def _judge_range(letter: str, shares: list[_Share], fits: Sequence[Fit], largest: float) -> list[Finding]:
    """Problems and warnings where scales are too large, or of another kind."""
    name, findings = letter.upper(), list[Finding]()
    zero = [fit.layer for fit in fits if letter in fit.zero]
    low = [fit for fit in fits if fit.is_low(letter) and fit.layer not in zero]
    kind = _kind(shares, largest) if zero or low or _clips(letter, fits) else None
    if kind:
        indices = sorted({share.layer for share in shares})
        text = f"{name} scales {kind} in {show_layers(indices)}: a writer's mistake"
        findings.append(Finding(text, frozenset((index, letter) for index in indices)))
    if zero:
        # of its heads the one with the largest scale
        worst = max(share for share in shares if share.layer == zero[0])
        text = (
            f"{name} becomes all zeros in {show_layers(zero)}: scales are too large, {worst.scale:.3g} "
            f"in layer {zero[0]}, where absmax / {largest:g} is {worst.amax / largest:.3g}"
        )
        findings.append(Finding(text, frozenset((index, letter) for index in zero)))
    if not low or kind:
        return findings
    least = min(low, key=lambda fit: fit.least[letter])
    text = (
        f"{name} uses under 1/16 of the FP8 range in {show_layers([fit.layer for fit in low])}, "
        f"{100 * least.least[letter]:.2g}% in layer {least.layer}: scales are far larger than "
        f"absmax / {largest:g}"
    )
    wide = frozenset((fit.layer, letter) for fit in low)
    return [*findings, Finding(text, wide, is_problem=False)]


def _clips(letter: str, fits: Sequence[Fit]) -> bool:
    return any(letter in fit.clipped for fit in fits)


def _kind(shares: list[_Share], largest: float) -> str | None:
    """What all of several scales look like, if they look like something else than scales."""
    pairs = [(share.scale, share.amax / largest) for share in shares if share.amax > 0]
    if len(pairs) < 2 or not all(0 < scale < float("inf") for scale, _ in pairs):
        return None
    factors = [scale / wanted for scale, wanted in pairs]
    is_far = median(max(factor, 1 / factor) for factor in factors) > _FAR
    if is_far and all(1 / _LIKE < scale * wanted < _LIKE for scale, wanted in pairs):
        return f"look like 1/scale ({largest:g} / absmax)"
    if max(factors) < (1 + _NEAR) ** 2 * min(factors) and min(factors) > 1 / _LEAST:
        if abs(median(factors) / largest - 1) < _NEAR:
            return f"look like absmax itself, not divided by {largest:g},"
        return f"are all {median(factors):.3g} times absmax / {largest:g}"
    return None


def _shares(layer: StoredLayer, letter: str, amax: Amax) -> Iterator[_Share]:
    """Each scale of a layer with the measured absmax of the heads that it is for."""
    scales, heads = getattr(layer, letter), amax.get((layer.layer, letter))
    if letter == "q" and not is_usable(scales):
        return  # that is said of the scales themselves
    if scales and heads and len(scales) in (1, len(heads)):
        each = (max(heads),) if len(scales) == 1 else heads
        yield from map(_Share, [layer.layer] * len(scales), scales, each)


def _other_heads(layers: Sequence[StoredLayer], amax: Amax) -> list[Finding]:
    """Scales that cannot be compared, as the statistics have other numbers of heads."""
    wrong = {
        (layer.layer, letter): (len(scales), len(heads))
        for layer in layers
        for letter in "kvq"
        if (scales := getattr(layer, letter))
        and (heads := amax.get((layer.layer, letter)))
        and len(scales) not in (1, len(heads))
    }
    for (index, letter), (count, of_heads) in wrong.items():
        text = (
            f"{letter.upper()} of layer {index} has {count} scales, and the statistics are of "
            f"{of_heads} heads"
        )
        return [Finding(text, frozenset(wrong))]
    return []


def _mistaken(layers: Sequence[StoredLayer], amax: Amax, largest: float) -> str | None:
    """Say whose absmax K's and V's scales fit, if they do not fit their own."""

    def mismatch(letter: str, other: str, step: int) -> float:
        """How far, in most layers, scales are from what was measured `step` layers behind."""
        ratios = [
            max(amax[layer.layer + step, other]) / (largest * max(scales))
            for layer in layers
            if (scales := getattr(layer, letter)) and (layer.layer + step, other) in amax and max(scales) > 0
        ]
        return median(max(r, 1 / r) if r > 0 else float("inf") for r in ratios) if ratios else 0.0

    straight = max(mismatch("k", "k", 0), mismatch("v", "v", 0))
    for (k, v, step), text in _MISTAKES.items():
        if straight > _APART and 0 < max(mismatch("k", k, step), mismatch("v", v, step)) < _ALIKE:
            return text
    return None
