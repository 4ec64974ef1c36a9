"""Progress on stderr: a bar; lines where that is no terminal; JSON for job runners."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, RLock, Thread
from typing import TYPE_CHECKING, TextIO

from calib.choices import ProgressForm
from calib.commands.meter import Clock, Meter
from calib.files.strict_json import json_text
from calib.files.text import plain
from calib.progress import SILENT, Progress

if TYPE_CHECKING:
    from rich.console import Console

BEGIN, RUNNING, END = "begin", "running", "end"
Show = Callable[[Meter, str], None]  # a stage, and which of these it is at

_LINE_SECONDS, _JSON_SECONDS = 30.0, 5.0
_LOOK_SECONDS = 1.0  # how often somebody looks whether a line is due


class Reporter:
    """Shows a stage when it begins and ends, and once in `every` seconds in between."""

    def __init__(self, show: Show, every: float, clock: Clock = time.monotonic) -> None:
        self._show, self._every, self._clock = show, every, clock
        self._meter: Meter | None = None
        self._shown = 0.0
        self._lock = RLock()  # `look` is called by another thread

    def progress(self) -> Progress:
        """What a job reports to."""
        return Progress(self._stage, self._advance, self._detail)

    def look(self) -> None:
        """Show the stage if that is due."""
        with self._lock:
            if self._meter and self._clock() - self._shown >= self._every:
                self._say(RUNNING)

    def end(self) -> None:
        """End the stage; nothing is shown any more."""
        with self._lock:
            self._say(END)
            self._meter = None

    def _stage(self, name: str, total: float | None, unit: str) -> None:
        with self._lock:
            if self._meter and self._meter.name == name:
                return
            self._say(END)
            self._meter = Meter(name, total, unit, self._clock)
            self._say(BEGIN)

    def _advance(self, amount: float) -> None:
        with self._lock:
            if self._meter:
                self._meter.advance(amount)
                self.look()

    def _detail(self, text: str) -> None:
        with self._lock:
            if self._meter:
                self._meter.detail = text

    def _say(self, event: str) -> None:
        if self._meter:
            self._shown = self._clock()
            self._show(self._meter, event)


@contextmanager
def progress_bar(
    form: ProgressForm = "auto", *, quiet: bool = False, as_json: bool = False
) -> Iterator[Progress]:
    """Show stage, speed and time left on stderr while the block runs.

    `quiet` hides it, and so does the object that --json prints, unless a form was asked for.
    """
    from rich.console import Console

    stream = sys.stderr
    if stream is None or quiet or form == "none" or (as_json and form == "auto"):
        yield SILENT
    elif form == "json":
        with reporting(Reporter(json_lines(stream), _JSON_SECONDS)) as progress:
            yield progress
    # the stream itself: a block that hides what libraries write does not hide the bar
    elif (console := Console(file=stream)).is_terminal:
        with _bar(console) as progress:
            yield progress
    else:
        with reporting(Reporter(text_lines(stream), _LINE_SECONDS)) as progress:
            yield progress


@contextmanager
def reporting(reporter: Reporter) -> Iterator[Progress]:
    """Show the stages of the block; after an error nothing more is said of the last."""
    done = Event()

    def keep_looking() -> None:
        while not done.wait(_LOOK_SECONDS):
            reporter.look()

    looking = Thread(target=keep_looking, name="progress", daemon=True)
    looking.start()
    try:
        yield reporter.progress()
        reporter.end()
    finally:
        done.set()
        looking.join()


def json_lines(stream: TextIO) -> Show:
    """Writes an object per line."""
    return lambda meter, event: _write(stream, json_text(meter.to_json(event)))


def text_lines(stream: TextIO) -> Show:
    """Writes the name of a stage, and then how far it is."""

    def show(meter: Meter, event: str) -> None:
        if event != END:
            _write(stream, plain(meter.name) if event == BEGIN else meter.line())

    return show


def _write(stream: TextIO, line: str) -> None:
    # nobody may be able to read it
    with suppress(OSError, ValueError):
        stream.write(f"{line}\n")
        stream.flush()


@contextmanager
def _bar(console: "Console") -> Iterator[Progress]:
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    # the meter is asked for its figures whenever the bar is drawn
    name, said = (TextColumn(f"{{task.{of}}}", markup=False) for of in ("description", "fields[meter]"))
    with Bar(name, BarColumn(), said, console=console) as bar:

        def show(meter: Meter, event: str) -> None:
            if event == BEGIN:
                for task in bar.task_ids:
                    bar.remove_task(task)
                bar.add_task(plain(meter.name), total=meter.total, meter=meter)
            bar.update(bar.task_ids[0], completed=meter.done)

        yield Reporter(show, every=0).progress()
