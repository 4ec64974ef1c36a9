"""Draw the README's picture from the results of `cover.py`."""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from schemes import write_schemes

from calib.evaluate.page.charts import chart_style, new_figure, write_svg

ROOT = Path(__file__).parent.parent
DATASET, STRATEGY = "builtin:python-docs", "tensor"


def main() -> None:
    """Read the results, write a picture for light pages and one for dark."""
    result = json.loads((ROOT / "benchmarks/results/cover.json").read_text())
    rows = [row for row in result["headroom"] if (row["dataset"], row["strategy"]) == (DATASET, STRATEGY)]
    with chart_style():
        figure, axes = new_figure(7.2, 3.2)
        _draw(axes, rows, result["tokens"][DATASET])
        write_schemes(write_svg(figure), "cover")


def _draw(axes: Axes, rows: list[dict[str, Any]], whole: int) -> None:
    tokens = [row["tokens"] for row in rows]
    for color, marker, key, label in (
        ("C1", "o", "layers_covered", "--headroom auto"),
        ("C2", "s", "layers_covered_without", "the largest value seen"),
    ):
        shares = [100 * row[key] for row in rows]
        axes.plot(tokens, shares, color=color, marker=marker, label=label)
        axes.annotate(f"{shares[0]:.0f} %", (tokens[0], shares[0]), (0, 7), color=color,
                      textcoords="offset points", ha="center")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.minorticks_off()
    axes.set_ylim(0, 112)
    axes.set_xlabel("tokens calibrated on")
    axes.set_ylabel(f"layers that hold all of\n{whole:,} tokens, %")
    axes.legend(loc="center right")


if __name__ == "__main__":
    main()
