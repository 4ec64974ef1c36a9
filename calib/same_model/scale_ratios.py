"""The scales of two directories beside each other."""

from dataclasses import dataclass
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.files.cache_type import nvfp4_convention
from calib.files.stored_scales import StoredLayer, StoredScales, Values, read_scales
from calib.files.text import show_layers, show_number
from calib.same_model.check import (
    compare_weights,
    config_difference,
    known_config,
    scales_facts,
    settings_difference,
)


@dataclass(frozen=True)
class ScaleComparison:
    """The layers of two directories A and B, and what keeps the ratios from saying what they seem to."""

    pairs: list[tuple[StoredLayer, StoredLayer]]  # a layer that one of them lacks is empty there
    notes: list[str]

    @property
    def summary(self) -> str:
        """Count the layers of both whose scales differ, and name the largest difference."""
        ratios = {
            (a.name, letter): max(ends, key=_distance)
            for a, b in self.pairs
            for letter in "kvq"
            if (ends := ratio(a.values(letter), b.values(letter)))
        }
        if not ratios:
            return "no scales of A and B can be compared"
        count, wrong = len({name for name, _ in ratios}), {name for (name, _), x in ratios.items() if x != 1}
        layers = f"{count} layer{'' if count == 1 else 's'}"
        single = sum(bool(a.values(part)) != bool(b.values(part)) for a, b in self.pairs for part in "kv")
        if not wrong and single:
            return f"{single} of the scales of K and V {'is' if single == 1 else 'are'} in A or B alone"
        if not wrong:
            return f"all scales are equal, of {layers}"
        name, letter = worst = max(ratios, key=lambda place: _distance(ratios[place]))
        factor = f"is {show_number(ratios[worst], '{:.4g}')}"
        if factor == "is 1":  # four digits do not show it
            factor = f"differs from 1 by {abs(ratios[worst] - 1):.2g}"
        where = f"{len(wrong)} of {layers}, most in layer {name}"
        return f"scales differ in {where}: {letter.upper()} of B / A {factor}"

    def to_json(self) -> dict[str, Any]:
        """Return the object that `fp8kv compare --json` prints."""
        ratios = ({x: ratio(getattr(a, x), getattr(b, x)) for x in "kvq"} for a, b in self.pairs)
        layers = [{"layer": a.name, **pair} for (a, _), pair in zip(self.pairs, ratios, strict=True)]
        return {"layers": layers, "notes": self.notes}


def compare_scales(a: Path, b: Path) -> ScaleComparison:
    """Compare the scales of `a` and `b`; raise an InputError where they have no layer in common."""
    scales = {"A": read_scales(a), "B": read_scales(b)}
    in_a, in_b = ({(x.is_draft, x.layer): x for x in (*s.layers, *s.drafts)} for s in scales.values())
    if not in_a.keys() & in_b.keys():
        raise InputError(f"'{a}' and '{b}' have scales of no common layer")
    keys = sorted(in_a.keys() | in_b.keys())
    empty = {(is_draft, i): StoredLayer(i, is_draft=is_draft) for is_draft, i in keys}
    notes = [f"{name}: {problem}" for name, stored in scales.items() for problem in stored.problems]
    for name, layers in (("A", in_a.keys() - in_b.keys()), ("B", in_b.keys() - in_a.keys())):
        if layers:
            names = [empty[key].name for key in sorted(layers)]
            notes.append(f"only {name} has scales of {show_layers(names)}")
    notes += _notes_on_models(a, b)
    kind_a, kind_b = map(_describe, scales.values())
    if kind_a != kind_b:
        notes.append(f"A holds {kind_a}, B {kind_b}: equal absmax gives other numbers")
    return ScaleComparison([(in_a.get(key, none), in_b.get(key, none)) for key, none in empty.items()], notes)


def _notes_on_models(a: Path, b: Path) -> list[str]:
    """Say that A and B are of other models or weights, as far as their files know."""
    values = config_difference(known_config(a), known_config(b))
    try:
        facts_a, facts_b = scales_facts(a), scales_facts(b)
        if values := values or settings_difference(facts_a, facts_b):
            return [f"A and B are of other models: {values[0]} and {values[1]}"]
        prints = [(facts.fingerprints or {}).get("weights") for facts in (facts_a, facts_b)]
        if None not in prints and prints[0] == prints[1]:  # marks would import torch
            return []
        difference = compare_weights(facts_a, facts_b)
    except InputError as error:
        return [f"the weights of A and B were not compared: {error}"]
    return [f"A and B are of models with other weights: {difference}"] if difference else []


def ratio(a: Values | None, b: Values | None) -> tuple[float, float] | None:
    """Return the least and the largest of B / A over the heads; one scale stands for all heads."""
    if not a or not b or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    pairs = zip(a * (len(b) if len(a) == 1 else 1), b * (len(a) if len(b) == 1 else 1), strict=True)
    ratios = [second / first if first else inf for first, second in pairs]
    return (nan, nan) if any(map(isnan, ratios)) else (min(ratios), max(ratios))


def _distance(factor: float) -> float:
    """Return how far a factor is from 1, up or down; infinity for what is not a positive number."""
    return max(factor, 1 / factor) if factor > 0 else inf


def _describe(scales: StoredScales) -> str:
    nvfp4 = nvfp4_convention(scales.directory)
    return f"values of an NVFP4 cache, {nvfp4}" if nvfp4 else f"scales of {scales.fp8_dtype}"
