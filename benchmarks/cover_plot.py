"""Draw the README's picture from the results of `cover.py`."""

import base64
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from calib.evaluate.page.plots import draw

ROOT = Path(__file__).parent.parent
DATASET, STRATEGY = "builtin:python-docs", "tensor"


def main() -> None:
    """Read the results, write a picture for light pages and one for dark."""
    result = json.loads((ROOT / "benchmarks/results/cover.json").read_text())
    rows = [row for row in result["headroom"] if (row["dataset"], row["strategy"]) == (DATASET, STRATEGY)]
    picture = draw((7.2, 3.2), lambda figure: _paint(figure, rows, result["tokens"][DATASET]))
    for scheme, data in picture._asdict().items():
        svg = base64.b64decode(data.partition(",")[2])
        (ROOT / f"docs/cover-{scheme}.svg").write_bytes(svg)


def _paint(figure: Figure, rows: list[dict[str, Any]], whole: int) -> None:
    axes = figure.subplots()
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
