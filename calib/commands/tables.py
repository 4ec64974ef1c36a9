"""Text and tables for a terminal, from words that others may have chosen."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from calib.files.text import plain

if TYPE_CHECKING:
    from rich.console import Console

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
    if not (console.is_terminal or "COLUMNS" in os.environ):
        console.width = _ENDLESS
    cells = [[plain(cell) for cell in row] for row in (headings, *rows)]
    widths = _widths(cells, console)
    made = Table()
    numbers = len(headings) > 2
    # a plain string may hold rich's own markup
    for heading, width in zip(cells[0], widths, strict=False):
        made.add_column(Text(heading), width=width, justify="right" if numbers else "left")
    with console.capture() as captured:
        console.print(Text(plain(title), style="table.title"), soft_wrap=True)
        for row in cells[1:]:
            if widths:
                made.add_row(*map(Text, row))
            else:
                lines = map(": ".join, zip(cells[0], row, strict=True))
                console.print(Text("\n".join(("", *lines))), soft_wrap=True)
        if widths:
            console.print(made)
    return captured.get()


def _widths(cells: Sequence[Sequence[str]], console: "Console") -> list[int]:
    """Widths of columns that fit on the screen and break no word; none if there are no such."""
    from rich.measure import Measurement
    from rich.text import Text

    options = console.options.update(width=_ENDLESS)
    columns = [Text("\n".join(column)) for column in zip(*cells, strict=True)]
    measured = [Measurement.get(console, options, column) for column in columns]
    border = 3 * len(columns) + 1
    spare = console.width - sum(column.minimum for column in measured) - border
    if spare < 0:
        return []
    widths = []
    for least, most in measured:
        widths.append(min(most, least + spare))
        spare -= widths[-1] - least
    return widths
