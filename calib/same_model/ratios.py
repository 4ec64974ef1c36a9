"""The scales of two directories beside each other."""

from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.files.cache_type import nvfp4_convention
from calib.files.stored_scales import StoredLayer, StoredScales, Values, read_scales
from calib.files.text import show_layers
from calib.same_model.check import config_difference, known_config

Pairs = list[tuple[StoredLayer, StoredLayer]]


def compare_scales(a: Path, b: Path) -> Pairs:
    """The scales of `a` and `b` layer by layer; a layer that one of them lacks is empty there."""
    first, second = ({layer.layer: layer for layer in read_scales(path).layers} for path in (a, b))
    if not first.keys() & second.keys():
        raise InputError(f"'{a}' and '{b}' have scales of no common layer")
    indices = sorted(first.keys() | second.keys())
    return [(first.get(i, StoredLayer(i)), second.get(i, StoredLayer(i))) for i in indices]


def compare_notes(a: Path, b: Path) -> list[str]:
    """What keeps the ratios of two directories from saying what they seem to, one line each."""
    found = [read_scales(path) for path in (a, b)]
    kinds = [_kind(each) for each in found]
    notes = [
        f"{name}: {problem}" for name, each in zip("AB", found, strict=True) for problem in each.problems
    ]
    layers = [{layer.layer for layer in each.layers} for each in found]
    for name, only in (("A", layers[0] - layers[1]), ("B", layers[1] - layers[0])):
        if only:
            notes.append(f"only {name} has scales of {show_layers(sorted(only))}")
    if difference := config_difference(known_config(a), known_config(b)):
        notes.append(f"A and B are of other models: {difference[0]} and {difference[1]}")
    if kinds[0] != kinds[1]:
        notes.append(f"A holds {kinds[0]}, B {kinds[1]}: equal absmax gives other numbers")
    return notes


def _kind(found: StoredScales) -> str:
    nvfp4 = nvfp4_convention(found.directory)
    return f"values of an NVFP4 cache, {nvfp4}" if nvfp4 else f"scales of {found.fp8_dtype}"


def ratio(a: Values | None, b: Values | None) -> tuple[float, float] | None:
    """The least and the largest of B / A over the heads; one scale stands for all heads."""
    if not a or not b or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    count = max(len(a), len(b))
    pairs = zip(a * (count // len(a)), b * (count // len(b)), strict=True)
    found = [second / first if first else float("inf") for first, second in pairs]
    return min(found), max(found)


def ratios_json(pairs: Pairs, notes: list[str]) -> dict[str, Any]:
    """The object that `fp8kv compare --json` prints."""
    layers = [{"layer": a.layer, **{x: ratio(getattr(a, x), getattr(b, x)) for x in "kvq"}} for a, b in pairs]
    return {"layers": layers, "notes": notes}
