"""The report as a table, for the terminal and for `report.md`."""

from typing import Any

from calib.eval.task_table import task_headings, task_rows, task_title
from calib.eval.variants import REFERENCE
from calib.terminal import plain

HEADINGS = ("cache", "KL", "KL p99", "perplexity", "top-1", "same text", "passkeys")
_ENDS = ("value", "low", "high")
NO_DIFFERENCE = "no measurable difference"


def table_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row per variant, intervals in brackets."""
    return [_row(name, row) for name, row in report["variants"].items() if name != REFERENCE]


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    cells = figures(row)
    kl, ppl = (f"{value} {interval}".strip() for value, interval in (cells[0], cells[2]))
    return (name, kl, cells[1][0], ppl, *(value for value, _ in cells[3:]))


def figures(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Value and interval of each figure of a variant, as text, in the order of `HEADINGS`."""
    kl = _figure(row["kl"], "{:.2g}") if row["measurable"] else (NO_DIFFERENCE, "")
    return [
        kl,
        _figure(row["kl_p99"], "{:.2g}"),
        _figure(row["ppl_change"], "{:+.2%}"),
        _figure(row["top1"], "{:.1%}"),
        _figure(row.get("same_tokens"), "{:.0f}", " tokens"),
        _figure(row.get("passkey"), "{:.0%}"),
    ]


def _figure(figure: dict[str, float] | None, form: str, unit: str = "") -> tuple[str, str]:
    if figure is None:
        return "", ""
    # rounding leaves the sign of what it takes away
    shown = (form.format(figure[key]).replace("-0.00%", "+0.00%") for key in _ENDS)
    value, low, high = shown
    return value + unit, f"[{low}, {high}]"


def closing_lines(report: dict[str, Any]) -> list[str]:
    """Verdict, advice, and what the figures are of."""
    data, size = report["data"], report["bytes_per_token"]
    return [
        report["verdict"],
        *(f"advice: {line}" for line in report["advice"]),
        *(f"warning: {line}" for line in report["warnings"]),
        f"{data['tokens']:,} held-out tokens of {data['source']} in {data['documents']} documents; "
        f"scales from {data['calibration_tokens']:,} others; {report['backend']} backend, "
        f"{report['dtype']}, {report['machine']}; noise floor KL {report['noise_floor']:.2g}",
        f"KV cache: {size['fp8']:,} bytes a token in FP8, {size['16bit']:,} in 16 bits",
    ]


def markdown(report: dict[str, Any]) -> str:
    """`report.md`."""
    legend = "\n".join(
        f"- `{_escape(name)}`: {_escape(row['what'])}" for name, row in report["variants"].items()
    )
    lines = "\n".join(f"- {_escape(line)}" for line in closing_lines(report))
    return (
        f"# FP8 KV cache of {_escape(report['model'])}\n\n{lines}\n\n"
        f"{_table(HEADINGS, table_rows(report))}\n\n"
        "KL(reference || variant) in nats per token, mean with its 95 % bootstrap interval over "
        "documents, and 99th percentile; change of perplexity; share of positions with the same "
        "likeliest token; greedy tokens before the first that differs; passkeys found.\n\n"
        f"{legend}\n{_tasks(report)}"
    )


def _tasks(report: dict[str, Any]) -> str:
    if "tasks" not in report:
        return ""
    table = _table(task_headings(report), task_rows(report))
    return f"\n## {_escape(task_title(report))}\n\n{table}\n"


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [_escaped(headings), ("---",) * len(headings), *map(_escaped, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(row: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_escape, row))


def _escape(text: str) -> str:
    # names come from directories that others made
    for character in "\\`*_|<>[]":
        text = text.replace(character, "\\" + character)
    return plain(" ".join(text.split()))
