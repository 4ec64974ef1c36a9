"""`--resume`: statistics and the position in the data, saved every few minutes, and what must not change.

The file lies beside the output under a hidden name and is gone once the output is there. It is replaced by
a rename: after a crash it is whole, and says exactly which batches it covers.
"""

import glob
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from calib.capture.attention import AttentionMap
from calib.capture.loop import calibrate
from calib.capture.processes import World
from calib.data import Batch, CalibrationData
from calib.errors import InputError
from calib.files.fingerprint import fingerprint
from calib.files.model_directory import ModelDirectory
from calib.recipe import Recipe
from calib.scales.stats import KVStats
from calib.scales.stats_file import load_progress, save_stats

# parts of a recipe that no statistic depends on
_FREE_TO_CHANGE = {"export", "evaluation", "description", "save_minutes"}


def compared_inputs(
    checkpoint: ModelDirectory, recipe: Recipe, data: CalibrationData, world: World
) -> dict[str, Any]:
    """Return what statistics depend on, by the name that an error gives it: a run resumes only the same."""
    return {
        "model": fingerprint(checkpoint),
        # values that the fingerprint did not sample
        "state of the weight files": checkpoint.sizes_and_times(),
        "recipe": recipe.model_dump(mode="json", exclude=_FREE_TO_CHANGE),
        "dataset": data.fingerprint,
        "number of processes": [world.rank, world.size],
        # which a GPU's results do not depend on
        "number of threads": recipe.device == "cpu" and torch.get_num_threads(),
    }


@dataclass
class SavedProgress:
    """Statistics of one process so far, on disk; `inputs` are its `compared_inputs`."""

    path: Path
    inputs: dict[str, Any]
    every_seconds: float
    _saved_at: float = field(default_factory=time.monotonic)

    def load(self) -> tuple[KVStats | None, int]:
        """Return an earlier run's statistics and how many batches they cover, or None and 0."""
        if not self.path.exists():
            return None, 0
        stats, progress = load_progress(self.path)
        earlier = progress.get("run", {})
        for name, value in self.inputs.items():
            if earlier.get(name) == value:
                continue
            numbers = f" ({earlier.get(name, 'not recorded')}, now {value}; see OMP_NUM_THREADS)"
            raise InputError(
                f"'{self.path}' is of a run with another {name}{numbers if isinstance(value, int) else ''}, "
                "so --resume cannot go on; give the same command, or leave --resume away to start again"
            )
        return stats, int(progress["batches"])

    def save_sometimes(self, stats: Callable[[], KVStats], batches: int) -> None:
        """Save `stats` of the first `batches`, if the last time is long enough ago."""
        if time.monotonic() - self._saved_at < self.every_seconds:
            return
        scratch = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_stats(stats(), scratch, progress={"run": self.inputs, "batches": batches})
            scratch.replace(self.path)
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot save progress to '{self.path}': {error}") from None
        finally:
            scratch.unlink(missing_ok=True)
        self._saved_at = time.monotonic()


def progress_file(output: Path, rank: int) -> Path:
    """Return the place where the process `rank` saves its progress towards `output`."""
    return output.parent / f".{output.name}.rank{rank}.progress"


def remove_progress(path: Path) -> None:
    """Remove a progress file, and what a run that was killed while it saved left beside it."""
    path.unlink(missing_ok=True)
    for scratch in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        scratch.unlink(missing_ok=True)


@dataclass
class Share:
    """The `batches` of one process, of which the first `batches_read` are in `stats`.

    With `resume` it continues where an earlier run of the same inputs was stopped, by what `saved` holds.
    `advance` is called with the tokens of each batch.
    """

    model: PreTrainedModel
    batches: Sequence[Batch]
    recipe: Recipe
    attention: AttentionMap
    saved: SavedProgress
    resume: bool
    advance: Callable[[int], None] = lambda tokens: None

    def __post_init__(self) -> None:
        if not self.resume:
            remove_progress(self.saved.path)
        self.stats, self.batches_read = self.saved.load()
        if self.batches_read > len(self.batches):
            raise InputError(
                f"the saved progress covers {self.batches_read} batches of {len(self.batches)}; "
                "it is damaged, so leave --resume away to start again"
            )
        for batch in self.batches[: self.batches_read]:
            self.advance(batch.num_tokens)

    def read(self, end: int | None = None) -> KVStats | None:
        """Read on to the first `end` batches, or all; None where these are none, and none were read."""
        before, unread = self.stats, self.batches[self.batches_read : end]

        def merge(new: KVStats) -> KVStats:
            return new if before is None else before.merge(new)

        def save(batch: Batch, so_far: Callable[[], KVStats]) -> None:
            self.batches_read += 1
            self.advance(batch.num_tokens)
            self.saved.save_sometimes(lambda: merge(so_far()), self.batches_read)

        if unread or not self.batches:
            new = calibrate(self.model, unread, self.recipe, attention=self.attention, on_batch=save)
            self.stats = merge(new)
        return self.stats
