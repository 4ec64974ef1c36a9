"""How every command runs and prints: mistakes become one line and an exit status."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial, wraps
from typing import Any, ParamSpec, TextIO, cast

import typer

from calib.commands.tables import table_text
from calib.errors import Fp8kvError, InputError
from calib.files.cache_folder import cache_refusal
from calib.files.strict_json import json_text
from calib.files.text import plain
from calib.progress import WRITTEN

P = ParamSpec("P")

_PATIENCE = 5  # signals that clean-up ignores before one ends the program at once
_IGNORED: list[int] = []


class _Terminated(BaseException):
    """SIGTERM arrived."""


class _Output:
    """Standard output that keeps its first failure, so that the work ends with its own status."""

    def __init__(self, stream: TextIO | None) -> None:
        # a closed one must not become the first file that is opened, and may have nothing to print
        self._stream = stream or open(os.open(os.devnull, os.O_RDONLY), "w")  # noqa: SIM115
        self.refusal: OSError | None = None

    def write(self, text: str) -> int:
        encoding = self._stream.encoding or "utf-8"
        spelled = text.encode(encoding, "backslashreplace").decode(encoding)
        self._do(lambda: self._stream.write(spelled))
        return len(text)

    def flush(self) -> None:
        self._do(self._stream.flush)

    def _do(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            # a reader that has seen enough, such as `head`, is no mistake
            self.refusal = self.refusal or (None if isinstance(error, BrokenPipeError) else error)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def command(work: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command so that it runs through `run`, with its own flag `debug`."""

    @wraps(work)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        run(partial(work, *args, **kwargs), debug=bool(kwargs.get("debug")))

    return wrapped


def run(work: Callable[[], None], *, debug: bool = False) -> None:
    """Run a command; turn what a user can put right into one line and an exit status."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, _terminate)
    # the libraries' own bars and advice would drown ours; read when they are imported
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    WRITTEN.clear()
    _IGNORED.clear()
    try:
        try:
            _check_arguments()
            _print_all(work)
        except (Fp8kvError, OSError) as error:
            refusal = None if isinstance(error, Fp8kvError) else _path_refusal(error) or cache_refusal(error)
            if debug or not (refusal or isinstance(error, Fp8kvError)):
                raise
            _fail(refusal or str(error), 2)
    except KeyboardInterrupt:
        _ignore_more()
        _fail(f"interrupted; {_written()}", 130)
    except _Terminated:
        _fail(f"terminated; {_written()}", 2)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _path_refusal(error: OSError) -> str | None:
    """Say which name is too long for a path; None for any other error."""
    if error.errno != errno.ENAMETOOLONG:
        return None
    return f"'{os.fsdecode(error.filename or '')[:80]}...' is too long for the name of a file"


def _print_all(work: Callable[[], None]) -> None:
    """Do `work`; if its text cannot be printed, fail with the names of the files written."""
    output, ended = _Output(sys.stdout), None
    try:
        with redirect_stdout(cast("TextIO", output)):
            work()
    except typer.Exit as error:
        ended = error
    finally:
        output.flush()
    if output.refusal:
        _fail(f"cannot print: {output.refusal.strerror}; {_written()}", 2)
    if ended:
        raise ended


def _written() -> str:
    written = ", ".join(f"'{path}'" for path in WRITTEN)
    return f"written: {written}" if written else "nothing was written"


def _check_arguments() -> None:
    for argument in sys.argv[1:]:
        as_bytes = os.fsencode(argument)
        try:
            as_bytes.decode()
        except UnicodeDecodeError:
            shown = as_bytes.decode(errors="backslashreplace")
            raise InputError(f"'{shown}' is not UTF-8; give it in that encoding") from None


def _fail(message: str, status: int) -> None:
    with suppress(OSError):
        print(plain(f"fp8kv: {message}"), file=sys.stderr)
    raise typer.Exit(status)


def _terminate(signum: int, frame: object) -> None:
    _ignore_more()
    raise _Terminated


def _ignore_more() -> None:
    """Let the command clean up and say how it ended, however often it is told to end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)


def _ignore(signum: int, frame: object) -> None:
    """Do nothing, until so many signals came that the exception of the first must be lost."""
    # not SIG_IGN, which would outlive the start of another program
    _IGNORED.append(signum)
    if len(_IGNORED) == _PATIENCE:
        signal.signal(signum, signal.SIG_DFL)


def _forked() -> None:
    if signal.getsignal(signal.SIGTERM) in (_terminate, _ignore):
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


def warn(warnings: Sequence[str]) -> None:
    """Print warnings where --quiet hides all else."""
    for warning in warnings:
        print(plain(f"warning: {warning}"), file=sys.stderr)


def print_json(document: Any) -> None:
    """Print one JSON object, null where a number is not finite."""
    print(json_text(document))


def print_table(title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table."""
    print(table_text(title, headings, rows), end="")


def print_lines(lines: Sequence[str]) -> None:
    """Print lines whose words may come from files that others made."""
    for line in lines:
        print(plain(line))
