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
        cells = [str(index), module]
        for tensor in (values.get((module, heading)) for heading in headings):
            low, high = (0.0, 0.0) if tensor is None else (float(tensor.min()), float(tensor.max()))
            text = f"{low:.4g} to {high:.4g}" if low < high else f"{high:.4g}"
            cells.append("" if tensor is None else text)
        rows.append(_elements("td", cells))
    if len(layers) > _MOST_ROWS:
        lines = [f"{len(layers) - _MOST_ROWS} more layers are not shown", *lines]
    table = _elements("caption", [caption]) + "".join(f"\n<tr>{row}</tr>" for row in rows)
    return f"<div><table>{table}\n</table>{_elements('p', lines)}</div>"


def _elements(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(plain(text))}</{tag}>" for text in texts)
