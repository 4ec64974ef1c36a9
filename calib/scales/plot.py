"""A picture of the scales of a directory, layer by layer, and of how their amax grew."""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
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


def check_can_draw(flag: str) -> None:
    """Refuse `flag` where matplotlib is not installed; it comes with an extra."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"{flag} needs matplotlib: pip install 'fp8kv[report]'")


def plot_scales(scales: StoredScales, path: Path, places: Sequence[LayerPlaces] = ()) -> None:
    """Draw K, V and Q scales over the layers, a range where there are several; `places` in a second panel.

    Raises an InputError where `path` cannot be written.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(f"--plot {path}: give a name that ends with {', '.join(_SUFFIXES)}")
    check_can_draw("--plot")
    from matplotlib.figure import Figure

    count = bool(scales.layers) + bool(places)
    figure = Figure(figsize=(14 if count > 1 else 9, 4.5), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    if scales.layers:
        _draw_scales(axes[0], scales)
    if places:
        lines = {x: [getattr(layer, x).growth(layer.read) for layer in places] for x in "kv"}
        draw_growth(axes[-1], lines, {"k": "C0", "v": "C1"})
        axes[-1].set_title("amax against tokens: a line per layer", parse_math=False)
        axes[-1].legend(loc="lower right")
    try:
        with suppress(FileExistsError):  # a file; then nothing can be saved below it
            path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise InputError(f"cannot write '{path}': {error}") from None
    WRITTEN.append(path)


def _draw_scales(axes: "Axes", scales: StoredScales) -> None:
    for letter, marker in zip("kvq", "osD", strict=True):
        # a logarithmic axis shows these; the problems are in words
        visible = {x.layer: [y for y in x.values(letter) if 0 < y < float("inf")] for x in scales.layers}
        visible = {index: values for index, values in visible.items() if values}
        if visible:
            low, high = ([*map(end, visible.values())] for end in (min, max))
            line = axes.plot([*visible], high, marker=marker, markersize=4, label=letter.upper())
            axes.fill_between([*visible], low, high, alpha=0.2, color=line[0].get_color())
    axes.set_yscale("log")
    axes.set(xlabel="layer", ylabel="scale (|x| up to 448 x scale is held)")
    axes.set_title(f"{scales.directory.path.resolve().name}: {scales.strategy}", parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()


def draw_growth(axes: "Axes", growth: Mapping[str, Iterable[Growth]], colors: Mapping[str, str]) -> None:
    """Draw amax over the tokens as a share of the last, of every layer ("k" and "v") and their median."""
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
