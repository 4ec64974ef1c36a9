"""The scales of two directories beside each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.files.cache_type import nvfp4_convention
from calib.files.stored_scales import StoredLayer, StoredScales, Values, read_scales
from calib.files.text import show_layers
from calib.same_model.check import config_difference, known_config

Pairs = list[tuple[StoredLayer, StoredLayer]]


@dataclass(frozen=True)
class ScaleComparison:
    """The layers of two directories A and B, and what keeps the ratios from saying what they seem to."""

    pairs: Pairs  # a layer that one of them lacks is empty there
    drafts: Pairs  # the same of layers that draft tokens (MTP)
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `fp8kv compare --json` prints."""
        layers, drafts = map(_ratios, (self.pairs, self.drafts))
        return {"layers": layers, "drafts": drafts, "notes": self.notes}


def compare_scales(a: Path, b: Path) -> ScaleComparison:
    """Compare the scales of `a` and `b`; raise an InputError where they have no layer in common."""
    scales = {"A": read_scales(a), "B": read_scales(b)}
    parts = [stored.layers for stored in scales.values()] + [stored.drafts for stored in scales.values()]
    in_a, in_b, *drafts = ({layer.layer: layer for layer in part} for part in parts)
    if not in_a.keys() & in_b.keys():
        raise InputError(f"'{a}' and '{b}' have scales of no common layer")
    notes = [f"{name}: {problem}" for name, stored in scales.items() for problem in stored.problems]
    for name, layers in (("A", in_a.keys() - in_b.keys()), ("B", in_b.keys() - in_a.keys())):
        if layers:
            notes.append(f"only {name} has scales of {show_layers(sorted(layers))}")
    if difference := config_difference(known_config(a), known_config(b)):
        notes.append(f"A and B are of other models: {difference[0]} and {difference[1]}")
    kind_a, kind_b = map(_describe, scales.values())
    if kind_a != kind_b:
        notes.append(f"A holds {kind_a}, B {kind_b}: equal absmax gives other numbers")
    return ScaleComparison(_pairs(in_a, in_b), _pairs(*drafts), notes)


def _pairs(a: Mapping[int, StoredLayer], b: Mapping[int, StoredLayer]) -> Pairs:
    return [(a.get(i, StoredLayer(i)), b.get(i, StoredLayer(i))) for i in sorted(a.keys() | b.keys())]


def _ratios(pairs: Pairs) -> list[dict[str, Any]]:
    return [{"layer": a.layer} | {x: ratio(getattr(a, x), getattr(b, x)) for x in "kvq"} for a, b in pairs]


def ratio(a: Values | None, b: Values | None) -> tuple[float, float] | None:
    """Return the least and the largest of B / A over the heads; one scale stands for all heads."""
    if not a or not b or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    pairs = zip(a * (len(b) if len(a) == 1 else 1), b * (len(a) if len(b) == 1 else 1), strict=True)
    ratios = [second / first if first else float("inf") for first, second in pairs]
    return min(ratios), max(ratios)


def _describe(scales: StoredScales) -> str:
    nvfp4 = nvfp4_convention(scales.directory)
    return f"values of an NVFP4 cache, {nvfp4}" if nvfp4 else f"scales of {scales.fp8_dtype}"
