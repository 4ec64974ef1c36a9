"""`fp8kv compare`."""

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calib.commands.flags import AsJson, Debug
from calib.commands.inspect import show_scale
from calib.commands.running import command, print_json, print_lines, print_table
from calib.files.text import NOT_FINITE, show_interval, show_number

if TYPE_CHECKING:
    from calib.evaluate.compare import Comparison, Pair
    from calib.evaluate.report import Figure
    from calib.files.stored_scales import Values

_HEADINGS = (
    *("cache", "KL A", "KL B", "B / A"),
    *("perplexity A, B", "top-1 A, B", "same text A, B", "passkeys A, B"),
)
_SCALE_HEADINGS = ("layer", "K, A", "K, B", "B / A", "V, A", "V, B", "B / A")

Report = Annotated[Path, typer.Argument(help="A report.json, its directory, or one with scales.")]


@command
def compare(a: Report, b: Report, as_json: AsJson = False, debug: Debug = False) -> None:
    """Set two reports of fp8kv-eval, or the scales of two directories, side by side."""
    if not (_is_report(a) or _is_report(b)):
        _compare_scales(a, b, as_json=as_json)
        return
    from calib.evaluate.compare import compare_reports

    comparison = compare_reports(a, b)
    if as_json:
        print_json(comparison.to_json())
        return
    print_table("Two evaluations", _HEADINGS, [_row(pair) for pair in comparison.pairs])
    print_lines(_closing_lines(comparison))


def _is_report(path: Path) -> bool:
    return path.is_file() or (path / "report.json").exists()


def _compare_scales(a: Path, b: Path, *, as_json: bool) -> None:
    from calib.same_model.scale_ratios import compare_scales

    comparison = compare_scales(a, b)
    if as_json:
        print_json(comparison.to_json())
    else:
        pairs = comparison.pairs
        rows = [(str(a.layer), *_scale_cells(a.k, b.k), *_scale_cells(a.v, b.v)) for a, b in pairs]
        print_table(f"A: {a}, B: {b}", _SCALE_HEADINGS, rows)
        print_lines([f"note: {note}" for note in comparison.notes])


def _scale_cells(a: "Values | None", b: "Values | None") -> tuple[str, str, str]:
    from calib.same_model.scale_ratios import ratio

    low, high = ratio(a, b) or (None, None)
    shown = "-" if low is None else f"{low:.4g}"
    if low != high:
        shown = f"{low:.4g} to {high:.4g}"
    return show_scale(a), show_scale(b), shown


def _closing_lines(comparison: "Comparison") -> list[str]:
    lines = [f"A: {comparison.a}", f"B: {comparison.b}"]
    for letter, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            lines.append(f"only in {letter}: {', '.join(names)}")
    return lines + [f"warning: {line}" for line in comparison.warnings]


def _row(pair: "Pair") -> tuple[str, ...]:
    a, b = pair.a, pair.b
    return (
        pair.name,
        _with_interval(a.kl),
        _with_interval(b.kl),
        _ratio(pair),
        _both(a.ppl_change, b.ppl_change, "{:+.2%}"),
        _both(a.top1, b.top1, "{:.1%}"),
        _both(a.same_tokens, b.same_tokens, "{:.0f} tokens"),
        _both(a.passkey, b.passkey, "{:.0%}"),
    )


def _ratio(pair: "Pair") -> str:
    if pair.is_same:
        return "no measurable difference"
    return "-" if pair.kl_ratio is None else f"{pair.kl_ratio:.3g}x"


def _with_interval(figure: "Figure") -> str:
    return f"{show_number(figure.value)} {show_interval(figure.low, figure.high)}".strip()


def _both(a: "Figure | None", b: "Figure | None", form: str) -> str:
    if a is None and b is None:
        return ""
    # adding 0.0 to what rounds to nothing takes its sign
    both = ("-" if each is None else _rounded(each, form) for each in (a, b))
    return ", ".join(both)


def _rounded(figure: "Figure", form: str) -> str:
    is_finite = isfinite(figure.value)
    return form.format(round(figure.value, 4) + 0.0) if is_finite else NOT_FINITE
