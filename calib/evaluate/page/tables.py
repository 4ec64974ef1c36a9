"""Tables and sentences of a report, made once: the terminal, `report.md` and `report.html` show them."""

from collections.abc import Iterable
from math import isfinite
from typing import NamedTuple

from calib.choices import REFERENCE
from calib.evaluate.report import Exceedance, Figure, OtherRow, PositionBin, Report, Row, TaskFigure
from calib.files.text import NOT_FINITE, show_interval, show_number

FIGURES = ("KL", "KL p99", "perplexity", "top-1", "same text", "passkeys")
_LONG = ("cache", "KL", "top-1", "margin", "its change", "moved by", "found")
_LONG_FORMS = ("{:.2g}", "{:.1%}", "{:.2f}", "{:+.3f}", "{:.3f}", "{:.0%}")
_POSITIONS = ("positions", "tokens", "KL", "top-1")
_OTHER_TEXT = ("text", "samples", "tokens", "KL", "beside its own", "tokens clipped", "most in")


class Cell(NamedTuple):
    """A value, and its interval or another detail."""

    value: str = ""
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.value} {self.detail}".strip()


class Table(NamedTuple):
    """Rows whose first cell names them."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[Cell, ...]]

    @property
    def lines(self) -> list[tuple[str, ...]]:
        """The rows as text, details behind their values."""
        return [tuple(map(str, row)) for row in self.rows]


def printed_tables(report: Report) -> list[Table]:
    """Return the tables that the terminal shows, which has no room for heads and all other texts."""
    tables = [variants_table(report)]
    for name, headings, rows in other_text_tables(report):
        if name in report.subjects:
            without_heads = [(*row[:-1], Cell(row[-1].value)) for row in rows]
            tables.append(Table(f"Other text, '{name}'", headings, without_heads))
    whole, *by_position = long_tables(report)
    if whole.rows:
        shown = [table for table in by_position if table.title in report.subjects]
        tables += [whole, *(table._replace(title=f"By position, '{table.title}'") for table in shown)]
    return [*tables, task_table(report)] if report.tasks else tables


def summary_lines(report: Report) -> list[str]:
    """Return verdict, advice, warnings, and the conditions of the measurement."""
    data, size = report.data, report.bytes_per_token
    scales = f"scales from {data.calibration_tokens:,} others; " if report.has_own_scales else ""
    return [
        report.verdict,
        *(f"advice: {line}" for line in report.advice),
        *(f"warning: {line}" for line in report.warnings),
        f"{data.tokens:,} held-out tokens of {data.source} in {data.documents} samples; "
        f"{scales}{report.backend} backend, "
        f"{report.dtype}, {report.machine}; noise floor KL {show_number(report.noise_floor)}",
        f"KV cache: {size['fp8']:,} bytes a token in FP8, {size['16bit']:,} in 16 bits",
    ]


def variants_table(report: Report) -> Table:
    """Return a row for each cache but the model's own; only KL and perplexity have room for intervals.

    A column of `FIGURES` without any value is left out.
    """
    whole, rows = report.bytes_per_token["16bit"], []
    for name, row in report.variants.items():
        if name != REFERENCE:
            kl, p99, ppl, *shares = figures(row)
            size = f"{row.bytes_per_token / whole:.0%}" if row.bytes_per_token else ""
            values = [Cell(cell.value) for cell in shares]
            rows.append((Cell(name), Cell(size), kl, Cell(p99.value), ppl, *values))
    mode = "" if report.attention == "exact" else f", attention of {report.attention} simulated"
    headings = ("cache", "bytes", *FIGURES)
    shown = [i for i, _ in enumerate(headings) if i < 2 or any(row[i].value for row in rows)]
    return Table(
        f"FP8 KV cache of {report.model}{mode}",
        tuple(headings[i] for i in shown),
        [tuple(row[i] for i in shown) for row in rows],
    )


def figures(row: Row) -> tuple[Cell, ...]:
    """Return the cells of `FIGURES`, each with its interval; empty ones for what was not measured."""
    is_shown = row.measurable or not row.kl.is_finite
    return (
        figure_cell(row.kl) if is_shown else Cell("no measurable difference"),
        figure_cell(row.kl_p99),
        figure_cell(row.ppl_change, "{:+.2%}"),
        figure_cell(row.top1, "{:.1%}"),
        figure_cell(row.same_tokens, "{:.0f}", " tokens"),
        figure_cell(row.passkey, "{:.0%}"),
    )


def figure_cell(figure: Figure | None, form: str = "{:.2g}", unit: str = "") -> Cell:
    """Return the cell of a figure and its interval; an empty one for what was not measured."""
    if figure is None:
        return Cell()
    if not isfinite(figure.value):
        return Cell(NOT_FINITE)
    value = show_number(figure.value, form)
    unit = unit.removesuffix("s") if value == "1" else unit
    cell = Cell(value + unit, show_interval(figure.low, figure.high, form))
    # rounding leaves the sign of what it takes away
    return Cell(*(text.replace("-0.00%", "+0.00%") for text in cell))


def other_text_tables(report: Report) -> list[Table]:
    """Return a table for each cache that was measured on other text, the verdict's first.

    The first row is the evaluation's own text. A table's title is the name of its cache.
    """
    names = dict.fromkeys(name for text in report.other_texts for name in text.variants)
    ordered = sorted(names, key=lambda name: name != report.subject)
    return [Table(name, _OTHER_TEXT, [*_text_rows(report, name)]) for name in ordered]


def _text_rows(report: Report, name: str) -> Iterable[tuple[Cell, ...]]:
    row, data = report.variants[name], report.data
    counted = row.clipped.tokens if row.clipped else data.tokens
    tokens = Cell(f"{data.tokens:,}", "" if counted == data.tokens else f"(clipped: of {counted:,})")
    yield (Cell(data.source, "(its own)"), Cell(str(data.documents)), tokens, *_text_figures(row, ""))
    for text in report.other_texts:
        other_row = text.variants[name]
        counts = (Cell(str(text.documents)), Cell(f"{text.tokens:,}"))
        yield (Cell(text.dataset), *counts, *_text_figures(other_row, other_row.differs))
        for modality, part in other_row.modalities.items():
            counts = counts[0], Cell(f"{part.tokens:,}")
            yield (Cell(f"its {modality}"), *counts, figure_cell(part.kl), Cell(), Cell(), Cell())


def _text_figures(row: Row | OtherRow, differs: str) -> tuple[Cell, ...]:
    """Return KL, how it differs, tokens clipped, and the layer and head with most of these."""
    clipped = Cell()
    if row.clipped:
        clipped = Cell(f"{row.clipped.share:.2%}", show_interval(row.clipped.low, row.clipped.high, "{:.2%}"))
    layers = {layer.layer_idx: layer.exceedance for layer in row.layers}
    return figure_cell(row.kl), Cell(differs), clipped, _worst_head(layers)


def _worst_head(layers: dict[int, Exceedance]) -> Cell:
    """Name the layer with most tokens clipped, and its head with most; nothing where none were."""
    index, layer = max(layers.items(), key=lambda pair: pair[1].events, default=(0, None))
    if layer is None or not layer.events:
        return Cell()
    count, head = max(
        (
            (count, f"{letter.upper()} head {head}")
            for letter, counts in layer.by_head.items()
            for head, count in enumerate(counts)
        ),
        key=lambda pair: pair[0],
    )
    return Cell(f"layer {index}: {layer.share:.2%}", f"({head}: {count / layer.tokens:.2%})")


def long_tables(report: Report) -> list[Table]:
    """Return a table of long documents, and for each cache one by position, the verdict's first."""
    longs = {name: row.long for name, row in report.variants.items() if row.long}
    title = f"{report.data.long_tokens:,} tokens in {report.data.long_documents} long documents"
    rows = [(Cell(name), *map(figure_cell, long.figures, _LONG_FORMS)) for name, long in longs.items()]
    names = sorted((name for name in longs if name != REFERENCE), key=lambda name: name != report.subject)
    by_position = [
        Table(name, _POSITIONS, [*map(_position_row, longs[name].kl_by_position)]) for name in names
    ]
    return [Table(title, _LONG, rows), *by_position]


def _position_row(place: PositionBin) -> tuple[Cell, ...]:
    counts = Cell(f"{place.start:,} to {place.to:,}"), Cell(f"{place.tokens:,}")
    return *counts, figure_cell(place), figure_cell(place.top1, "{:.1%}")


def task_table(report: Report) -> Table:
    """Return a row for each task and metric, and what ran them as its title."""
    harness, caches = report.harness, next(iter(report.tasks.values()), {})
    limit = f", --task-limit {harness.limit}" if harness and harness.limit else ""
    title = f"{harness.name} {harness.version}{limit}" if harness else ""
    rows = [
        (Cell(task), Cell(metric), *(_task_figure(metrics[metric]) for metrics in by_cache.values()))
        for task, by_cache in report.tasks.items()
        for metric in next(iter(by_cache.values()))
    ]
    return Table(title, ("task", "metric", *caches), rows)


def _task_figure(figure: TaskFigure) -> Cell:
    if figure.value is None:
        return Cell("n/a")
    return Cell(f"{figure.value:.4g}" + ("" if figure.stderr is None else f" ± {figure.stderr:.2g}"))
