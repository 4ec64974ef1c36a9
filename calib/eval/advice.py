"""Verdict in one sentence, advice on what to serve, and `--fail-if`, from the figures."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from calib.caches.types import cache_type
from calib.choices import REFERENCE
from calib.errors import InputError
from calib.eval.found import Search
from calib.eval.reader import Measured
from calib.eval.schema import Figure, LayerRow, Report, Row
from calib.eval.statistics import estimate
from calib.text import Condition, show_number

# what engines can load, and the advice to use it
_ADVICE = {
    "none": "uncalibrated (scale 1.0) is as good as any scales on this text",
    "tensor": "use one scale per layer (--strategy tensor)",
    "mse": "use one scale per layer, clipped where it pays (--observer mse)",
    "attn_head": "use one scale per KV head (--strategy attn_head)",
}
_NOTHING = (
    "serve none of these caches: the KL is not a finite number with any scales that engines load"
)
_OF_LATENTS = (
    "engines' own classes use no scales of latents, or wrongly: `fp8kv bake` makes 1.0 right; see "
    "docs/latent.md"
)
SERVED = tuple(_ADVICE)


def can_be_served(name: str, row: Row) -> bool:
    """Whether a variant is a cache that some engine has, not one that only explains others."""
    is_offered = row.cache is not None and bool(cache_type(row.cache).servings)
    return row.kind == "given" or name in SERVED or is_offered


# a layer stands out where its error is this many times the median layer's
_OUTLIER = 3.0


def advised(measured: dict[str, Measured], rows: dict[str, Row]) -> str | None:
    """The simplest scales that engines load and that are no worse than the best of them."""
    served = [name for name in SERVED if name in rows and rows[name].kl.is_finite]
    if not served:
        return None
    return simplest(served, measured, rows)


def simplest(names: Sequence[str], measured: dict[str, Measured], rows: dict[str, Row]) -> str:
    """The first of `names`, which begin with the simplest, no worse than the best of them."""
    best = min(names, key=lambda name: rows[name].kl.value)
    return next(name for name in names if not is_worse(measured[name], measured[best]))


def subject(measured: dict[str, Measured], rows: dict[str, Row]) -> str | None:
    """The variant that the verdict is about: what the user gave, or what is advised."""
    given = [name for name, row in rows.items() if row.kind == "given"]
    fp8 = {name: m.variant for name, m in measured.items() if m.variant.scales is not None}
    whole = [name for name, variant in fp8.items() if variant.generates]
    return next(iter([*given, *filter(None, [advised(measured, rows)]), *whole]), None)


def advise(measured: dict[str, Measured], rows: dict[str, Row], found: Search | None) -> list[str]:
    """What to serve, from the figures alone."""
    simplest = advised(measured, rows)
    if simplest is None:
        return [_NOTHING] * any(name in rows for name in SERVED)
    scales = measured[simplest].variant.scales
    lines = [_OF_LATENTS if scales and scales.latent and simplest != "none" else _ADVICE[simplest]]
    outliers = _outliers(rows[simplest].layers)
    if found is not None:
        lines.append(_found(found))
    elif outliers:
        lines.append(
            f"layers {', '.join(map(str, outliers))} have more than {_OUTLIER:.0f} times the "
            f"median layer's error: vLLM keeps them in 16 bits with {skip_argument(outliers)}"
        )
    return lines


def skip_argument(layers: Iterable[int]) -> str:
    """What tells vLLM to keep `layers` in 16 bits."""
    return f"--kv-cache-dtype-skip-layers {' '.join(map(str, layers))}"


def _found(searched: Search) -> str:
    budget = f"KL {searched.budget:.2g} with '{searched.variant}'"
    if not math.isfinite(searched.kl):
        return f"{budget} is not met: the KL is not a finite number"
    if not searched.skipped:
        return f"{budget} is met with every layer in FP8 (KL {searched.kl:.2g})"
    count = f"{len(searched.skipped)} of {len(searched.kl_alone)} layers"
    return (
        f"{budget} is met (KL {searched.kl:.2g}) with {count} in 16 bits, instead of KL "
        f"{show_number(searched.kl_of_all)} with none: {skip_argument(searched.skipped)}"
    )


def verdict(measured: dict[str, Measured], rows: dict[str, Row], floor: float) -> str:
    """One sentence on the subject."""
    name = subject(measured, rows)
    if name is None:
        return "No FP8 KV cache was measured."
    label = f"scales of '{name}'" if rows[name].kind == "given" else rows[name].what
    return f"FP8 KV cache, {label}: {_figures(rows[name], floor)}{_beside(name, measured, rows)}."


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


def _beside(name: str, measured: dict[str, Measured], rows: dict[str, Row]) -> str:
    """How the other scales that engines load compare."""
    others = [each for each in SERVED if each in rows and each != name]
    better = [each for each in others if is_worse(measured[name], measured[each])]
    if better:
        best = min(better, key=lambda each: rows[each].kl.value)
        return f"; {rows[best].what} is measurably better (KL {rows[best].kl.value:.2g})"
    if not measured[name].is_finite:
        return ""
    found = "; no other scales that engines load are measurably better" if others else ""
    if "none" in others and is_worse(measured["none"], measured[name]):
        found += f", scale 1.0 is measurably worse (KL {show_number(rows['none'].kl.value)})"
    return found


def is_worse(one: Measured, other: Measured) -> bool:
    """Whether the KL is higher by more than chance, document by document."""
    if one is other or not other.is_finite:
        return False
    if not one.is_finite:
        return True
    pairs = zip(one.documents, other.documents, strict=True)
    differences = [(a.kl - b.kl).double().numpy() for a, b in pairs]
    return estimate(differences).low > 0


def _outliers(layers: list[LayerRow]) -> list[int]:
    errors = {layer.layer_idx: float(np.mean(layer.rel_rms)) for layer in layers}
    median = float(np.median(list(errors.values()))) if errors else 0.0
    return [idx for idx, error in errors.items() if error > _OUTLIER * median]


def check_variant(condition: Condition, measured: Iterable[str]) -> None:
    """Refuse a condition of `--fail-if` that names a variant that is not `measured`."""
    known = [name for name in dict.fromkeys(measured) if name != REFERENCE]
    if condition.variant not in (None, *known):
        raise InputError(
            f"--fail-if '{condition.text}': no variant '{condition.variant}'; there are "
            f"{', '.join(known)}"
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
