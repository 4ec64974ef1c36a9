"""Flags that several commands share."""

from typing import Annotated

import typer

from calib import choices

Flag = typer.Option
Model = Annotated[str, typer.Argument(help="Local directory, Hub id, or builtin:smollm2.")]
Device = Annotated[choices.Device | None, Flag()]
DType = Annotated[choices.DType | None, Flag(help="auto: as the checkpoint says.")]
TrustRemoteCode = Annotated[bool, Flag("--trust-remote-code", help="Run the model's code.")]
AsJson = Annotated[bool, Flag("--json", help="Print one JSON object.")]
Debug = Annotated[bool, Flag("--debug", help="Show tracebacks.")]
