"""Flags that several commands share, and the panels of `--help`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from calib import choices

# what matters first has no panel
Flag = typer.Option
DataFlag = partial(typer.Option, rich_help_panel="Data")
ScalesFlag = partial(typer.Option, rich_help_panel="Scales")
OutputFlag = partial(typer.Option, rich_help_panel="Output")
ResourcesFlag = partial(typer.Option, rich_help_panel="Resources")

Model = Annotated[str, typer.Argument(help="Local directory, Hub id, or builtin:smollm2.")]
Output = Annotated[Path, Flag("-o", "--output", help="Directory to write.")]
Overwrite = Annotated[bool, OutputFlag("--overwrite", help="Replace an earlier output.")]
Quiet = Annotated[bool, OutputFlag("--quiet", help="Print nothing but errors.")]
AsJson = Annotated[bool, OutputFlag("--json", help="Print one JSON object.")]
Debug = Annotated[bool, OutputFlag("--debug", help="Show tracebacks.")]
Device = Annotated[choices.Device | None, Flag()]
DType = Annotated[choices.DType | None, ResourcesFlag(help="auto: as the checkpoint says.")]
TrustRemoteCode = Annotated[
    bool, ResourcesFlag("--trust-remote-code", help="Run the model's code.")
]
