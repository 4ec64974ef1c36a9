"""A picture of the scales of a directory, layer by layer."""

from pathlib import Path

from calib.atomic import WRITTEN
from calib.errors import InputError
from calib.scalefiles.inspection import Inspection

_SUFFIXES = (".png", ".svg", ".pdf")


def plot_scales(found: Inspection, path: Path) -> None:
    """Draw K, V and Q scales over the layers; with several per layer, their range.

    Raises:
        InputError: the file's suffix names no picture, or it cannot be written.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(f"--plot {path}: give a name that ends with {', '.join(_SUFFIXES)}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for letter, marker in zip("kvq", "osD", strict=True):
        drawn = [(layer.layer, _positive(getattr(layer, letter))) for layer in found.layers]
        drawn = [(index, values) for index, values in drawn if values]
        if drawn:
            indices = [index for index, _ in drawn]
            low, high = [min(v) for _, v in drawn], [max(v) for _, v in drawn]
            line = axes.plot(indices, high, marker=marker, markersize=4, label=letter.upper())
            axes.fill_between(indices, low, high, alpha=0.2, color=line[0].get_color())
    axes.set_yscale("log")
    axes.set(xlabel="layer", ylabel="scale (|x| up to 448 x scale is held)")
    axes.set_title(f"{found.directory.path.resolve().name}: {found.strategy}", parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise InputError(f"cannot write '{path}': {error}") from None
    WRITTEN.append(path)


def _positive(values: tuple[float, ...] | None) -> list[float]:
    # what a logarithmic axis can show; the problems are in words
    return [value for value in values or () if 0 < value < float("inf")]
