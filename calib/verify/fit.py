"""How scales fit the absmax that was measured: too small, too large, of another kind."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from calib.choices import FP8Name
from calib.scalefiles.calibrations import Amax
from calib.scalefiles.fp8_type import FP8_MAX, FP8_SMALLEST
from calib.scalefiles.reading import FoundLayer, is_usable, these

# rounding to bfloat16 takes 0.4 %
_ROUNDING = 1.005
_NEAR = 0.02
# headroom is 16 at most
_LEAST = 1 / (16 * _ROUNDING)
# other text has another absmax
_LIKE = 1.5
_FAR = 4.0


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


class _Share(NamedTuple):
    """One scale, and the absmax of what shares it."""

    layer: int
    scale: float
    amax: float


def compare(layers: Sequence[FoundLayer], amax: Amax, limits: Limits) -> list[Fit]:
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
    layers: Sequence[FoundLayer], fits: Sequence[Fit], amax: Amax, largest: float
) -> tuple[list[str], list[str]]:
    """Problems that the comparison shows, and warnings, one line each."""
    problems, warnings = _other_heads(layers, amax), list[str]()
    clipped = [fit for fit in fits if fit.clipped]
    if swapped := _looks_swapped(layers, amax, largest):
        problems.append("K scales fit V's measured absmax and V scales K's: they are swapped")
    elif clipped:
        worst = max(clipped, key=lambda fit: max(fit.used.values()))
        letter = max(worst.used, key=lambda letter: worst.used[letter])
        problems.append(
            f"{len(clipped)} layers clip what was measured, layer {worst.layer} the most: its "
            f"{letter.upper()} is {worst.used[letter]:.2f} times what its scale can hold"
        )
    used = [value for fit in fits for value in fit.used.values()]
    for factor, what in ((2.0, "half"), (0.5, "twice")):
        if used and all(abs(value / factor - 1) < _NEAR for value in used):
            problems.append(
                f"every scale is {what} of absmax / {largest:g}, as if made for another FP8 "
                "type: files hold scales for e4m3fn (448) unless they name another"
            )
    for letter in "" if swapped else "kvq":
        shares = [share for layer in layers for share in _shares(layer, letter, amax)]
        wrong, doubtful = _judge_range(letter, shares, fits, largest)
        problems += wrong
        warnings += doubtful
    absent = {fit.layer for fit in fits} ^ {layer for layer, _ in amax}
    if absent:
        problems.append(f"layer {min(absent)} is only in the scales, or only in the statistics")
    return problems, warnings


def contradictions(layers: Sequence[FoundLayer], amax: Amax, fp8_dtype: FP8Name) -> list[str]:
    """What measured absmax says against FP8 scales, problems and warnings alike."""
    limits = Limits(FP8_MAX[fp8_dtype], FP8_SMALLEST[fp8_dtype])
    problems, warnings = judge(layers, compare(layers, amax, limits), amax, limits.largest)
    return problems + warnings


def _judge_range(
    letter: str, shares: list[_Share], fits: Sequence[Fit], largest: float
) -> tuple[list[str], list[str]]:
    """Problems and warnings where scales are too large, or of another kind."""
    name, problems = letter.upper(), list[str]()
    zero = [fit.layer for fit in fits if letter in fit.zero]
    low = [fit for fit in fits if fit.is_low(letter) and fit.layer not in zero]
    kind = _kind(shares, largest) if zero or low or _clips(letter, fits) else None
    if kind:
        indices = sorted({share.layer for share in shares})
        problems.append(f"{name} scales {kind} in {these(indices)}: a writer's mistake")
    if zero:
        # of its heads the one with the largest scale
        worst = max(share for share in shares if share.layer == zero[0])
        problems.append(
            f"{name} becomes all zeros in {these(zero)}: scales are too large, {worst.scale:.3g} "
            f"in layer {zero[0]}, where absmax / {largest:g} is {worst.amax / largest:.3g}"
        )
    if not low or kind:
        return problems, []
    least = min(low, key=lambda fit: fit.least[letter])
    warning = (
        f"{name} uses under 1/16 of the FP8 range in {these([fit.layer for fit in low])}, "
        f"{100 * least.least[letter]:.2g}% in layer {least.layer}: scales are far larger than "
        f"absmax / {largest:g}"
    )
    return problems, [warning]


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


def _shares(layer: FoundLayer, letter: str, amax: Amax) -> Iterator[_Share]:
    """Each scale of a layer with the measured absmax of the heads that it is for."""
    scales, heads = getattr(layer, letter), amax.get((layer.layer, letter))
    if letter == "q" and not is_usable(scales):
        return  # that is said of the scales themselves
    if scales and heads and len(scales) in (1, len(heads)):
        each = (max(heads),) if len(scales) == 1 else heads
        yield from map(_Share, [layer.layer] * len(scales), scales, each)


def _other_heads(layers: Sequence[FoundLayer], amax: Amax) -> list[str]:
    """Scales that cannot be compared, as the statistics have other numbers of heads."""
    for layer in layers:
        for letter in "kvq":
            scales, heads = getattr(layer, letter) or (), amax.get((layer.layer, letter), ())
            if scales and heads and len(scales) not in (1, len(heads)):
                return [
                    f"{letter.upper()} of layer {layer.layer} has {len(scales)} scales, and the "
                    f"statistics are of {len(heads)} heads"
                ]
    return []


def _looks_swapped(layers: Sequence[FoundLayer], amax: Amax, fp8_max: float) -> bool:
    def mismatch(letter: str, other: str) -> float:
        ratios = [
            max(amax[layer.layer, other]) / (fp8_max * max(scales))
            for layer in layers
            if (scales := getattr(layer, letter))
            and (layer.layer, other) in amax
            and max(scales) > 0
        ]
        return median(max(r, 1 / r) if r > 0 else float("inf") for r in ratios) if ratios else 0.0

    straight = max(mismatch("k", "k"), mismatch("v", "v"))
    crossed = max(mismatch("k", "v"), mismatch("v", "k"))
    return straight > 2 and 0 < crossed < 1 + _NEAR
