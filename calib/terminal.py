"""Text and tables for a terminal, from words that others may have chosen."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table(title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> "Table":
    """A table for the terminal; more than two columns are numbers. Text is shown as it is."""
    from rich.table import Table
    from rich.text import Text

    # a plain string may hold rich's own markup
    made = Table(title=Text(plain(title), style="table.title"), title_justify="left")
    for heading in headings:
        made.add_column(Text(plain(heading)), justify="right" if len(headings) > 2 else "left")
    for row in rows:
        made.add_row(*(Text(plain(cell)) for cell in row))
    return made


def plain(text: str) -> str:
    """Text that cannot steer a terminal: names may come from files that others made."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
