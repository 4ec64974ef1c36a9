"""A picture of the scales of a directory, layer by layer."""

from pathlib import Path

from calib.errors import InputError
from calib.progress import WRITTEN
from calib.scalefiles.reading import FoundScales

_SUFFIXES = (".png", ".svg", ".pdf")


def plot_scales(found: FoundScales, path: Path) -> None:
    """Draw K, V and Q scales over the layers; with several per layer, their range."""
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(f"--plot {path}: give a name that ends with {', '.join(_SUFFIXES)}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for letter, marker in zip("kvq", "osD", strict=True):
        scales = {layer.layer: getattr(layer, letter) or () for layer in found.layers}
        # what a logarithmic axis can show; the problems are in words
        scales = {i: [x for x in values if 0 < x < float("inf")] for i, values in scales.items()}
        drawn = {index: values for index, values in scales.items() if values}
        if drawn:
            indices, low, high = [*drawn], [*map(min, drawn.values())], [*map(max, drawn.values())]
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
