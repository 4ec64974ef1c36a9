"""`fp8kv inspect`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from calib.commands.flags import AsJson, Debug, Flag
from calib.commands.running import print_lines, print_table, run


def inspect(
    directory: Annotated[Path, typer.Argument(help="A checkpoint, or scales of any tool.")],
    plot: Annotated[
        Path | None, Flag(metavar="FILE", help="Draw the scales: .png, .svg or .pdf.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the FP8 KV-cache scales of a directory, whatever tool wrote them; reads no weights."""

    def work() -> None:
        from calib.scalefiles import inspection

        found = inspection.inspect_directory(directory)
        if plot:
            from calib.scalefiles.plot import plot_scales

            plot_scales(found, plot)
        if as_json:
            print(json.dumps(found.to_json()))
            return
        print_lines(inspection.opening_lines(found))
        print_table(str(directory), inspection.HEADINGS, inspection.table_rows(found))
        print_lines([f"problem: {problem}" for problem in found.problems])

    run(work, debug=debug)
