"""JSON and Markdown of a run of `kernel_speed.py`, and the facts about the GPU that they need."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from machine import machine, write_result

from fp8kv_runtime.kernels.tuning import read_table, tuned_path

ROOT = Path(__file__).parent.parent

# TB/s of memory, from the vendors' data sheets; by the exact name, because variants differ
PEAK_BANDWIDTH = {
    "NVIDIA A100-PCIE-40GB": 1.555,
    "NVIDIA A100-SXM4-40GB": 1.555,
    "NVIDIA A100-SXM4-80GB": 2.039,
    "NVIDIA L4": 0.3,
    "NVIDIA H100 80GB HBM3": 3.35,
    "NVIDIA H200": 4.8,
    "NVIDIA B200": 8.0,
    "AMD Instinct MI300X": 5.3,
}

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def describe_machine(commit: str | None) -> dict[str, Any]:
    """Machine, GPU, versions and commit; None for what cannot be read."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver, max_sm, max_memory, power = nvidia_smi(
        "driver_version", "clocks.max.sm", "clocks.max.memory", "power.limit"
    )
    return {
        **machine(),
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "processors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "peak_tb_per_s": PEAK_BANDWIDTH.get(properties.name),
        "driver": driver,
        "max_clock_sm": max_sm,
        "max_clock_memory": max_memory,
        "power_limit": power,
        "runtime": _runtime(),
        "triton": triton.__version__,
        # of this machine's own table, which goes before the shipped one
        "tuned_configs": sum(map(len, read_table(tuned_path()).values())),
        "commit": commit or _commit(),
    }


def nvidia_smi(*fields: str) -> list[str | None]:
    """Ask nvidia-smi about the current GPU; None for each field that it does not tell."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    which = [] if uuid is None else ["-i", f"GPU-{uuid}"]
    query = ["nvidia-smi", *which, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    line = (_output(query) or "").split("\n")[0]
    values = [value.strip() for value in line.split(",")]
    return [*values] if len(values) == len(fields) and line else [None] * len(fields)


def write(directory: Path, facts: dict[str, Any], rows: list[Row]) -> None:
    """Write kernels.json and kernels.md."""
    write_result(directory / "kernels.json", {"machine": facts, "rows": rows})
    (directory / "kernels.md").write_text(to_markdown(facts, rows))


def to_markdown(facts: dict[str, Any], rows: list[Row]) -> str:
    """Write a head line and one table per kernel."""
    copied = facts["copy_tb_per_s"]
    lines = [
        f"# Kernels on {facts['gpu']}",
        "",
        f"{facts['date']}, commit {facts['commit'] or 'unknown'}, "
        f"torch {facts['versions']['torch']}, triton {facts['triton']}, {facts['runtime']}, "
        f"driver {facts['driver'] or 'unknown'}. Copy within the GPU's memory: {copied:.2f} TB/s; "
        f"peak: {facts['peak_tb_per_s'] or 'unknown'}"
        f"{' TB/s' if facts['peak_tb_per_s'] else ''}; "
        f"an empty launch: {facts['floor_us']:.1f} µs. Medians of {facts['repetitions']}, cold L2, "
        "CUDA graph replays unless marked *.",
    ]
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        lines += ["", f"## {kernel}", "", *_table([r for r in rows if r["kernel"] == kernel])]
    return "\n".join(lines) + "\n"


def _table(rows: list[Row]) -> list[str]:
    columns = [*_COLUMNS, _OWN, _OWN_RATIO]
    columns += _ATTENTION if rows[0]["kernel"] != "append_kv" else ()
    if rows[0]["kernel"] == "extend_attention":
        columns.insert(2, _TFLOPS)
    cells = [[text(row) for _, text in columns] for row in rows]
    ruler = ["---", *["---:"] * (len(columns) - 1)]
    return [f"| {' | '.join(line)} |" for line in ([c[0] for c in columns], ruler, *cells)]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}%"


def _micros(timing: Row) -> str:
    return f"{timing['us']:.1f}{'' if timing['graph'] else '*'}"


def _fastest(row: Row, bits: str) -> tuple[str, Row] | None:
    timed = {name: peer for name, peer in row[bits].items() if "us" in peer}
    return min(timed.items(), key=lambda item: item[1]["us"]) if timed else None


def _peer(row: Row, bits: str) -> str:
    fastest = _fastest(row, bits)
    return "" if fastest is None else f"{_micros(fastest[1])} ({fastest[0]})"


def _ratio(row: Row, bits: str) -> str:
    fastest = _fastest(row, bits)
    return "" if fastest is None else _times(fastest[1], row)


def _times(other: Row, row: Row) -> str:
    return f"{other['us'] / row['us']:.2f}x"


_COLUMNS: tuple[Column, ...] = (
    ("shape", lambda row: row["case"]),
    ("µs", _micros),
    ("range", lambda row: f"{row['us_min']:.1f} to {row['us_max']:.1f}"),
    ("called from Python, µs", lambda row: f"{row['call_us']:.1f}"),
    ("MB of K and V", lambda row: f"{row['bytes'] / 1e6:.1f}"),
    ("TB/s", lambda row: f"{row['tb_per_s']:.2f}"),
    ("of peak", lambda row: _percent(row["of_peak"])),
    ("of copy", lambda row: _percent(row["of_copy"])),
)
_ATTENTION: tuple[Column, ...] = (
    ("others' 16-bit, µs", lambda row: _peer(row, "sixteen_bit")),
    ("theirs / ours", lambda row: _ratio(row, "sixteen_bit")),
    ("others' FP8, µs", lambda row: _peer(row, "fp8")),
    ("theirs / ours", lambda row: _ratio(row, "fp8")),
)
_OWN: Column = ("on float16, µs", lambda row: _micros(row["float16"]) if row["float16"] else "")
_OWN_RATIO: Column = (
    "float16 / FP8",
    lambda row: _times(row["float16"], row) if row["float16"] else "",
)
_TFLOPS: Column = ("TFLOP/s", lambda row: f"{row['tflop_per_s']:.0f}")


def _runtime() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}"


def _commit() -> str | None:
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    changed = _output(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"])
    return commit and commit + (" with changes" if changed else "")


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
