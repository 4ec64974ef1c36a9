"""Verdict on the FP8 cache, advice on what to serve, and `--fail-if`, from the figures."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from calib.choices import REFERENCE
from calib.engines.cache_support import find_support
from calib.engines.catalogue import find_engine
from calib.engines.tokens_that_fit import window_doubts
from calib.errors import InputError
from calib.evaluate.measure import VariantResults
from calib.evaluate.other_text import modality_places, name_clipped_texts
from calib.evaluate.report import BROKEN, Figure, LayerRow, OtherText, Report, Row, Search
from calib.evaluate.statistics import ratio
from calib.files.text import Condition, show_number

# static FP8 that engines load, simplest first, and the advice to use it; other FP8 only explains these
_ADVICE = {
    "none": "Serve without scales (scale 1.0)",
    "tensor": "Use one scale per layer (--strategy tensor)",
    "mse": "Use one scale per layer, clipped where it pays (--observer mse)",
    "attn_head": "Use one scale per KV head (--strategy attn_head)",
}
SERVED = tuple(_ADVICE)
_NO_FINITE_KL = "Serve none of these caches: the KL is not a finite number with any scales that engines load."
_NONE_KEEPS = "Serve none of these caches: with every scale that was measured, most top-1 tokens change."
_LATENT_SCALES = (
    "Engines' own classes use no scales of latents, or use them wrongly: `fp8kv bake` makes 1.0 right; "
    "see docs/latent.md."
)
_NO_BETTER = "no other scales that engines load are measurably better"
# a layer stands out where its error is this many times the median layer's
_OUTLIER = 3.0


def can_be_served(name: str, row: Row) -> bool:
    """Return whether some engine has such a cache; other variants only explain these."""
    has_support = row.cache is not None and bool(find_support(row.cache))
    return row.kind == "given" or name in SERVED or has_support


@dataclass(frozen=True)
class Judgement:
    """Comparison of the variants, and the sentences that follow from it.

    One is measurably better where the interval of the paired difference, document by document, is
    above the noise floor. That says that they differ; the KLs beside it say by how much.
    """

    measured: dict[str, VariantResults]
    rows: dict[str, Row]
    floor: float = 0.0

    def is_worse(self, name: str, rival: str) -> bool:
        """Return whether the KL of `name` is measurably higher; one that is not finite is the highest."""
        own, its = self.measured[name], self.measured[rival]
        if name == rival or not its.is_finite:
            return False
        if not own.is_finite:
            return True
        if not self.rows[name].measurable:
            return False
        pairs = zip(own.documents, its.documents, strict=True)
        sums = np.array([float((a.kl - b.kl).double().sum()) for a, b in pairs])
        return ratio(sums, np.array([float(len(document.kl)) for document in own.documents])).low > self.floor

    def simplest(self, names: Sequence[str]) -> str:
        """Return the first of `names`, which begin with the simplest, that none of them beats."""
        best = min(names, key=lambda name: self.rows[name].kl.value)
        return next((x for x in names if not any(self.is_worse(x, y) for y in names)), best)

    @property
    def is_broken(self) -> bool:
        """Return whether the model itself has no finite figures, so that no cache can be judged."""
        return REFERENCE in self.measured and not self.measured[REFERENCE].is_finite

    @property
    def _rivals(self) -> list[str]:
        """Scales that engines load and that have a KL, simplest first; those of the user exist already."""
        scale_1, *measured = SERVED
        names = (scale_1, *self._user_scales, *measured)
        return [name for name in names if name in self.rows and self.rows[name].kl.is_finite]

    @property
    def _user_scales(self) -> list[str]:
        return [name for name, row in self.rows.items() if row.kind == "given"]

    @cached_property
    def advised(self) -> str | None:
        """The simplest scales, the user's among them, than which none are measurably better."""
        return self.simplest(self._rivals) if self._rivals else None

    @property
    def subject(self) -> str | None:
        """The variant that the verdict is about: the user's scales, or else what is advised."""
        variants = [measured.variant for measured in self.measured.values()]
        fp8 = [v.name for v in variants if v.scales is not None and v.is_whole_cache]
        return next(iter([*self._user_scales, *filter(None, [self.advised]), *fp8]), None)

    def verdict(self, texts: Sequence[OtherText] = ()) -> str:
        """Judge the subject in sentences; name those of the other `texts` on which its scales clip."""
        name = self.subject
        if name is None:
            return "No FP8 KV cache was measured."
        if self.is_broken:
            return f"{BROKEN[0].upper()}{BROKEN[1:]}: {self.rows[REFERENCE].not_finite}."
        label, row = self._label(name), self.rows[name]
        kls = ", ".join(f"{show_number(x.kl.value)} {place}" for place, x in modality_places(texts, name))
        sentences = [
            f"FP8 KV cache, {label}: {_figures(row, self.floor)}",
            kls and f"the KL is {kls}",
            name_clipped_texts(texts, name, row, label),
            *self._comparison(name),
        ]
        return " ".join(f"{text[0].upper()}{text[1:]}." for text in sentences if text)

    def advise(self, search: Search | None, config: Any = None) -> list[str]:
        """Say what to serve, from the figures alone; and what vLLM does not, of a model with `config`."""
        best = self.advised
        if self.is_broken:
            return ["Mend the model's weights first."]
        if best is None:
            return [_NO_FINITE_KL] if any(name in self.rows for name in SERVED) else []
        scales = self.measured[best].variant.scales
        label = self._label(best)
        if scales and scales.latent and best != "none":
            lines = [_LATENT_SCALES]
        elif self.rows[best].top1.high < 0.5:
            lines = [_NONE_KEEPS]
        elif len(self._rivals) == 1:
            lines = [f"No other scales were measured that {label} could be compared with."]
        else:
            lines = [f"{_ADVICE.get(best, f'Keep the {label}')}: {_NO_BETTER}."]
        outliers = _outliers(self.rows[best].layers)
        if search is not None:
            lines.append(_search_line(search))
        elif outliers:
            names = ", ".join(map(str, outliers))
            subject, pronoun = ("Layers {} have", "them") if len(outliers) > 1 else ("Layer {} has", "it")
            lines.append(
                f"{subject.format(names)} more than {_OUTLIER:.0f} times the median layer's error: "
                f"vLLM keeps {pronoun} in 16 bits with {find_engine('vllm').skip_argument(outliers)}"
            )
        return [*lines, *window_doubts(config, search.skipped if search else outliers)]

    def _label(self, name: str) -> str:
        row = self.rows[name]
        own = "scale 1.0" if name == "none" else row.description
        return f"scales of '{name}'" if row.kind == "given" else own

    def _comparison(self, name: str) -> list[str]:
        """Compare with the other scales that engines load; name what is advised first."""
        rivals, best = [rival for rival in self._rivals if rival != name], self.advised
        better = [rival for rival in rivals if self.is_worse(name, rival)]
        if best is not None and best in better:
            return [self._measurably("better", best)]
        if better:
            least = min(better, key=lambda rival: self.rows[rival].kl.value)
            ending = f", but not measurably better than {self._label(best)}" if best else ""
            return [f"{self._measurably('better', least)}{ending}"]
        if not rivals or not self.measured[name].is_finite:
            return []
        if "none" in self.rows and self.is_worse("none", name):
            return [_NO_BETTER, self._measurably("worse", "none")]
        if best is None or best == name:
            return [_NO_BETTER]
        return [_NO_BETTER, f"{self._label(best)} is not measurably worse"]

    def _measurably(self, comparative: str, name: str) -> str:
        row = self.rows[name]
        verb = "are" if row.kind == "given" else "is"
        return f"{self._label(name)} {verb} measurably {comparative} (KL {show_number(row.kl.value)})"


def _figures(row: Row, floor: float) -> str:
    kl = row.kl
    if not kl.is_finite:
        return f"it cannot be served: {row.not_finite or 'the KL is not a finite number'}"
    if not row.measurable:
        return (
            f"it does not differ measurably from the model's own cache (KL {kl.value:.2g} nats, "
            f"noise floor {show_number(floor)})"
        )
    return (
        f"the KL is {kl.value:.2g} nats [{kl.low:.2g}, {kl.high:.2g}], perplexity changes by "
        f"{show_number(row.ppl_change.value, '{:+.2%}')}, and {row.top1.value:.1%} of top-1 tokens agree"
    )


def _search_line(search: Search) -> str:
    budget = f"KL {search.budget:.2g} with '{search.variant}'"
    if not math.isfinite(search.kl):
        return f"{budget} is not met: the KL is not a finite number."
    if not search.skipped:
        return f"{budget} is met with every layer in FP8 (KL {search.kl:.2g})."
    count = f"{len(search.skipped)} of {len(search.kl_alone)} layers"
    argument, indices = find_engine("vllm").skip_argument(search.skipped), ",".join(map(str, search.skipped))
    return (
        f"{budget} is met (KL {search.kl:.2g}) with {count} in 16 bits, instead of KL "
        f"{show_number(search.kl_of_all)} with none: fp8kv convert --to vllm --skip-layers {indices}, "
        f"or {argument}"
    )


def _outliers(layers: list[LayerRow]) -> list[int]:
    errors = {layer.layer_idx: float(np.mean(layer.rel_rms)) for layer in layers}
    median = float(np.median(list(errors.values()))) if errors else 0.0
    return [idx for idx, error in errors.items() if error > _OUTLIER * median]


def check_variant(condition: Condition, variants: Iterable[str]) -> None:
    """Refuse a condition of `--fail-if` that names none of the `variants` that are measured."""
    names = [name for name in dict.fromkeys(variants) if name != REFERENCE]
    if condition.variant not in (None, *names):
        raise InputError(
            f"--fail-if '{condition.text}': no variant '{condition.variant}'; there are {', '.join(names)}"
        )


def failures(condition: Condition, report: Report, subjects: list[str]) -> list[str]:
    """List where the condition is met: by the variant it names, or `subjects`, or one of their modalities.

    Raises an InputError where its figure was not measured.
    """
    check_variant(condition, report.variants)
    names = subjects if condition.variant is None else [condition.variant]
    if not names:
        raise InputError(f"--fail-if '{condition.text}' names no variant, and none was measured")
    lines = []
    for name in names:
        figure: Figure | None = getattr(report.variants[name], condition.metric)
        if figure is None:
            raise InputError(
                f"--fail-if '{condition.text}': {condition.metric} was not measured for '{name}'"
            )
        places = modality_places(report.other_texts, name)
        figures = {"": figure} | {f" {x}": getattr(row, condition.metric, None) for x, row in places}
        values = {place: measured.value for place, measured in figures.items() if measured}
        for place, value in values.items():
            # a figure that is not finite meets every condition
            is_finite = math.isfinite(value)
            if not is_finite or condition.compare(value, condition.limit):
                shown = f"{value:.4g}" if is_finite else "not a finite number"
                lines.append(f"{name}: {condition.metric}{place} is {shown} ({condition.text})")
    return lines
