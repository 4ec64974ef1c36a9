"""The tasks of a report as a table."""

from typing import Any


def task_title(report: dict[str, Any]) -> str:
    """What ran them, on how much."""
    harness = report["harness"]
    limit = f", --task-limit {harness['limit']}" if harness["limit"] else ""
    return f"{harness['name']} {harness['version']}{limit}"


def task_headings(report: dict[str, Any]) -> tuple[str, ...]:
    """Task, metric, and the caches that tasks were run with."""
    first: dict[str, Any] = next(iter(report["tasks"].values()), {})
    return ("task", "metric", *first)


def task_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row per task and metric: each cache's figure with its standard error."""
    return [
        (task, metric, *(_cell(figures[metric]) for figures in caches.values()))
        for task, caches in report["tasks"].items()
        for metric in next(iter(caches.values()))
    ]


def _cell(figure: dict[str, float | None]) -> str:
    if figure["value"] is None:
        return "n/a"
    value = f"{figure['value']:.4g}"
    return value if figure["stderr"] is None else f"{value} ± {figure['stderr']:.2g}"
