"""Statistics, scales and results as a notebook shows them: an HTML table with a row per layer."""

from collections.abc import Iterable, Mapping
from html import escape

from torch import Tensor

from calib.files.text import plain

_MOST_ROWS = 100


def layers_html(
    caption: str,
    layers: Mapping[str, int],
    values: Mapping[tuple[str, str], Tensor],
    lines: Iterable[str] = (),
) -> str:
    """Return a table of `layers`, whose indices are given by module, with `lines` below it.

    `values` are by module and heading, of any shape: their smallest and largest are shown. Every
    text may come from a stranger's file, and is escaped. Layers after the first 100 are counted.
    """
    headings = [*dict.fromkeys(heading for _, heading in values)]
    rows = [
        [str(index), module, *(_show_range(values.get((module, heading))) for heading in headings)]
        for module, index in layers.items()
    ]
    hidden = [f"{len(rows) - _MOST_ROWS} more layers are not shown"] if len(rows) > _MOST_ROWS else []
    return "\n".join(
        [
            "<div><table>",
            _element("caption", caption),
            _row("th", ["layer", "module", *headings]),
            *(_row("td", row) for row in rows[:_MOST_ROWS]),
            "</table>",
            *(_element("p", line) for line in [*hidden, *lines]),
            "</div>",
        ]
    )


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(_element(tag, cell) for cell in cells)}</tr>"


def _element(tag: str, text: str) -> str:
    return f"<{tag}>{escape(plain(text))}</{tag}>"


def _show_range(values: Tensor | None) -> str:
    if values is None:
        return ""
    low, high = float(values.min()), float(values.max())
    return f"{low:.4g} to {high:.4g}" if low < high else f"{high:.4g}"
