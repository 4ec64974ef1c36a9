"""How time and memory grow with samples, sequence length and batch size; and with processes."""

from itertools import pairwise
from pathlib import Path
from statistics import linear_regression
from typing import Any

from scale_child import calibrate_in_child

MODEL = "builtin:smollm2"
BASE = {"dtype": "float32", "data.samples": 16, "data.seq_len": 256, "data.batch_size": 8}
SERIES: dict[str, list[dict[str, int]]] = {
    "samples": [{"data.samples": count} for count in (8, 16, 32, 64)],
    "sequence length, 4096 tokens": [
        {"data.seq_len": length, "data.samples": 4096 // length, "data.batch_size": 512 // length}
        for length in (64, 128, 256, 512)
    ],
    "batch size, 4096 tokens": [{"data.batch_size": size} for size in (1, 2, 4, 8, 16)],
}
# a token of the last doubling against one of the first: 1 where time is linear, 4 where quadratic
COST_GROWTH = 1.25
MEMORY_GROWTH = 1.03  # from the fewest to the most samples, eight times as many
PROCESSES = (1, 2, 4)
REDUCTION_TARGET = 0.01  # of the time of calibration


def measure_throughput(scratch: Path) -> dict[str, Any]:
    """Measure every series, each point in a process of its own."""
    series = {
        name: [_point(scratch, BASE | changes) for changes in points] for name, points in SERIES.items()
    }
    return {"model": MODEL, "base": BASE, "series": series, "comparison": judge(series)}


def judge(series: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Check that a token costs no more the more there are, and that memory does not grow with samples."""
    points = series["samples"]
    tokens = [point["tokens"] for point in points]
    seconds = [point["seconds"] for point in points]
    slope, intercept = linear_regression(tokens, seconds)
    more = [
        (second["seconds"] - first["seconds"]) / (second["tokens"] - first["tokens"])
        for first, second in pairwise(points)
    ]
    growth = _memory_growth(points)
    return {
        "seconds_per_1000_tokens": 1000 * slope,
        "seconds_beside": intercept,
        "seconds_per_1000_more_tokens": [1000 * cost for cost in more],
        "cost_growth": more[-1] / more[0],
        "time_met": more[-1] / more[0] <= COST_GROWTH,
        "memory_growth": growth,
        "memory_met": growth <= MEMORY_GROWTH,
    }


def measure_processes(scratch: Path) -> dict[str, Any]:
    """Measure the same calibration in 1, 2 and 4 processes."""
    settings = BASE | {"data.samples": 64, "data.seq_len": 128, "data.batch_size": 4}
    runs = {
        str(count): calibrate_in_child(MODEL, scratch / f"processes-{count}", settings, count)
        for count in PROCESSES
    }
    shares = {
        count: measured["reduce_seconds"] / measured["seconds"]["calibrate"]
        for count, measured in runs.items()
        if count != "1"
    }
    comparison = {
        "same_statistics": len({measured["digest"] for measured in runs.values()}) == 1,
        "reduction_share": shares,
        "reduction_met": max(shares.values()) < REDUCTION_TARGET,
    }
    return {"model": MODEL, "settings": settings, "runs": runs, "comparison": comparison}


def _point(scratch: Path, settings: dict[str, Any]) -> dict[str, Any]:
    measured = calibrate_in_child(MODEL, scratch / "throughput", settings)
    seconds = measured["seconds"]["calibrate"]
    return {
        "settings": settings,
        "tokens": measured["tokens"],
        "seconds": seconds,
        "tokens_per_second": measured["tokens"] / seconds,
        "peak_bytes": measured["peak_bytes"],
    }


def _memory_growth(points: list[dict[str, Any]]) -> float:
    return float(points[-1]["peak_bytes"] / points[0]["peak_bytes"])
