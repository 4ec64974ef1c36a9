"""Where a running job reports to: a bar on stderr, or lines where that is no terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True)
class Progress:
    """Callbacks of a running job; the default reports to nobody."""

    stage: Callable[[str], None] = lambda name: None
    total: Callable[[int], None] = lambda tokens: None
    advance: Callable[[float], None] = lambda tokens: None

    def copied(self, name: str, copied: int, size: int) -> None:
        """Report a file that is being copied."""
        self.stage(f"copy {name}, {copied / 1e9:.1f} of {size / 1e9:.1f} GB")


@contextmanager
def progress_bar(*, show: bool) -> Iterator[Progress]:
    """Show stage, tokens/s and time left on stderr while the block runs."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    speed = TextColumn("{task.fields[speed]}")
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), speed)
    # the stream itself: a block that hides what libraries write does not hide the bar
    console = Console(file=sys.stderr)
    if show and not console.is_terminal:
        yield Progress(stage=_line_per_stage(sys.stderr))
        return
    with Bar(*columns, TimeRemainingColumn(), console=console, disable=not show) as bar:
        task = bar.add_task("load", total=None, speed="")

        def advance(tokens: float) -> None:
            bar.advance(task, tokens)
            rate = bar.tasks[0].speed
            bar.update(task, speed=f"{rate:,.0f} tokens/s" if rate else "")

        yield Progress(
            stage=lambda name: bar.update(task, description=name),
            total=lambda tokens: bar.reset(task, total=tokens),
            advance=advance,
        )


def _line_per_stage(stream: TextIO) -> Callable[[str], None]:
    said = ""

    def stage(name: str) -> None:
        nonlocal said
        name = name.partition(", ")[0]  # what follows changes with every batch
        if name != said:
            with suppress(OSError):
                stream.write(f"{name}\n")
                stream.flush()
        said = name

    return stage


@contextmanager
def library_bars_hidden() -> Iterator[None]:
    """Inside the block transformers draws no progress bars of its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
