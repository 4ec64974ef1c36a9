"""Verdict in one sentence, advice on what to serve, and `--fail-if`, from the figures."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calib.choices import REFERENCE
from calib.engines.cache_support import find_support
from calib.engines.catalogue import find_engine
from calib.errors import InputError
from calib.evaluate.measure import Measured
from calib.evaluate.other_text import clipping
from calib.evaluate.report import Figure, LayerRow, OtherText, Report, Row, Search
from calib.evaluate.statistics import ratio
from calib.files.text import Condition, show_number

# what engines can load, simplest first, and the advice to use it
_ADVICE = {
    "none": "serve without scales (scale 1.0)",
    "tensor": "use one scale per layer (--strategy tensor)",
    "mse": "use one scale per layer, clipped where it pays (--observer mse)",
    "attn_head": "use one scale per KV head (--strategy attn_head)",
}
SERVED = tuple(_ADVICE)
_NOTHING = "serve none of these caches: the KL is not a finite number with any scales that engines load"
_OF_LATENTS = (
    "engines' own classes use no scales of latents, or wrongly: `fp8kv bake` makes 1.0 right; see "
    "docs/latent.md"
)
_BEST = "no other scales that engines load are measurably better"
# a layer stands out where its error is this many times the median layer's
_OUTLIER = 3.0


def can_be_served(name: str, row: Row) -> bool:
    """Whether a variant is a cache that some engine has, not one that only explains others."""
    is_offered = row.cache is not None and bool(find_support(row.cache))
    return row.kind == "given" or name in SERVED or is_offered


@dataclass(frozen=True)
class Judgement:
    """What is measurably better than what, and the sentences that follow from it.

    Measurably: the interval of the paired difference, document by document, is above the noise
    floor. It says that there is a difference; how large it is the KLs beside it say.
    """

    measured: dict[str, Measured]
    rows: dict[str, Row]
    floor: float = 0.0

    def is_worse(self, one: str, other: str) -> bool:
        """Whether the KL of `one` is measurably higher; what is no number is the highest."""
        here, there = self.measured[one], self.measured[other]
        if one == other or not there.is_finite:
            return False
        if not here.is_finite:
            return True
        if not self.rows[one].measurable:
            return False
        pairs = zip(here.documents, there.documents, strict=True)
        sums = np.array([float((a.kl - b.kl).double().sum()) for a, b in pairs])
        counts = np.array([float(len(each.kl)) for each in here.documents])
        return ratio(sums, counts).low > self.floor

    def simplest(self, names: Sequence[str]) -> str:
        """The first of `names`, which begin with the simplest, that none of them beats."""
        best = min(names, key=lambda name: self.rows[name].kl.value)
        return next((x for x in names if not any(self.is_worse(x, y) for y in names)), best)

    @property
    def _rivals(self) -> list[str]:
        """What is served and has a KL, simplest first: scales given are there already."""
        first, *others = SERVED
        given = [name for name, row in self.rows.items() if row.kind == "given"]
        return [x for x in (first, *given, *others) if x in self.rows and self.rows[x].kl.is_finite]

    @cached_property
    def advised(self) -> str | None:
        """The simplest scales, given ones among them, than which none are measurably better."""
        return self.simplest(self._rivals) if self._rivals else None

    @property
    def subject(self) -> str | None:
        """The variant that the verdict is about: what the user gave, or what is advised."""
        given = [name for name, row in self.rows.items() if row.kind == "given"]
        fp8 = {n: m.variant for n, m in self.measured.items() if m.variant.scales is not None}
        whole = [name for name, variant in fp8.items() if variant.is_whole_cache]
        return next(iter([*given, *filter(None, [self.advised]), *whole]), None)

    def verdict(self, others: Sequence[OtherText] = ()) -> str:
        """One sentence on the subject, with the `others`, texts on which its scales clip."""
        name = self.subject
        if name is None:
            return "No FP8 KV cache was measured."
        label, row = self._label(name), self.rows[name]
        said = f"{_figures(row, self.floor)}{clipping(others, name, row, label)}"
        return f"FP8 KV cache, {label}: {said}{self._beside(name)}."

    def advise(self, search: Search | None) -> list[str]:
        """What to serve, from the figures alone."""
        best = self.advised
        if best is None:
            return [_NOTHING] * any(name in self.rows for name in SERVED)
        scales = self.measured[best].variant.scales
        lines = [_OF_LATENTS if scales and scales.latent and best != "none" else self._use(best)]
        outliers = _outliers(self.rows[best].layers)
        if search is not None:
            lines.append(_search_line(search))
        elif outliers:
            lines.append(
                f"layers {', '.join(map(str, outliers))} have more than {_OUTLIER:.0f} times the "
                f"median layer's error: vLLM keeps them in 16 bits with {skip_argument(outliers)}"
            )
        return lines

    def _use(self, best: str) -> str:
        """The advice to serve with the scales `best`, and why."""
        if len(self._rivals) == 1:
            return f"nothing was measured to compare {self._label(best)} with: no other scales"
        return f"{_ADVICE.get(best, f'keep the {self._label(best)}')}: {_BEST}"

    def _label(self, name: str) -> str:
        row = self.rows[name]
        own = "scale 1.0" if name == "none" else row.what
        return f"scales of '{name}'" if row.kind == "given" else own

    def _beside(self, name: str) -> str:
        """How the other scales that engines load compare; what is advised is named first."""
        others, best = [each for each in self._rivals if each != name], self.advised
        better = [each for each in others if self.is_worse(name, each)]
        if better:
            least = min(better, key=lambda each: self.rows[each].kl.value)
            said = self._measurably("better", best if best in better else least)
            no_better = f", but not measurably better than {self._label(best)}" if best else ""
            return f"; {said}{'' if best in better else no_better}"
        if not others or not self.measured[name].is_finite:
            return ""
        said = f"; {_BEST}"
        if "none" in self.rows and self.is_worse("none", name):
            return f"{said}, {self._measurably('worse', 'none')}"
        return said if best in (None, name) else f"{said}, {self._label(best)} is not measurably worse"

    def _measurably(self, better: str, name: str) -> str:
        row = self.rows[name]
        be = "are" if row.kind == "given" else "is"
        return f"{self._label(name)} {be} measurably {better} (KL {show_number(row.kl.value)})"


def _figures(row: Row, floor: float) -> str:
    kl = row.kl
    if not kl.is_finite:
        return f"not to be served: {row.not_finite or 'the KL is not a finite number'}"
    if not row.measurable:
        return (
            f"no measurable difference from the model's own cache (KL {kl.value:.2g} nats, "
            f"noise floor {show_number(floor)})"
        )
    return (
        f"KL {kl.value:.2g} nats [{kl.low:.2g}, {kl.high:.2g}], "
        f"perplexity {show_number(row.ppl_change.value, '{:+.2%}')}, top-1 {row.top1.value:.1%}"
    )


def skip_argument(layers: Iterable[int]) -> str:
    """Return the argument with which vLLM keeps `layers` in 16 bits."""
    return f"{find_engine('vllm').skip_flag} {' '.join(map(str, layers))}"


def _search_line(search: Search) -> str:
    budget = f"KL {search.budget:.2g} with '{search.variant}'"
    if not math.isfinite(search.kl):
        return f"{budget} is not met: the KL is not a finite number"
    if not search.skipped:
        return f"{budget} is met with every layer in FP8 (KL {search.kl:.2g})"
    count = f"{len(search.skipped)} of {len(search.kl_alone)} layers"
    return (
        f"{budget} is met (KL {search.kl:.2g}) with {count} in 16 bits, instead of KL "
        f"{show_number(search.kl_of_all)} with none: {skip_argument(search.skipped)}"
    )


def _outliers(layers: list[LayerRow]) -> list[int]:
    errors = {layer.layer_idx: float(np.mean(layer.rel_rms)) for layer in layers}
    median = float(np.median(list(errors.values()))) if errors else 0.0
    return [idx for idx, error in errors.items() if error > _OUTLIER * median]


def check_variant(condition: Condition, measured: Iterable[str]) -> None:
    """Refuse a condition of `--fail-if` that names a variant that is not `measured`."""
    known = [name for name in dict.fromkeys(measured) if name != REFERENCE]
    if condition.variant not in (None, *known):
        raise InputError(
            f"--fail-if '{condition.text}': no variant '{condition.variant}'; there are {', '.join(known)}"
        )


def failures(condition: Condition, report: Report, subjects: list[str]) -> list[str]:
    """One line for each variant that meets the condition; it names one, or is about `subjects`."""
    check_variant(condition, report.variants)
    names = subjects if condition.variant is None else [condition.variant]
    if not names:
        raise InputError(f"--fail-if '{condition.text}' names no variant, and none was measured")
    found = []
    for name in names:
        figure: Figure | None = getattr(report.variants[name], condition.metric)
        if figure is None:
            raise InputError(
                f"--fail-if '{condition.text}': {condition.metric} was not measured for '{name}'"
            )
        value = figure.value
        # what is no number meets every condition
        if not math.isfinite(value) or condition.compare(value, condition.limit):
            said = f"{value:.4g}" if math.isfinite(value) else "not a finite number"
            found.append(f"{name}: {condition.metric} is {said} ({condition.text})")
    return found
