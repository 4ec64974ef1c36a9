"""The roofline picture of a run of `kernel_speed.py`.

    python benchmarks/kernel_roofline.py [results/kernels.json]   writes kernels.png beside it

A machine with a GPU may have no matplotlib: then this is run elsewhere, on the file it wrote.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from kernels.processors import PROCESSORS

Row = dict[str, Any]


def draw(file: Path) -> Path:
    """Draw attention's rows below the roofs of memory and matrix instructions.

    Raises:
        ImportError: there is no matplotlib.
    """
    from matplotlib.figure import Figure

    result = json.loads(file.read_text())
    facts = result["machine"]
    rows = [row for row in result["rows"] if row["tflop_per_s"] > 0]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP per byte of K and V",
        ylabel="TFLOP/s",
        title=f"Kernels on {facts['gpu']}, {facts['date']}",
    )
    _draw_roofs(axes, facts, [_intensity(row) for row in rows])
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        own = [row for row in rows if row["kernel"] == kernel]
        x, y = [_intensity(row) for row in own], [row["tflop_per_s"] for row in own]
        axes.scatter(x, y, label=kernel, zorder=3)
        for row, *at in zip(own, x, y, strict=True):
            axes.annotate(row["case"], at, fontsize=6, xytext=(4, -6), textcoords="offset points")
    axes.grid(which="both", alpha=0.2)
    axes.legend(loc="lower right")
    path = file.with_suffix(".png")
    figure.savefig(path, dpi=150)
    return path


def _draw_roofs(axes: Any, facts: dict[str, Any], intensities: list[float]) -> None:
    ends = [min(intensities) / 4, max(intensities) * 4]
    matrix = _matrix_tflops(facts["gpu"])
    for name, bandwidth, style in (
        ("memory, data sheet", facts["peak_tb_per_s"], "-"),
        ("memory, a copy in this run", facts["copy_tb_per_s"], "--"),
    ):
        if bandwidth:
            corner = [matrix / bandwidth] if matrix else []
            x = [ends[0], *(c for c in corner if ends[0] < c < ends[1]), ends[1]]
            y = [min(bandwidth * each, matrix or float("inf")) for each in x]
            axes.plot(x, y, style, color="0.4", label=f"{name}: {bandwidth:.1f} TB/s")


def _intensity(row: Row) -> float:
    """FLOP per byte: both rates are over the same time."""
    return float(row["tflop_per_s"] / row["tb_per_s"])


def _matrix_tflops(gpu: str) -> float | None:
    """Dense float16, where the GPU is one of those that kernels are compiled for."""
    for each in PROCESSORS.values():
        if each.gpu.split()[0] in gpu:
            return each.flops_per_cycle * each.ghz * each.count / 1e3
    return None


if __name__ == "__main__":
    default = Path(__file__).parent / "results" / "kernels.json"
    print(f"written: {draw(Path(sys.argv[1]) if len(sys.argv) > 1 else default)}")
