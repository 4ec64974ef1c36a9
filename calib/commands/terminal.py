"""Text, tables and JSON on a terminal, from words that others may have chosen."""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from calib.files.text import plain

if TYPE_CHECKING:
    from rich.console import Console

_ENDLESS = 1_000_000  # columns


class TextTable(NamedTuple):
    """A table to print; with more than two columns, its cells are numbers."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class ModelText(str):
    """Text that a model wrote, printed as it is, like the text that is streamed."""


Block = str | TextTable


def print_blocks(blocks: Iterable[Block]) -> None:
    """Print lines and tables; warnings and failures on stderr."""
    for block in blocks:
        if isinstance(block, TextTable):
            print(table_text(block).removesuffix("\n"))
        elif isinstance(block, ModelText):
            print(block)
        else:
            is_error = block.startswith(("warning: ", "failed: "))
            print(plain(block), file=sys.stderr if is_error else sys.stdout)


def table_text(table: TextTable, console: "Console | None" = None) -> str:
    """Return a table as text, in which no word is broken.

    Where the screen is too narrow, every value has a line. Without a screen, rows are whole.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    if not (console.is_terminal or "COLUMNS" in os.environ):
        console.width = _ENDLESS
    headings, *rows = ([plain(cell) for cell in row] for row in (table.headings, *table.rows))
    columns = [*zip(headings, *rows, strict=True)]
    # rich breaks words before it folds other columns; here the first columns get the space that words leave
    words = [max(map(cell_len, " ".join(column).split()), default=0) for column in columns]
    spare = console.width - sum(words) - 3 * len(columns) - 1
    with console.capture() as capture:
        console.print(Text(plain(table.title), style="table.title"), soft_wrap=True)
        if spare >= 0:
            grid = Table()
            for column, word in zip(columns, words, strict=True):
                width = min(max(map(cell_len, column)), word + spare)
                spare -= width - word
                # a plain string may hold rich's own markup
                grid.add_column(Text(column[0]), width=width, justify="right" if len(columns) > 2 else "left")
            for row in rows:
                grid.add_row(*map(Text, row))
            console.print(grid)
        else:
            for row in rows:
                lines = map(": ".join, zip(headings, row, strict=True))
                console.print(Text("\n".join(("", *lines))), soft_wrap=True)
    return capture.get()
