"""Fold the prose of generated pages."""

import re
from textwrap import fill

_WIDTH = 120


def fold(page: str) -> str:
    """Break the lines of a page that have more than 120 characters, but for the rows of tables."""
    return "\n".join(line if line.startswith("|") else _fold_line(line) for line in page.split("\n"))


def _fold_line(line: str) -> str:
    item = re.match(r"- |\d+\. ", line)
    indent = " " * len(item[0] if item else "")
    return fill(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
