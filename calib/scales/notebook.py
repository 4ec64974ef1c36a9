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
    rows = [_elements("th", ["layer", "module", *headings])]
    for module, index in [*layers.items()][:_MOST_ROWS]:
        ranges = (_show_range(values.get((module, heading))) for heading in headings)
        rows.append(_elements("td", [str(index), module, *ranges]))
    if len(layers) > _MOST_ROWS:
        lines = [f"{len(layers) - _MOST_ROWS} more layers are not shown", *lines]
    table = _elements("caption", [caption]) + "".join(f"\n<tr>{row}</tr>" for row in rows)
    return f"<div><table>{table}\n</table>{_elements('p', lines)}</div>"


def _elements(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(plain(text))}</{tag}>" for text in texts)


def _show_range(values: Tensor | None) -> str:
    if values is None:
        return ""
    low, high = float(values.min()), float(values.max())
    return f"{low:.4g} to {high:.4g}" if low < high else f"{high:.4g}"
