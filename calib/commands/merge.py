"""`fp8kv merge`."""

from pathlib import Path
from typing import Annotated

import typer

from calib.commands.calibrate import print_result
from calib.commands.flags import AsJson, Debug, Flag, Output, Overwrite, ProgressFlag
from calib.commands.running import command


@command
def merge(
    directories: Annotated[
        list[Path], typer.Argument(help="Two or more outputs of calibrate, of one model.")
    ],
    output: Output,
    model: Annotated[
        str | None, Flag("Where the model is now. Default: where the first run found it.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    progress: ProgressFlag = "auto",
    debug: Debug = False,
) -> None:
    """Merge the statistics of separate calibrations, as if one run had read all their data."""
    from calib.commands.progress_bar import progress_bar
    from calib.transfer.merge import merge as merge_runs

    with progress_bar(progress, as_json=as_json) as reported:
        result = merge_runs(directories, output, model=model, overwrite=overwrite, progress=reported)
    print_result(result, as_json=as_json)
