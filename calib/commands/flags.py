"""Flags that several commands share, and the panels of `--help`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from calib import __version__, choices


def Flag(help: str, *names: str, panel: str | None = None, **settings: Any) -> Any:
    """`typer.Option` with the text of `--help` first; what matters most has no panel."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


DataFlag = partial(Flag, panel="Data")
ScalesFlag = partial(Flag, panel="Scales")
OutputFlag = partial(Flag, panel="Output")
ResourcesFlag = partial(Flag, panel="Resources")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"fp8kv {__version__}")
        raise typer.Exit


Model = Annotated[str, typer.Argument(help="Local directory, Hub id, or builtin:smollm2.")]
Output = Annotated[Path, Flag("Directory to write.", "-o", "--output")]
Overwrite = Annotated[
    bool, OutputFlag("Replace an earlier output and all else in its directory.", "--overwrite")
]
Quiet = Annotated[bool, OutputFlag("Print nothing but errors.", "--quiet")]
ProgressFlag = Annotated[
    choices.ProgressForm,
    OutputFlag("On stderr. json: an object per line, for job runners.", "--progress"),
]
AsJson = Annotated[bool, OutputFlag("Print one JSON object.", "--json")]
Debug = Annotated[bool, OutputFlag("Show tracebacks.", "--debug")]
Device = Annotated[choices.Device | None, Flag("Where the model runs.")]
DType = Annotated[choices.DType | None, ResourcesFlag("auto: as the checkpoint says.")]
AllowFewTokens = Annotated[
    bool, DataFlag("Calibrate on fewer than 64 tokens or 16 different ones.", "--allow-few-tokens")
]
Seed = Annotated[int | None, DataFlag("Default: 42.")]
TrustRemoteCode = Annotated[bool, ResourcesFlag("Run the model's code.", "--trust-remote-code")]
Version = Annotated[
    bool,
    Flag(
        *("Print the version.", "--version"),
        callback=_print_version,
        is_eager=True,
        expose_value=False,
    ),
]
