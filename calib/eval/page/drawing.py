"""Shared by all charts: pictures for light and dark, looks of variants, numbers on axes."""

import base64
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, LogLocator, MaxNLocator

from calib.eval.advice import GIVEN
from calib.eval.schema import Report, Row

_STYLES = Path(__file__).parent
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_MOST_GIVEN = 3
# colour, dashes and marker; the ink is for what the user gave
_LOOKS: dict[str, tuple[int, tuple[int, ...], str]] = {
    "tensor": (1, (), "o"),
    "attn_head": (2, (6, 2), "s"),
    "channel": (3, (2, 2), "^"),
    "none": (4, (), "D"),
    "e5m2": (5, (8, 2, 2, 2), "v"),
    "mse": (6, (6, 2, 2, 2), "h"),
    "random": (6, (1, 2), "P"),
    "k only": (6, (4, 2), "<"),
    "v only": (7, (4, 2), ">"),
}
_GIVEN_DASHES: tuple[tuple[int, ...], ...] = ((), (5, 2), (1, 2))


@dataclass(frozen=True)
class Picture:
    """One chart as data URIs of SVG, without any text that others chose."""

    light: str
    dark: str


def draw(size: tuple[float, float], paint: Callable[[Figure], None]) -> Picture:
    """Draw a chart in the page's colours, light and dark.

    Args:
        size: width and height in inches, 96 CSS pixels each.
        paint: draws on an empty figure; C0 is the ink, C1 to C8 are the page's colours.
    """
    return Picture(_drawn("light", size, paint), _drawn("dark", size, paint))


def _drawn(scheme: str, size: tuple[float, float], paint: Callable[[Figure], None]) -> str:
    # "default" first: a user's own matplotlibrc is not for this page
    own = (_STYLES / f"{name}.mplstyle" for name in ("chart", scheme))
    with style.context(["default", *own]):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        written = io.BytesIO()
        figure.savefig(written, format="svg", metadata=_NO_METADATA)
    return f"data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode()}"


@dataclass(frozen=True)
class Series:
    """One variant as a line."""

    name: str
    color: int  # `--cN` of the page; 0 is the ink
    dashes: tuple[int, ...]  # empty: solid
    marker: str  # matplotlib's word
    row: Row


def select(report: Report, names: Sequence[str], needs: str) -> list[Series]:
    """Choose the user's scales first, then the measured variants in `names` that have `needs`."""
    rows = report.variants
    given = [name for name, row in rows.items() if row.kind == GIVEN][:_MOST_GIVEN]
    mine = [Series(n, 0, d, "X", rows[n]) for n, d in zip(given, _GIVEN_DASHES, strict=False)]
    known = [Series(n, *_LOOKS[n], rows[n]) for n in names if n in rows and n not in given]
    return [each for each in mine + known if getattr(each.row, needs)]


def plain(value: float, _: Any = None) -> str:
    """A number, without powers of ten as markup."""
    return f"{value:g}"


def percent(value: float, _: Any = None) -> str:
    """A share."""
    return f"{100 * value:g}%"


def log_ticks(low: float, high: float, most: int) -> Locator:
    """At most about `most` ticks between `low` and `high` of a logarithmic axis."""
    decades = math.log10(high / low)
    if decades < 0.7:
        return MaxNLocator(most - 1)
    if 3 * decades < most:
        return LogLocator(subs=(1.0, 2.0, 5.0), numticks=most)
    return LogLocator(numticks=most)
