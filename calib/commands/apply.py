"""`fp8kv apply`."""

from pathlib import Path
from typing import Annotated

import typer

from calib import choices
from calib.commands.calibrate import print_result
from calib.commands.flags import AsJson, Debug, Flag, Model, OutputFlag, Overwrite, ProgressFlag
from calib.commands.running import command


@command
def apply(
    calibration: Annotated[
        str,
        typer.Argument(
            metavar="OUTPUT",
            help="A calibration's output, its statistics, a pack, or a pack's Hub id[@revision].",
        ),
    ],
    model: Model,
    output: Annotated[Path | None, Flag("Default: ./<model>-fp8kv-<strategy>.", "-o", "--output")] = None,
    in_place: Annotated[
        bool, OutputFlag("Add to the model's directory; back up what is replaced.", "--in-place")
    ] = False,
    format: Annotated[choices.FormatName, Flag("Format to write.")] = "vllm",
    strategy: Annotated[
        choices.Strategy | None, Flag("Which values share a scale. Default: as calibrated.")
    ] = None,
    base: Annotated[str | None, Flag("The model that was calibrated, for outputs of older versions.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    progress: ProgressFlag = "auto",
    debug: Debug = False,
) -> None:
    """Put a calibration's scales beside another checkpoint of its model, which is not run.

    MODEL may be a quantised version. Refused unless its norms and the weights that K and V come
    from are the same, as far as sampled. What is not compared (down_proj, most experts) is named.
    """
    from calib.commands.progress_bar import progress_bar
    from calib.transfer.apply import apply as apply_scales

    with progress_bar(progress, as_json=as_json) as reported:
        result = apply_scales(
            calibration, model, output, in_place=in_place, base=base, format=format, strategy=strategy,
            overwrite=overwrite, progress=reported,
        )  # fmt: skip
    print_result(result, as_json=as_json)
