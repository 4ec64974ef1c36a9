"""Where a running job reports to."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# outputs of this process so far, so that a run that is stopped can name them
WRITTEN: list[Path] = []


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
