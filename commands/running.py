"""How every command runs: mistakes become one line and an exit status."""

import os
import signal
import sys
from collections.abc import Callable, Sequence

import typer


class _Terminated(BaseException):
    """SIGTERM arrived."""


def run(work: Callable[[], None], *, debug: bool = False) -> None:
    """Run a command; turn what a user can put right into one line and an exit status."""
    before = signal.signal(signal.SIGTERM, _terminate)
    # the libraries' own bars and advice would drown ours; read when they are imported
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from calib.errors import Fp8kvError

    try:
        work()
    except Fp8kvError as error:
        if debug:
            raise
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("interrupted; nothing was written", 130)
    except _Terminated:
        _fail("terminated; nothing was written", 2)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _fail(message: str, status: int) -> None:
    print(f"fp8kv: {message}", file=sys.stderr)
    raise typer.Exit(status)


def _terminate(signum: int, frame: object) -> None:
    raise _Terminated


def _forked() -> None:
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


# Libraries fork workers and end them with SIGTERM. It must do so from their first instruction on:
# Python forgets signals that reach a child before its own handlers are in order, and the parent
# would wait forever.
os.register_at_fork(
    before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
    after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}),
    after_in_child=_forked,
)


def print_table(title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table."""
    from rich.console import Console

    from calib.terminal import table

    Console().print(table(title, headings, rows))


def print_lines(lines: Sequence[str]) -> None:
    """Print lines whose words may come from files that others made."""
    from calib.terminal import plain

    for line in lines:
        print(plain(line))
