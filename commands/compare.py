"""`fp8kv compare`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from commands.flags import AsJson, Debug
from commands.running import print_lines, print_table, run

Report = Annotated[Path, typer.Argument(help="report.json, or the directory that holds it.")]


def compare(a: Report, b: Report, as_json: AsJson = False, debug: Debug = False) -> None:
    """Set two reports of fp8kv-eval side by side."""

    def work() -> None:
        from calib.eval.compare import compare_reports
        from calib.eval.compare_table import HEADINGS, closing_lines, table_rows

        comparison = compare_reports(a, b)
        if as_json:
            print(json.dumps(comparison.to_json()))
            return
        print_table("Two evaluations", HEADINGS, table_rows(comparison))
        print_lines(closing_lines(comparison))

    run(work, debug=debug)
