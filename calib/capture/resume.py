"""`--resume`: statistics and the position in the data, saved every few minutes.

The file lies beside the output under a hidden name and is gone once the output is there. It is
replaced by a rename: after a crash it is whole, and says exactly which batches it covers.
"""

import glob
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from calib.errors import InputError
from calib.scales.stats import KVStats
from calib.scales.stats_file import load_progress, save_stats


class SavedProgress:
    """Statistics of one process so far, on disk; `run` holds settings that must stay the same."""

    def __init__(self, path: Path, run: dict[str, Any], every_seconds: float) -> None:
        self._path, self._run, self._every = path, run, every_seconds
        self._saved_at = time.monotonic()

    def load(self) -> tuple[KVStats | None, int]:
        """Statistics of an earlier run and the batches they cover; None and 0 if there was none."""
        if not self._path.exists():
            return None, 0
        stats, progress = load_progress(self._path)
        earlier = progress.get("run", {})
        different = [name for name, value in self._run.items() if earlier.get(name) != value]
        if different:
            raise InputError(
                f"'{self._path}' is of a run with another {self._described(different[0], earlier)},"
                " so --resume cannot go on; give the same command, or leave --resume away to start "
                "again"
            )
        return stats, int(progress["batches"])

    def _described(self, name: str, earlier: dict[str, Any]) -> str:
        now = self._run[name]
        if not isinstance(now, int):
            return name
        return f"{name} ({earlier.get(name, 'not recorded')}, now {now}; see OMP_NUM_THREADS)"

    def save_sometimes(self, stats: Callable[[], KVStats], batches: int) -> None:
        """Save `stats` of the first `batches`, if the last time is long enough ago."""
        if time.monotonic() - self._saved_at < self._every:
            return
        scratch = self._path.with_name(f"{self._path.name}.{os.getpid()}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            save_stats(stats(), scratch, progress={"run": self._run, "batches": batches})
            scratch.replace(self._path)
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot save progress to '{self._path}': {error}") from None
        finally:
            scratch.unlink(missing_ok=True)
        self._saved_at = time.monotonic()

    def forget(self) -> None:
        """Remove the file: the output is there, or the user starts again."""
        remove_progress(self._path)


def progress_file(output: Path, rank: int) -> Path:
    """Where the process `rank` saves its progress towards `output`."""
    return output.parent / f".{output.name}.rank{rank}.progress"


def remove_progress(path: Path) -> None:
    """Remove a progress file, and what a run that was killed while it saved left beside it."""
    path.unlink(missing_ok=True)
    for scratch in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        scratch.unlink(missing_ok=True)
