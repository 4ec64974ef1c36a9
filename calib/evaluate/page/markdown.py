"""The report as tables and lines of text: for the terminal, for `report.md`, and for the page."""

import math
from typing import NamedTuple

from calib.choices import REFERENCE
from calib.evaluate.page.other_tables import OTHER_HEADINGS, other_tables
from calib.evaluate.report import Figure, Report, Row, TaskFigure
from calib.files.text import NOT_FINITE, plain, show_number

HEADINGS = ("cache", "bytes", "KL", "KL p99", "perplexity", "top-1", "same text", "passkeys")


def title(report: Report) -> str:
    """What the table is of."""
    mode = "" if report.attention == "exact" else f", attention of {report.attention} simulated"
    return f"FP8 KV cache of {report.model}{mode}"


def table_rows(report: Report) -> list[tuple[str, ...]]:
    """One row per variant, intervals in brackets."""
    whole = report.bytes_per_token["16bit"]
    return [_row(name, row, whole) for name, row in report.variants.items() if name != REFERENCE]


def _row(name: str, row: Row, whole: int) -> tuple[str, ...]:
    cells = figures(row)
    kl, ppl = (f"{value} {interval}".strip() for value, interval in (cells[0], cells[2]))
    share = f"{row.bytes_per_token / whole:.0%}" if row.bytes_per_token else ""
    return (name, share, kl, cells[1][0], ppl, *(value for value, _ in cells[3:]))


def figures(row: Row) -> list[tuple[str, str]]:
    """Value and interval of each figure of a variant, as text, from KL on in `HEADINGS`."""
    is_shown = row.measurable or not row.kl.is_finite
    kl = _figure(row.kl, "{:.2g}") if is_shown else ("no measurable difference", "")
    return [
        kl,
        _figure(row.kl_p99, "{:.2g}"),
        _figure(row.ppl_change, "{:+.2%}"),
        _figure(row.top1, "{:.1%}"),
        _figure(row.same_tokens, "{:.0f}", " tokens"),
        _figure(row.passkey, "{:.0%}"),
    ]


def _figure(figure: Figure | None, form: str, unit: str = "") -> tuple[str, str]:
    if figure is None:
        return "", ""
    if not math.isfinite(figure.value):
        return NOT_FINITE, ""
    # rounding leaves the sign of what it takes away
    ends = (figure.value, figure.low, figure.high)
    value, low, high = (show_number(each, form).replace("-0.00%", "+0.00%") for each in ends)
    return value + unit, f"[{low}, {high}]"


def closing_lines(report: Report) -> list[str]:
    """Verdict, advice, and the conditions of the measurement."""
    data, size = report.data, report.bytes_per_token
    return [
        report.verdict,
        *(f"advice: {line}" for line in report.advice),
        *(f"warning: {line}" for line in report.warnings),
        f"{data.tokens:,} held-out tokens of {data.source} in {data.documents} documents; "
        f"scales from {data.calibration_tokens:,} others; {report.backend} backend, "
        f"{report.dtype}, {report.machine}; noise floor KL {show_number(report.noise_floor)}",
        f"KV cache: {size['fp8']:,} bytes a token in FP8, {size['16bit']:,} in 16 bits",
    ]


class TaskTable(NamedTuple):
    """Task, metric, and each cache's figure with its standard error."""

    title: str  # name and version of the harness, and the limit that it was given
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


def task_table(report: Report) -> TaskTable:
    """One row per task and metric; none where no tasks were run."""
    harness = report.harness
    limit = f", --task-limit {harness.limit}" if harness and harness.limit else ""
    title = f"{harness.name} {harness.version}{limit}" if harness else ""
    rows = [
        (task, metric, *(_cell(figures[metric]) for figures in caches.values()))
        for task, caches in report.tasks.items()
        for metric in next(iter(caches.values()))
    ]
    return TaskTable(title, ("task", "metric", *next(iter(report.tasks.values()), {})), rows)


def _cell(figure: TaskFigure) -> str:
    if figure.value is None:
        return "n/a"
    value = f"{figure.value:.4g}"
    return value if figure.stderr is None else f"{value} ± {figure.stderr:.2g}"


def markdown(report: Report) -> str:
    """`report.md`."""
    legend = "\n".join(
        f"- `{_escape(name)}`: {_escape(row.description)}" for name, row in report.variants.items()
    )
    lines = "\n".join(f"- {_escape(line)}" for line in closing_lines(report))
    return (
        f"# {_escape(title(report))}\n\n{lines}\n\n"
        f"{_table(HEADINGS, table_rows(report))}\n\n"
        "Bytes per token beside 16 bits; KL(reference || variant) in nats per token, mean with its "
        "95 % bootstrap interval over documents, and 99th percentile; change of perplexity; share "
        "of positions with the same likeliest token; greedy tokens before the first that differs; "
        "passkeys found.\n\n"
        f"{legend}\n{_other_texts(report)}{_tasks(report)}"
    )


def _other_texts(report: Report) -> str:
    tables = "\n".join(
        f"`{_escape(table.name)}`:\n\n{_table(OTHER_HEADINGS, table.rows)}\n"
        for table in other_tables(report)
    )
    explained = (
        "Whether the KL differs from that on its own text by more than chance; tokens that have a "
        "value beyond the largest that FP8 holds in some layer, with the exact Poisson interval; "
        "the layer and the head that have most."
    )
    return f"\n## Other text\n\n{explained}\n\n{tables}" if tables else ""


def _tasks(report: Report) -> str:
    title, headings, rows = task_table(report)
    return f"\n## {_escape(title)}\n\n{_table(headings, rows)}\n" if report.tasks else ""


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [map(_escape, headings), ("---",) * len(headings), *(map(_escape, r) for r in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escape(text: str) -> str:
    # names come from directories that others made
    for character in "\\`*_|<>[]":
        text = text.replace(character, "\\" + character)
    return plain(" ".join(text.split()))
