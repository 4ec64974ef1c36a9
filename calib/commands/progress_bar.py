"""Progress on stderr: a bar, or lines where that is no terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from calib.progress import Progress
from calib.text import plain


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
            stage=lambda name: bar.update(task, description=plain(name)),
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
                stream.write(f"{plain(name)}\n")
                stream.flush()
        said = name

    return stage
