"""Text and tables for a terminal, from words that others may have chosen."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from calib.text import plain

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod

_ENDLESS = 1_000_000


def table_text(
    title: str,
    headings: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    console: "Console | None" = None,
) -> str:
    """A table; more than two columns are numbers. Text is shown as it is, and no word is broken.

    A screen that is too narrow gets a line for every value. What is no screen gets whole rows.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    cells = [[plain(cell) for cell in row] for row in (headings, *rows)]
    endless = not (console.is_terminal or "COLUMNS" in os.environ)
    widths = _widths(cells, _ENDLESS if endless else console.width)
    console.width = max(console.width, sum(widths) + _border(widths))
    made = Table()
    # a plain string may hold rich's own markup
    for heading, width in zip(cells[0], widths, strict=False):
        justify: JustifyMethod = "right" if len(headings) > 2 else "left"
        made.add_column(Text(heading), justify=justify, width=width)
    for row in cells[1:] if widths else ():
        made.add_row(*map(Text, row))
    with console.capture() as captured:
        console.print(Text(plain(title), style="table.title"), soft_wrap=True)
        if widths:
            console.print(made)
        for row in () if widths else cells[1:]:
            pairs = zip(cells[0], row, strict=True)
            lines = "\n".join(("", *map(": ".join, pairs)))
            console.print(Text(lines), soft_wrap=True)
    return captured.get()


def _widths(cells: Sequence[Sequence[str]], room: int) -> list[int]:
    """Of the columns, so that they fit in `room` and no word is broken; none where they cannot."""
    from rich.cells import cell_len

    columns = list(zip(*cells, strict=True))
    words = ([cell_len(word) for cell in column for word in cell.split()] for column in columns)
    least = [max(lengths, default=0) for lengths in words]
    spare = room - sum(least) - _border(least)
    if spare < 0:
        return []
    widths = []
    for low, column in zip(least, columns, strict=True):
        widths.append(min(max(map(cell_len, column)), low + spare))
        spare -= widths[-1] - low
    return widths


def _border(widths: Sequence[int]) -> int:
    return 3 * len(widths) + 1
