"""The scales of two directories beside each other."""

from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.scalefiles.reading import FoundLayer, Values, read_scales

Pairs = list[tuple[FoundLayer, FoundLayer]]


def compare_scales(a: Path, b: Path) -> Pairs:
    """The scales of `a` and `b` layer by layer; a layer that one of them lacks is empty there."""
    first, second = ({layer.layer: layer for layer in read_scales(path).layers} for path in (a, b))
    if not first.keys() & second.keys():
        raise InputError(f"'{a}' and '{b}' have scales of no common layer")
    indices = sorted(first.keys() | second.keys())
    return [(first.get(i, FoundLayer(i)), second.get(i, FoundLayer(i))) for i in indices]


def ratio(a: Values | None, b: Values | None) -> tuple[float, float] | None:
    """The least and the largest of B / A over the heads; one scale stands for all heads."""
    if not a or not b or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    count = max(len(a), len(b))
    pairs = zip(a * (count // len(a)), b * (count // len(b)), strict=True)
    found = [second / first if first else float("inf") for first, second in pairs]
    return min(found), max(found)


def ratios_json(pairs: Pairs) -> dict[str, Any]:
    """The object that `fp8kv compare --json` prints."""
    layers = [
        {"layer": a.layer, **{x: ratio(getattr(a, x), getattr(b, x)) for x in "kvq"}}
        for a, b in pairs
    ]
    return {"layers": layers}
