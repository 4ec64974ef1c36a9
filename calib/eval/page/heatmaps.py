"""Heat maps of layers by heads."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calib.eval.page.drawing import Picture, draw, log_ticks, percent, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 11.0  # inches
_HEAD = 0.17  # inches for each head, within bounds
_LEAST, _MOST = 0.8, 3.2


@dataclass(frozen=True)
class HeatMap:
    """One panel."""

    title: str
    heads: str  # what is on its second axis
    layers: list[int]
    cells: list[list[float]]  # [layers][heads]
    is_share: bool  # percent from zero; else logarithmic


def heat_maps(panels: list[HeatMap]) -> Picture:
    """Panels below each other, layers from left to right."""
    heights = [float(np.clip(len(p.cells[0]) * _HEAD, _LEAST, _MOST)) for p in panels]
    size = (_WIDTH, sum(heights) + 0.65 * len(panels))

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)
        for panel, each in zip(panels, axes[:, 0], strict=True):
            _paint(figure, each, panel)

    return draw(size, paint)


def _paint(figure: "Figure", axes: "Axes", panel: HeatMap) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    cells = np.array(panel.cells).T  # [heads, layers]
    # an image: thousands of cells as paths would be most of the page
    image = axes.imshow(
        cells,
        aspect="auto",
        interpolation="none",
        cmap="viridis",
        norm=_norm(cells, panel.is_share),
        extent=(-0.5, cells.shape[1] - 0.5, cells.shape[0] - 0.5, -0.5),
    )
    axes.grid(visible=False)
    axes.set_title(panel.title)
    axes.set_ylabel(panel.heads)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(16, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda i, _: _layer(panel.layers, i)))
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=8, fraction=0.05)
    assert bar.solids is not None
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    bar.formatter = FuncFormatter(percent if panel.is_share else plain)
    bar.locator = MaxNLocator(4) if panel.is_share else log_ticks(*image.get_clim(), 5)
    bar.update_ticks()
    bar.ax.yaxis.set_minor_locator(NullLocator())


def _norm(cells: NDArray[Any], is_share: bool) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    shown = cells[(cells > 0) & np.isfinite(cells)]
    low, high = (float(shown.min()), float(shown.max())) if shown.size else (1.0, 1.0)
    if is_share:
        return Normalize(0, high)
    # one value alone is no range
    return LogNorm(low, high if high > low else 2 * low)


def _layer(layers: list[int], position: float) -> str:
    index = round(position)
    return str(layers[index]) if 0 <= index < len(layers) else ""
