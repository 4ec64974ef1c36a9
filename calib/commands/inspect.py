"""`fp8kv inspect`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calib.commands.flags import AsJson, Debug, Flag
from calib.commands.running import command, print_json, print_lines, print_table
from calib.errors import InputError, NoModelError, NoScalesError

if TYPE_CHECKING:
    from calib.files.stored_scales import StoredLayer, StoredScales, Values
    from calib.scales.places import LayerPlaces

_FIRST_HEADINGS = (
    "layer", "K at 0", "at 1, 2", "after", "/ 448 without 0", "V at 0", "at 1, 2", "after",
    "/ 448 without 0",
)  # fmt: skip
_HEADINGS = ("layer", "K scale", "V scale", "Q scale", "type", "shape")


@command
def inspect(
    directory: Annotated[Path, typer.Argument(help="A checkpoint, scales of any tool; statistics.")],
    plot: Annotated[Path | None, Flag("Draw scales: .png, .svg or .pdf.", metavar="FILE")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the FP8 KV-cache scales of a directory, whatever tool wrote them; reads no weights."""
    from calib.files.cache_type import nvfp4_convention

    found, places, problems = _read(directory)
    if plot:
        from calib.scales.plot import plot_scales

        plot_scales(found, plot, places)
    if as_json:
        nvfp4, first = nvfp4_convention(found.directory), [layer.first_tokens() for layer in places]
        print_json(found.to_json() | {"nvfp4": nvfp4 and nvfp4._asdict(), "first_tokens": first})
        return
    print_lines(_opening_lines(found))
    if found.layers:
        print_table(str(directory), _HEADINGS, [_row(layer) for layer in found.layers])
    if places:
        title = "amax by position in the sample; without position 0, divided by 448 (no headroom)"
        print_table(title, _FIRST_HEADINGS, [_first_row(layer) for layer in places])
    print_lines([f"problem: {problem}" for problem in (*found.problems, *problems)])


def _read(directory: Path) -> tuple["StoredScales", list["LayerPlaces"], list[str]]:
    """The scales; where statistics say the largest values were, or what ails them.

    There may be statistics alone, as of format fp8kv.
    """
    from calib.files.model_directory import open_model_directory
    from calib.files.stored_scales import StoredScales, read_scales
    from calib.scales.places import read_places

    try:
        found = read_scales(directory, strict=False)
    except (NoModelError, NoScalesError):
        if not (places := read_places(directory)):
            raise
        return (
            StoredScales(open_model_directory(directory, weights=False, or_statistics=True), []),
            places,
            [],
        )
    try:
        return found, read_places(directory), []
    except InputError as error:
        return found, [], [str(error)]


def _first_row(layer: "LayerPlaces") -> tuple[str, ...]:
    figures = [*layer.k.first_tokens().values(), *layer.v.first_tokens().values()]
    return str(layer.layer), *("-" if figure is None else f"{figure:.4g}" for figure in figures)


def _opening_lines(found: "StoredScales") -> list[str]:
    from calib.files.cache_type import nvfp4_convention
    from calib.files.stored_scales import quantization

    if not found.layers:
        return ["statistics, and no scales in the form of an engine"]
    directory, files = found.directory, len(found.directory.shards)
    index = "no index" if directory.index is None else "an index"
    nvfp4 = nvfp4_convention(directory)
    return [
        f"{len(found.layers)} layers, {found.strategy}; names of {', '.join(found.formats)}",
        f"{files} safetensors file{'s' * (files != 1)}, {index}; {quantization(directory)}",
        *([f"values of an NVFP4 cache: {nvfp4}"] if nvfp4 else []),
    ]


def _row(layer: "StoredLayer") -> tuple[str, ...]:
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
