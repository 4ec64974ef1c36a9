"""Which variants a chart shows, and how each looks on every chart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from calib.eval.advice import GIVEN

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
class Series:
    """One variant as a line."""

    name: str
    color: int  # `var(--cN)` of the page; 0 is the ink
    dashes: tuple[int, ...]  # empty: solid
    marker: str  # matplotlib's word
    row: dict[str, Any]  # the report's figures

    @property
    def linestyle(self) -> str | tuple[int, tuple[int, ...]]:
        """Matplotlib's word for the dashes."""
        return (0, self.dashes) if self.dashes else "solid"


def select(report: dict[str, Any], names: Sequence[str], needs: str) -> list[Series]:
    """What the user gave, then those of `names` that were measured and have the figure `needs`."""
    rows = report["variants"]
    given = [name for name, row in rows.items() if row["kind"] == GIVEN][:_MOST_GIVEN]
    mine = [Series(n, 0, d, "X", rows[n]) for n, d in zip(given, _GIVEN_DASHES, strict=False)]
    known = [Series(n, *_LOOKS[n], rows[n]) for n in names if n in rows and n not in given]
    return [each for each in mine + known if each.row.get(needs)]
