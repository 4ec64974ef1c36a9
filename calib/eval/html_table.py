"""The table of variants on the page: groups, figures as text, intervals as lines."""

import math
from collections.abc import Iterable
from typing import Any

from calib.eval.advice import GIVEN, SERVED
from calib.eval.markdown import figures
from calib.eval.variants import REFERENCE


def table(report: dict[str, Any]) -> dict[str, Any]:
    """Groups of rows, and the axis that their KL intervals are drawn on."""
    rows = report["variants"]
    axis = _axis(rows.values(), report["noise_floor"])
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, row in rows.items():
        groups.setdefault(_group(name, row), []).append(
            {
                "name": name,
                "what": row["what"],
                "figures": _compact(figures(row)),
                "kl": {end: axis.place(row["kl"][end]) for end in ("low", "value", "high")},
                "is_subject": name == report["subject"],
            }
        )
    return {
        "groups": [(title, groups[title]) for title in _GROUPS if title in groups],
        "axis": axis,
        "floor": axis.place(report["noise_floor"]),
    }


def _compact(cells: list[tuple[str, str]]) -> list[tuple[str, str]]:
    # eight columns have to fit: the value says what unit its interval has
    return [(value, interval.replace("%", "")) for value, interval in cells]


class _Axis:
    """Magnitudes to percent of a width, logarithmically, between round numbers."""

    def __init__(self, low: float, high: float) -> None:
        self.low = max(n for n in _round_numbers(low) if n <= low)
        self.high = min(n for n in _round_numbers(high) if n > high)

    def place(self, value: float) -> float:
        """Percent of the width; 0 for what is too small to be on it, or no number."""
        if not value > self.low:
            return 0.0
        share = math.log(min(value, self.high) / self.low) / math.log(self.high / self.low)
        return round(100 * share, 2)

    @property
    def ends(self) -> tuple[str, str]:
        """What the ends stand for."""
        return f"{self.low:g}", f"{self.high:g}"


def _round_numbers(near: float) -> list[float]:
    decade = math.floor(math.log10(near))
    exponents = range(decade - 1, decade + 2)  # a logarithm may be rounded across its decade
    return [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]


def _axis(rows: Iterable[dict[str, Any]], floor: float) -> _Axis:
    # controls, and a floor far below, would leave no room to tell the others apart
    kl = [row["kl"] for row in rows if row["kind"] not in ("control", REFERENCE)]
    shown = [x for figure in kl for x in figure.values() if 0 < x < math.inf] or [floor or 1.0]
    return _Axis(min(shown), max(shown))


_GROUPS = ("given", "engines can load", "for comparison", "reference and controls")


def _group(name: str, row: dict[str, Any]) -> str:
    if row["kind"] == GIVEN:
        return "given"
    if row["kind"] in ("control", REFERENCE):
        return "reference and controls"
    return "engines can load" if name in SERVED else "for comparison"
