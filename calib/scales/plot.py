"""A picture of the scales of a directory, layer by layer, and of how their amax grew."""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from calib.errors import InputError
from calib.files.stored_scales import StoredScales
from calib.progress import WRITTEN
from calib.scales.places import LayerPlaces

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Growth = Sequence[tuple[int, float]]  # tokens read, and the amax by then
_SUFFIXES = (".png", ".svg", ".pdf")


def check_can_draw(what: str) -> None:
    """Refuse to draw `what` where matplotlib is not installed; it comes with an extra."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"{what} needs matplotlib: pip install 'fp8kv[report]'")


def plot_scales(found: StoredScales, path: Path, places: Sequence[LayerPlaces] = ()) -> None:
    """Draw K, V and Q scales over the layers; with several per layer, their range.

    Where `places` are known, another panel shows how amax grew with the tokens.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(f"--plot {path}: give a name that ends with {', '.join(_SUFFIXES)}")
    check_can_draw("--plot")
    from matplotlib.figure import Figure

    count = bool(found.layers) + bool(places)
    figure = Figure(figsize=(14 if count > 1 else 9, 4.5), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    if found.layers:
        _draw_scales(axes[0], found)
    if places:
        lines = {x: [getattr(each, x).growth(each.read) for each in places] for x in "kv"}
        draw_growth(axes[-1], lines, {"k": "C0", "v": "C1"})
        axes[-1].set_title("amax against tokens: a line per layer", parse_math=False)
        axes[-1].legend(loc="lower right")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise InputError(f"cannot write '{path}': {error}") from None
    WRITTEN.append(path)


def _draw_scales(axes: "Axes", found: StoredScales) -> None:
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


def draw_growth(axes: "Axes", growth: Mapping[str, Iterable[Growth]], colors: Mapping[str, str]) -> None:
    """Draw amax over the tokens, as a share of the last: of every layer, and their median.

    `growth` has a line per layer, by "k" and "v": the tokens read, and the amax by then.
    """
    for letter, layers in growth.items():
        # a layer of zeros does not grow
        lines = [[(at, x / line[-1][1]) for at, x in line] for line in layers if line[-1][1]]
        for line in lines:
            axes.plot(*zip(*line, strict=True), color=colors[letter], linewidth=0.6, alpha=0.35)
        if lines:
            tokens = [at for at, _ in lines[0]]
            middle = [median(line[i][1] for line in lines) for i in range(len(tokens))]
            label = f"{letter.upper()}, median of the layers"
            axes.plot(tokens, middle, color=colors[letter], linewidth=2.2, label=label)
    axes.set_xscale("log")
    axes.set(xlabel="tokens read", ylabel="amax so far / amax of the run")
    axes.grid(alpha=0.3)
