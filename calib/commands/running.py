"""Run a command: its answer becomes text, tables or JSON, a mistake one line and an exit status."""

import errno
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, NamedTuple, TextIO, cast

import typer

from calib.commands.flags import SHARED_FLAGS
from calib.commands.progress_bar import progress_bar
from calib.errors import Fp8kvError, InputError
from calib.files.cache_folder import cache_refusal
from calib.files.strict_json import json_text
from calib.files.text import plain
from calib.progress import RESUMABLE, WRITTEN

_ENDLESS = 1_000_000  # columns
_PATIENCE = 5  # signals that clean-up ignores before one ends the program at once
_IGNORED: list[int] = []


class TextTable(NamedTuple):
    """A table to print; with more than two columns, its cells are numbers."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class ModelText(str):
    """Text that a model wrote, printed as it is, like the text that is streamed."""


Block = str | TextTable


@dataclass(frozen=True)
class Answer:
    """The result of a command, as JSON and as text."""

    document: Any
    blocks: Iterable[Block]
    failures: Iterable[str] = ()  # on stderr; if there are any, the exit status is 1
    is_good: bool = True  # if not, the exit status is 1


def job_command(work: Callable[..., Answer | None]) -> Callable[..., None]:
    """Return a command that does `work` and prints its answer.

    It has the flags --json and --debug. Keyword-only parameters of `work` are further flags that
    commands share (`SHARED_FLAGS`); `progress` is a bar, and no flag, when `work` gets it.
    """
    parameters = inspect.signature(work).parameters.values()
    own = [x for x in parameters if x.kind is not x.KEYWORD_ONLY]
    keywords = {x.name for x in parameters if x.kind is x.KEYWORD_ONLY}
    names = {*keywords, "debug", "as_json"}
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)
        for name, (annotation, option) in SHARED_FLAGS.items()
        if name in names
    ]

    @wraps(work)
    def command(**values: Any) -> None:
        flags = {x.name: values.pop(x.name) for x in shared}
        run(partial(_do_job, partial(work, **values), flags, keywords), debug=flags["debug"])

    command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    command.__annotations__ = {x.name: x.annotation for x in (*own, *shared)}
    return command


def _do_job(work: Callable[..., Answer | None], flags: dict[str, Any], keywords: set[str]) -> None:
    as_json, form = flags.get("as_json", False), flags.get("progress", "none")
    # one JSON object is all there is, unless progress was asked for
    is_hidden = flags.get("quiet", False) or (as_json and form == "auto")
    with progress_bar(form, hidden=is_hidden) as progress:
        answer = work(**{name: {**flags, "progress": progress}[name] for name in keywords})
    if answer is None:
        return
    if as_json:
        print(json_text(answer.document))
    else:
        print_blocks(answer.blocks)
    failures = [f"failed: {failure}" for failure in answer.failures]
    print_blocks(failures)
    if failures or not answer.is_good:
        raise typer.Exit(1)


def print_blocks(blocks: Iterable[Block]) -> None:
    """Print lines and tables; warnings and failures on stderr."""
    for block in blocks:
        if isinstance(block, TextTable):
            print(table_text(block).removesuffix("\n"))
        elif isinstance(block, ModelText):
            print(block)
        else:
            is_error = block.startswith(("warning: ", "failed: "))
            print(plain(block), file=sys.stderr if is_error else sys.stdout)


def table_text(table: TextTable) -> str:
    """Return a table as text, in which no word is broken.

    Where the screen is too narrow, every value has a line. Without a screen, rows are whole.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not (console.is_terminal or "COLUMNS" in os.environ):
        console.width = _ENDLESS
    headings, *rows = ([plain(cell) for cell in row] for row in (table.headings, *table.rows))
    columns = [*zip(headings, *rows, strict=True)]
    # rich breaks words before it folds other columns; here the first columns get the space that words leave
    words = [max(map(cell_len, " ".join(column).split()), default=0) for column in columns]
    spare = console.width - sum(words) - 3 * len(columns) - 1
    with console.capture() as capture:
        console.print(Text(plain(table.title), style="table.title"), soft_wrap=True)
        if spare >= 0:
            grid = Table()
            for column, word in zip(columns, words, strict=True):
                width = min(max(map(cell_len, column)), word + spare)
                spare -= width - word
                # a plain string may hold rich's own markup
                grid.add_column(Text(column[0]), width=width, justify="right" if len(columns) > 2 else "left")
            for row in rows:
                grid.add_row(*map(Text, row))
            console.print(grid)
        else:
            for row in rows:
                lines = map(": ".join, zip(headings, row, strict=True))
                console.print(Text("\n".join(("", *lines))), soft_wrap=True)
    return capture.get()


def run(work: Callable[[], None], *, debug: bool = False) -> None:
    """Do `work`; turn what a user can put right into one line and an exit status."""
    _prepare_forks()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, _terminate)
    # the libraries' own bars and advice would drown ours; read when they are imported
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    WRITTEN.clear()
    RESUMABLE.clear()
    _IGNORED.clear()
    try:
        try:
            _check_arguments()
            _print_all(work)
        except (Fp8kvError, OSError) as error:
            refusal = str(error) if isinstance(error, Fp8kvError) else _os_refusal(error)
            if debug or not refusal:
                raise
            _fail(refusal, 2)
    except KeyboardInterrupt:
        _ignore_signals()
        _fail(f"interrupted; {_written()}", 130)
    except _Terminated:
        _fail(f"terminated; {_written()}", 2)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _os_refusal(error: OSError) -> str | None:
    """Say which name is too long for a path, or which cache cannot be used; None for any other error."""
    if error.errno == errno.ENAMETOOLONG:
        return f"'{os.fsdecode(error.filename or '')[:80]}...' is too long for the name of a file"
    return cache_refusal(error)


def _check_arguments() -> None:
    for argument in map(os.fsencode, sys.argv[1:]):
        try:
            argument.decode()
        except UnicodeDecodeError:
            shown = argument.decode(errors="backslashreplace")
            raise InputError(f"'{shown}' is not UTF-8; give it in that encoding") from None


def _print_all(work: Callable[[], None]) -> None:
    """Do `work`; if its text cannot be printed, fail with the names of the files written."""
    output, exit_error = _Output(sys.stdout), None
    try:
        with redirect_stdout(cast("TextIO", output)):
            work()
    except typer.Exit as error:
        exit_error = error
    finally:
        output.flush()
    if output.error:
        _fail(f"cannot print: {output.error.strerror}; {_written()}", 2)
    if exit_error:
        raise exit_error


class _Output:
    """Standard output that keeps its first failure, so that the work ends with its own status."""

    def __init__(self, stream: TextIO | None) -> None:
        # a closed one must not become the first file that is opened, and may have nothing to print
        self._stream = stream or open(os.open(os.devnull, os.O_RDONLY), "w")  # noqa: SIM115
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        encoding = self._stream.encoding or "utf-8"
        self._try(self._stream.write, text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[..., object], *arguments: str) -> None:
        try:
            action(*arguments)
        except OSError as error:
            # a reader that has seen enough, such as `head`, is not a mistake
            self.error = self.error or (None if isinstance(error, BrokenPipeError) else error)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _written() -> str:
    names = ", ".join(f"'{path}'" for path in WRITTEN)
    if any(path.exists() for path in RESUMABLE):  # one may have been in a temporary folder
        return "progress is saved: the same command with --resume goes on"
    return f"written: {names}" if names else "nothing was written"


def _fail(message: str, status: int) -> None:
    with suppress(OSError):
        print(plain(f"fp8kv: {message}"), file=sys.stderr)
    raise typer.Exit(status)


class _Terminated(BaseException):
    """SIGTERM arrived."""


def _terminate(number: int, frame: object) -> None:
    _ignore_signals()
    raise _Terminated


def _ignore_signals() -> None:
    """Let the command clean up and say how it ended, however often it is told to end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)


def _ignore(number: int, frame: object) -> None:
    """Ignore the signal; at the fifth restore the default: the first one's exception was evidently lost."""
    # not SIG_IGN, which would outlive the start of another program
    _IGNORED.append(number)
    if len(_IGNORED) == _PATIENCE:
        signal.signal(number, signal.SIG_DFL)


@cache
def _prepare_forks() -> None:
    """Let a child that a library forks die of SIGTERM from its first instruction on.

    Python forgets signals that reach a child before its own handlers are in order, and the parent
    would wait forever.
    """
    block, unblock = (
        partial(signal.pthread_sigmask, how, {signal.SIGTERM})
        for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK)
    )

    def reset_child() -> None:
        if signal.getsignal(signal.SIGTERM) in (_terminate, _ignore):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset_child)
