"""A plugin for pytest: which tests came by which mutant, how long each took, and which one failed."""

import os
from pathlib import Path

DIRECTORY = Path(os.environ["FP8KV_PROBE"])
_seen: set[tuple[int, str]] = set()


def hit(number: int) -> None:
    """Note that the running test, or none, came by the mutant `number`; called by the probed code."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (number, test) not in _seen:
        _seen.add((number, test))
        _note("hits", f"{number}\t{test}")


def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _note("durations", f"{report.nodeid}\t{report.duration:.4f}")
        if report.failed:
            _note("failed", report.nodeid)


def _note(kind: str, text: str) -> None:
    with (DIRECTORY / f"{kind}.{os.getpid()}").open("a") as file:
        file.write(text + "\n")
