"""`fp8kv inspect`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calib.commands.flags import AsJson, Debug, Flag
from calib.commands.running import command, print_json, print_lines, print_table

if TYPE_CHECKING:
    from calib.scalefiles.reading import FoundLayer, FoundScales, Values

_HEADINGS = ("layer", "K scale", "V scale", "Q scale", "type", "shape")


@command
def inspect(
    directory: Annotated[Path, typer.Argument(help="A checkpoint, or scales of any tool.")],
    plot: Annotated[Path | None, Flag("Draw scales: .png, .svg or .pdf.", metavar="FILE")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the FP8 KV-cache scales of a directory, whatever tool wrote them; reads no weights."""
    from calib.scalefiles.conventions import convention
    from calib.scalefiles.reading import read_scales

    found = read_scales(directory)
    if plot:
        from calib.scalefiles.plot import plot_scales

        plot_scales(found, plot)
    if as_json:
        nvfp4 = convention(found.directory)
        print_json(found.to_json() | {"nvfp4": nvfp4 and nvfp4._asdict()})
        return
    print_lines(_opening_lines(found))
    print_table(str(directory), _HEADINGS, [_row(layer) for layer in found.layers])
    print_lines([f"problem: {problem}" for problem in found.problems])


def _opening_lines(found: "FoundScales") -> list[str]:
    from calib.scalefiles.conventions import convention
    from calib.scalefiles.reading import quantization

    directory, files = found.directory, len(found.directory.files)
    index = "no index" if directory.index is None else "an index"
    nvfp4 = convention(directory)
    return [
        f"{len(found.layers)} layers, {found.strategy}; names of {', '.join(found.formats)}",
        f"{files} safetensors file{'s' * (files != 1)}, {index}; {quantization(directory)}",
        *([f"values of an NVFP4 cache: {nvfp4}"] if nvfp4 else []),
    ]


def _row(layer: "FoundLayer") -> tuple[str, ...]:
    return (
        str(layer.layer),
        *map(show_scale, (layer.k, layer.v, layer.q)),
        ", ".join(sorted({t.dtype for t in layer.tensors})) or "JSON",
        ", ".join(sorted({str([*t.shape]) for t in layer.tensors})) or "-",
    )


def show_scale(values: "Values | None") -> str:
    """One scale, or the least and the largest of several."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.4g}"
    return f"{min(values):.4g} to {max(values):.4g} ({len(values)})"
