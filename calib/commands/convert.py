"""`fp8kv convert`, `strip` and `repair`."""

from pathlib import Path
from typing import Annotated

import typer

from calib import choices
from calib.commands.flags import Debug, Flag, Output, Overwrite
from calib.commands.running import command, print_lines

Source = Annotated[Path, typer.Argument(help="A checkpoint, with scales of any tool.")]


@command
def convert(
    directory: Source,
    to: Annotated[choices.FormatName, Flag("Format to write.")],
    output: Output,
    reduce: Annotated[choices.Reduce, Flag("max: one scale per layer.")] = "none",
    without_q: Annotated[bool, Flag("Leave query scales out.", "--without-q")] = False,
    tp_size: Annotated[int, Flag("Ranks in kv_cache_scales.json.", min=1)] = 1,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint's scales in another engine's format; bit for bit, or not at all."""
    from calib.rewrite.convert import convert as convert_scales

    scales = convert_scales(
        directory,
        to,
        output,
        reduce=reduce,
        without_q=without_q,
        tp_size=tp_size,
        overwrite=overwrite,
    )
    print_lines([f"{len(scales.layers)} layers written to {output}, format {to}"])


@command
def strip(
    directory: Source, output: Output, overwrite: Overwrite = False, debug: Debug = False
) -> None:
    """Write a checkpoint without its KV-cache scales and without the config that announces them."""
    from calib.rewrite.convert import strip as strip_scales

    strip_scales(directory, output, overwrite=overwrite)
    print_lines([f"written to {output}, without KV-cache scales"])


@command
def repair(
    directory: Source,
    stats: Annotated[Path, Flag("Statistics, or a calibration's output.")],
    output: Output,
    to: Annotated[choices.FormatName, Flag("Format to write.")] = "vllm",
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Derive scales that are missing, zero, negative, NaN or garbage from measured absmax."""
    from calib.rewrite.convert import repair as repair_scales

    replaced = repair_scales(directory, stats, to, output, overwrite=overwrite)
    print_lines([f"replaced: {', '.join(replaced) or 'nothing'}", f"written to {output}"])
