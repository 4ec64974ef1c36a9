"""A plugin for pytest: note the tests that fail, end one that hangs, and stop after enough seconds."""

import os
import signal
from pathlib import Path

import pytest

SECONDS_OF_TEST = 120
FAILED, SECONDS = Path(os.environ["FP8KV_FAILED"]), float(os.environ["FP8KV_SECONDS"])
START = sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(SECONDS_OF_TEST)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        # of the CPU, this process and those it waited for: a busy machine gives up no earlier
        if sum(os.times()[:4]) - START > SECONDS:
            item.session.shouldstop = "enough"


def _hangs(*_):
    raise TimeoutError(f"a test ran longer than {SECONDS_OF_TEST} s")


def pytest_runtest_logreport(report):
    if report.failed:
        with FAILED.open("a") as file:
            file.write(f"{report.nodeid}\n")
