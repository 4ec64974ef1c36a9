"""`fp8kv compare`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from commands.flags import AsJson, Debug
from commands.running import print_lines, print_table, run

Report = Annotated[
    Path, typer.Argument(help="report.json or the directory that holds it, or one with scales.")
]


def compare(a: Report, b: Report, as_json: AsJson = False, debug: Debug = False) -> None:
    """Set two reports of fp8kv-eval, or the scales of two directories, side by side."""

    def work() -> None:
        if not (_is_report(a) or _is_report(b)):
            _compare_scales(a, b, as_json=as_json)
            return
        from calib.eval.compare import compare_reports
        from calib.eval.compare_table import HEADINGS, closing_lines, table_rows

        comparison = compare_reports(a, b)
        if as_json:
            print(json.dumps(comparison.to_json()))
            return
        print_table("Two evaluations", HEADINGS, table_rows(comparison))
        print_lines(closing_lines(comparison))

    run(work, debug=debug)


def _is_report(path: Path) -> bool:
    return path.is_file() or (path / "report.json").exists()


def _compare_scales(a: Path, b: Path, *, as_json: bool) -> None:
    from calib.files.scale_ratios import HEADINGS, compare_scales, table_rows

    ratios = compare_scales(a, b)
    if as_json:
        print(json.dumps(ratios.to_json()))
    else:
        print_table(f"A: {a}, B: {b}", HEADINGS, table_rows(ratios))
