"""`fp8kv compare`."""

from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from calib.commands.inspect import show_scale
from calib.commands.running import Answer, job_command
from calib.commands.terminal import Block, TextTable
from calib.files.text import NOT_FINITE, show_interval, show_number

if TYPE_CHECKING:
    from calib.evaluate.compare import Comparison, Pair
    from calib.evaluate.report import Figure
    from calib.files.stored_scales import Values
    from calib.same_model.scale_ratios import ScaleComparison

_HEADINGS = (
    *("cache", "KL A", "KL B", "B / A"),
    *("perplexity A, B", "top-1 A, B", "same text A, B", "passkeys A, B"),
)
_SCALE_HEADINGS = ("layer", "K, A", "K, B", "B / A", "V, A", "V, B", "B / A")

_HELP = "The {} side: a report.json, its directory, or a directory with scales."


@job_command
def compare(
    a: Path = typer.Argument(..., help=_HELP.format("first"), metavar="A"),
    b: Path = typer.Argument(..., help=_HELP.format("second"), metavar="B"),
) -> Answer:
    """Show two reports of `fp8kv eval`, or the scales of two directories, side by side."""
    if any(path.is_file() or (path / "report.json").exists() for path in (a, b)):
        from calib.evaluate.compare import compare_reports

        reports = compare_reports(a, b)
        return Answer(reports.to_json(), _report_blocks(reports))
    from calib.same_model.scale_ratios import compare_scales

    scales = compare_scales(a, b)
    return Answer(scales.to_json(), _scale_blocks(a, b, scales))


def _scale_blocks(a: Path, b: Path, comparison: "ScaleComparison") -> Iterator[Block]:
    rows = [(str(a.layer), *_scale_cells(a.k, b.k), *_scale_cells(a.v, b.v)) for a, b in comparison.pairs]
    yield TextTable(f"A: {a}, B: {b}", _SCALE_HEADINGS, rows)
    yield from (f"note: {note}" for note in comparison.notes)


def _scale_cells(a: "Values | None", b: "Values | None") -> tuple[str, str, str]:
    from calib.same_model.scale_ratios import ratio

    low, high = ratio(a, b) or (None, None)
    shown = "-" if low is None else f"{low:.4g}"
    if low != high:
        shown = f"{low:.4g} to {high:.4g}"
    return show_scale(a), show_scale(b), shown


def _report_blocks(comparison: "Comparison") -> Iterator[Block]:
    yield TextTable("Two evaluations", _HEADINGS, [_row(pair) for pair in comparison.pairs])
    yield from (f"A: {comparison.a}", f"B: {comparison.b}")
    for letter, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            yield f"only in {letter}: {', '.join(names)}"
    yield from (f"warning: {warning}" for warning in comparison.warnings)


def _row(pair: "Pair") -> tuple[str, ...]:
    a, b = pair.a, pair.b
    ratio = "-" if pair.kl_ratio is None else f"{pair.kl_ratio:.3g}x"
    return (
        pair.name,
        *(f"{show_number(x.kl.value)} {show_interval(x.kl.low, x.kl.high)}".strip() for x in (a, b)),
        "no measurable difference" if pair.is_same else ratio,
        _both(a.ppl_change, b.ppl_change, "{:+.2%}"),
        _both(a.top1, b.top1, "{:.1%}"),
        _both(a.same_tokens, b.same_tokens, "{:.0f} tokens"),
        _both(a.passkey, b.passkey, "{:.0%}"),
    )


def _both(a: "Figure | None", b: "Figure | None", form: str) -> str:
    if a is None and b is None:
        return ""
    return ", ".join("-" if figure is None else _rounded(figure.value, form) for figure in (a, b))


def _rounded(value: float, form: str) -> str:
    # adding 0.0 to what rounds to nothing takes its sign
    return form.format(round(value, 4) + 0.0) if isfinite(value) else NOT_FINITE
