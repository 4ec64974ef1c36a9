"""The scales of two directories beside each other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.scalefiles.folder import open_scales
from calib.scalefiles.inspection import show_scale
from calib.scalefiles.reading import LayerScalesFound, Values, layers_of

HEADINGS = ("layer", "K, A", "K, B", "B / A", "V, A", "V, B", "B / A")


@dataclass(frozen=True)
class ScaleRatios:
    """Layer by layer; a layer that one of them lacks is None there."""

    pairs: list[tuple[LayerScalesFound | None, LayerScalesFound | None]]

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "layers": [
                {
                    "layer": (a or b or LayerScalesFound(-1)).layer,
                    **{letter: _ratio(_of(a, letter), _of(b, letter)) for letter in "kvq"},
                }
                for a, b in self.pairs
            ]
        }


def compare_scales(a: Path, b: Path) -> ScaleRatios:
    """Set the scales of `a` and `b` beside each other.

    Raises:
        InputError: one holds no scales, or they have no layer in common.
    """
    first, second = ({layer.layer: layer for layer in layers_of(open_scales(p))} for p in (a, b))
    if not first.keys() & second.keys():
        raise InputError(f"'{a}' and '{b}' have scales of no common layer")
    indices = sorted(first.keys() | second.keys())
    return ScaleRatios([(first.get(i), second.get(i)) for i in indices])


def table_rows(ratios: ScaleRatios) -> list[tuple[str, ...]]:
    """A row per layer."""
    return [
        (
            str((a or b or LayerScalesFound(-1)).layer),
            *(cell for letter in "kv" for cell in _cells(_of(a, letter), _of(b, letter))),
        )
        for a, b in ratios.pairs
    ]


def _cells(a: Values | None, b: Values | None) -> tuple[str, str, str]:
    ratio = _ratio(a, b)
    shown = "-" if ratio is None else f"{ratio[0]:.4g}"
    if ratio and ratio[0] != ratio[1]:
        shown = f"{ratio[0]:.4g} to {ratio[1]:.4g}"
    return show_scale(a), show_scale(b), shown


def _ratio(a: Values | None, b: Values | None) -> tuple[float, float] | None:
    """The least and the largest of B / A over the heads; one scale stands for all heads."""
    if not a or not b or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    count = max(len(a), len(b))
    pairs = zip(a * (count // len(a)), b * (count // len(b)), strict=True)
    found = [second / first if first else float("inf") for first, second in pairs]
    return min(found), max(found)


def _of(layer: LayerScalesFound | None, letter: str) -> Values | None:
    return getattr(layer, letter) if layer else None
