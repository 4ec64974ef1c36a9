"""Reports of a running job."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")

# outputs of this process so far, so that a run that is stopped can name them
WRITTEN: list[Path] = []
# what it saved of work that is not finished
RESUMABLE: set[Path] = set()


class Progress:
    """Reports of a running job; nothing is shown of them."""

    def stage(self, name: str, total: float | None = None, unit: str = "") -> None:
        """Begin a stage of `total` units, None if that is unknown; the next stage ends it."""

    def advance(self, amount: float) -> None:
        """Count units of the stage that were done since the last call."""

    def skip(self) -> None:
        """Leave what is counted next, which an earlier run did, out of the rate."""

    def detail(self, text: str) -> None:
        """Say where in its stage the job is."""

    def end(self) -> None:
        """End the stage; nothing is shown until another begins."""

    def each(self, name: str, items: Sequence[Item], unit: str) -> Iterator[Item]:
        """Yield the `items`, as a stage of so many units; an empty sequence makes no stage."""
        if items:
            self.stage(name, len(items), unit)
        for item in items:
            yield item
            self.advance(1)

    def copied(self, name: str, count: int, size: int) -> None:
        """Report that another `count` bytes of a file of `size` bytes were copied."""
        self.stage(f"copy {name}", size, "bytes")
        self.advance(count)


SILENT = Progress()


@contextmanager
def library_bars_hidden() -> Iterator[None]:
    """Hide transformers' own progress bars inside the block."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # this bar does not ask whether it may be drawn
    bar, gguf.tqdm = gguf.tqdm, partial(gguf.tqdm, disable=True)
    try:
        yield
    finally:
        gguf.tqdm = bar
        if shown:
            logging.enable_progress_bar()
