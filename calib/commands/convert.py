"""`fp8kv convert`, `strip` and `repair`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calib import choices
from calib.commands.flags import Debug, Flag, Output, Overwrite, ProgressFlag
from calib.commands.running import command, print_lines

if TYPE_CHECKING:
    from calib.transfer.convert import Conversion

Source = Annotated[Path, typer.Argument(help="A checkpoint, with scales of any tool.")]


@command
def convert(
    directory: Source,
    to: Annotated[choices.FormatName, Flag("Format to write.")],
    output: Output,
    reduce: Annotated[choices.Reduce, Flag("max: write one scale per layer, the largest.")] = "none",
    without_q: Annotated[bool, Flag("Leave query scales out.", "--without-q")] = False,
    tp_size: Annotated[int, Flag("Ranks in kv_cache_scales.json.", min=1)] = 1,
    overwrite: Overwrite = False,
    progress: ProgressFlag = "auto",
    debug: Debug = False,
) -> None:
    """Write scales in another engine's format, bit for bit; json: the larger of K's and V's."""
    from calib.commands.progress_bar import progress_bar
    from calib.transfer.convert import convert as convert_scales

    with progress_bar(progress) as reported:
        done = convert_scales(
            directory,
            to,
            output,
            reduce=reduce,
            without_q=without_q,
            tp_size=tp_size,
            overwrite=overwrite,
            progress=reported,
        )
    written = f"{len(done.scales.layers)} layers written to {output}, format {to}"
    print_lines([*_warning_lines(done, to), written])


@command
def strip(
    directory: Source,
    output: Output,
    overwrite: Overwrite = False,
    progress: ProgressFlag = "auto",
    debug: Debug = False,
) -> None:
    """Write a checkpoint without its KV-cache scales and without the config that announces them."""
    from calib.commands.progress_bar import progress_bar
    from calib.transfer.strip import strip as strip_scales

    with progress_bar(progress) as reported:
        strip_scales(directory, output, overwrite=overwrite, progress=reported)
    print_lines([f"written to {output}, without KV-cache scales"])


@command
def repair(
    directory: Source,
    stats: Annotated[Path, Flag("Statistics, or a calibration's output.")],
    output: Output,
    to: Annotated[choices.FormatName, Flag("Format to write.")] = "vllm",
    overwrite: Overwrite = False,
    progress: ProgressFlag = "auto",
    debug: Debug = False,
) -> None:
    """Replace scales that are missing, useless, or contradicted by measured absmax.

    A layer of another shape than most is replaced as well. Exit status 1, and the output is
    written, where fp8kv verify --against would still tell a problem of it.
    """
    from calib.commands.progress_bar import progress_bar
    from calib.transfer.repair import repair as repair_scales

    with progress_bar(progress) as reported:
        done = repair_scales(directory, stats, to, output, overwrite=overwrite, progress=reported)
    replaced = [f"replaced: {each}" for each in done.replacements] or ["replaced: nothing"]
    left = [f"not mended: {problem}" for problem in done.problems]
    print_lines([*replaced, *_warning_lines(done, to), f"written to {output}", *left])
    if left:
        raise typer.Exit(1)


def _warning_lines(done: "Conversion", to: choices.FormatName) -> list[str]:
    from calib.formats import FORMATS

    note = FORMATS[to].note.replace("--format", "--to")
    return [f"warning: {each}" for each in done.warnings] + [f"note ({to}): {note}"] * bool(note)
