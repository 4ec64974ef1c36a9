"""Statistics, scales and results as a notebook shows them: a table with a row per layer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from calib.files.text import plain

if TYPE_CHECKING:
    from jinja2 import Template

_MOST_ROWS = 100
_TEMPLATE = """\
<div class="fp8kv">
<table style="font-variant-numeric: tabular-nums">
<caption style="caption-side: top; text-align: left; font-weight: bold">{{ caption }}</caption>
<thead><tr>{% for each in headings %}<th scope="col">{{ each }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for cell in row %}<td{% if cell.share is not none %} style="background: linear-gradient(\
to right, rgb(86 180 233 / 35%) {{ cell.share }}%, transparent {{ cell.share }}%)"{% endif %}>\
{{ cell.text }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
{% for line in lines %}
<p>{{ line }}</p>
{% endfor %}
</div>
"""


class _Cell(NamedTuple):
    text: str
    share: int | None = None  # percent of the column's largest value, for a bar


def amax_html(caption: str, layers: Mapping[str, int], tensors: Mapping[tuple[str, str, str], Tensor]) -> str:
    """A table of the amax among the `tensors` of statistics; `layers` are indices by module."""
    amax = {
        (module, f"{which.upper()} amax"): x.amax(-1)
        for (module, which, field), x in tensors.items()
        if field == "amax"
    }
    return layers_html(caption, layers, amax)


def layers_html(
    caption: str,
    layers: Mapping[str, int],
    values: Mapping[tuple[str, str], Tensor],
    lines: Sequence[str] = (),
) -> str:
    """A table of layers, whose indices are given by module, with `lines` below it.

    `values` are by module and heading, of any shape: the smallest and the largest are shown. All
    words may be anybody's. Of more than 100 layers those in the middle are left out.
    """
    headings = [*dict.fromkeys(heading for _, heading in values)]
    columns = [
        [_Cell(str(index)) for index in layers.values()],
        [_Cell(module) for module in layers],
        *(_column([values.get((module, heading)) for module in layers]) for heading in headings),
    ]
    rows = _abridged([*zip(*columns, strict=True)])
    return _template().render(
        caption=caption, headings=["layer", "module", *headings], rows=rows, lines=lines
    )


def _template() -> "Template":
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda x: plain(x) if isinstance(x, str) else x,
        trim_blocks=True,
    )
    return environment.from_string(_TEMPLATE)


def _column(values: Sequence[Tensor | None]) -> list[_Cell]:
    largest = max((float(x.max()) for x in values if x is not None), default=0.0)
    return [_cell(x, largest) for x in values]


def _cell(values: Tensor | None, largest: float) -> _Cell:
    if values is None:
        return _Cell("")
    low, high = float(values.min()), float(values.max())
    text = f"{low:.4g} to {high:.4g}" if low < high else f"{high:.4g}"
    share = high / largest if largest else 0.0
    # a NaN or an infinity is for the eyes, and no length
    return _Cell(text, round(100 * share) if 0 <= share <= 1 else None)


def _abridged(rows: list[tuple[_Cell, ...]]) -> list[tuple[_Cell, ...]]:
    left_out = len(rows) - _MOST_ROWS
    if left_out <= 0:
        return rows
    half = _MOST_ROWS // 2
    note = (_Cell("..."), _Cell(f"{left_out} more"), *(_Cell("") for _ in rows[0][2:]))
    return [*rows[:half], note, *rows[-half:]]
