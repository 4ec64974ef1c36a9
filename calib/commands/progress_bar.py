"""Progress on stderr: a bar on a terminal, lines in a log, JSON lines for job runners."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event, RLock, Thread
from typing import TYPE_CHECKING, TextIO

from calib.choices import ProgressForm
from calib.files.strict_json import json_text
from calib.files.text import plain, show_duration, show_size
from calib.progress import SILENT, Progress

if TYPE_CHECKING:
    from rich.progress import Task

_LINE_SECONDS, _JSON_SECONDS = 30.0, 5.0
_LOOK_SECONDS = 1.0  # how often a thread looks whether a line is due
_RATE_SECONDS = 60.0  # that a rate is of: the first batch is slow, and files differ


class StageReporter(Progress):
    """The stages of a job: the `line` of each when it begins, every `interval` seconds, and when it ends.

    rich counts and times them, and draws a bar in place of lines where `line` is None.
    """

    def __init__(
        self,
        stream: TextIO,
        line: "Callable[[Task, str], str] | None",
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        text = partial(TextColumn, markup=False)
        self._make_bar = partial(
            Bar, text("{task.description}"), BarColumn(), text("{task.fields[figures]}"),
            console=Console(file=stream), disable=line is not None,
            get_time=clock, speed_estimate_period=_RATE_SECONDS,
        )  # fmt: skip
        self._bar = self._make_bar()
        self._stream, self._line, self._interval, self._clock = stream, line, interval, clock
        self._shown_at = 0.0
        self._is_saved = False  # what is counted next
        self._lock = RLock()  # `look` is called by another thread

    def look(self) -> None:
        """Show the stage if that is due."""
        with self._lock:
            if self._clock() - self._shown_at >= self._interval:
                self._show("running")

    def end(self) -> None:
        """End the stage; show nothing until another begins."""
        with self._lock:
            if self._bar.tasks:
                self._show("end")
                self.stop()
                self._bar = self._make_bar()

    def stop(self) -> None:
        """Leave the bar as it is."""
        if self._bar.live.is_started:
            self._bar.stop()

    def stage(self, name: str, total: float | None = None, unit: str = "") -> None:
        """Begin a stage, unless it runs already."""
        with self._lock:
            if any(task.fields["stage"] == name for task in self._bar.tasks):
                return
            self._show("end")
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            task_id = self._bar.add_task(
                plain(name), total=total, stage=name, unit=unit, detail="", figures="", saved=0.0
            )
            self._is_saved = False
            self._bar.advance(task_id, 0)  # without this sample a rate would begin after the first batch
            self._bar.start()
            self._show("begin")

    def advance(self, amount: float) -> None:
        """Count units that were done; show the stage if that is due."""
        with self._lock:
            for task in self._bar.tasks:
                if self._is_saved:  # by hand: rich would count it in the rate
                    task.completed += amount
                    task.fields["saved"] += amount
                else:
                    self._bar.advance(task.id, amount)
            self._is_saved = False
            self.look()

    def skip(self) -> None:
        """Leave what is counted next out of the rate."""
        self._is_saved = True

    def detail(self, text: str) -> None:
        """Set what is shown behind the name of the stage."""
        for task in self._bar.tasks:
            task.fields["detail"] = text

    def _show(self, event: str) -> None:
        for task in self._bar.tasks:
            self._shown_at = self._clock()
            task.fields["figures"] = figures(task)
            # nobody may be able to read it
            with suppress(OSError, ValueError):
                if self._line and (line := self._line(task, event)):
                    self._stream.write(f"{line}\n")
                    self._stream.flush()


@contextmanager
def progress_bar(form: ProgressForm = "auto", *, hidden: bool = False) -> Iterator[Progress]:
    """Show stage, speed and time left on stderr while the block runs."""
    # the stream itself: a block that hides what libraries write does not hide the bar
    stream = sys.stderr
    if stream is None or hidden or form == "none":
        yield SILENT
        return
    from rich.console import Console

    if form == "json":
        reporter = StageReporter(stream, json_line, _JSON_SECONDS)
    elif Console(file=stream).is_terminal:
        reporter = StageReporter(stream, None, 0.0)
    else:
        reporter = StageReporter(stream, log_line, _LINE_SECONDS)
    with reporting(reporter) as progress:
        yield progress


@contextmanager
def reporting(reporter: StageReporter) -> Iterator[Progress]:
    """Show the stages of the block; after an error, the last stage has no end."""
    stopped = Event()

    def keep_looking() -> None:
        while not stopped.wait(_LOOK_SECONDS):
            reporter.look()

    thread = Thread(target=keep_looking, name="progress", daemon=True)
    thread.start()
    try:
        yield reporter
        reporter.end()
    finally:
        stopped.set()
        thread.join()
        reporter.stop()


def json_line(task: "Task", event: str) -> str:
    """Return the stage as a JSON object."""
    rate, left, elapsed = (x and round(x, 3) for x in (_rate(task), _seconds_left(task), task.elapsed))
    return json_text(
        {
            "event": event,
            "stage": task.fields["stage"],
            "done": round(task.completed),
            "total": task.total,
            "unit": task.fields["unit"] or None,
            "rate": rate,
            "eta_s": left,
            "elapsed_s": elapsed,
        }
    )


def log_line(task: "Task", event: str) -> str:
    """Return how far a stage is that takes long; nothing where one begins or ends."""
    detail = f" ({task.fields['detail']})" if task.fields["detail"] else ""
    return plain(f"{task.description}{detail}: {figures(task)}") if event == "running" else ""


def figures(task: "Task") -> str:
    """Return how far a stage is: `12,288 of 71,168 tokens, 1,512 tokens/s, 39 s left`; else its time."""
    unit, rate, left = task.fields["unit"], _rate(task), _seconds_left(task)
    counts = [count for count in (task.completed, task.total) if count is not None]
    parts = []
    if unit == "bytes":
        parts = [" of ".join(show_size(round(count)) for count in counts)]
        parts += [f"{show_size(round(rate))}/s"] if rate else []
    elif unit:
        parts = [" of ".join(f"{count:,.0f}" for count in counts) + f" {unit}"]
        parts += [f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s"] if rate else []
    parts += [] if left is None else [f"{show_duration(left)} left"]
    return ", ".join(parts) or show_duration(task.elapsed or 0.0)


def _rate(task: "Task") -> float | None:
    """Return units per second: of the last minute, or of the stage where a batch takes longer."""
    own = task.completed - task.fields["saved"]
    return task.speed or own / task.elapsed if own and task.elapsed else None


def _seconds_left(task: "Task") -> float | None:
    """Return the seconds that what is left takes at the rate; None while there is not one.

    They do not count down inside a batch: nobody knows how much of it is done.
    """
    rate = _rate(task)
    return None if task.total is None or rate is None else max(0.0, task.total - task.completed) / rate
