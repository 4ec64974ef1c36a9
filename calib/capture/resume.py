"""One process's share of the data: resumed where an earlier run stopped, ended once the scales hold.

For `--resume`, statistics and the position in the data are saved every few minutes, with the inputs that may
not change. The file lies beside the output under a hidden name and is gone once the output is there. It is
replaced by a rename: after a crash it is whole, and says exactly which batches it covers.

With `--until`, all processes read until the scales hold what more text is expected to add, and no further.
"""

import glob
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
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
from calib.files.fingerprint import fingerprint, settings_digest
from calib.files.model_directory import ModelDirectory
from calib.formats.output import versions
from calib.progress import RESUMABLE
from calib.recipe import Recipe
from calib.scales.stats import KVStats, derive_scales
from calib.scales.stats_file import has_calibration, load_progress, save_stats
from calib.scales.summary import covered_share
from calib.scales.tail import MIN_TOKENS

LOOKAHEAD = 4  # the scales must hold for this many times the tokens that were read
LAYER_SHARE = 0.95  # and in this share of the layers
FIRST_TOKENS, FIRST_SAMPLES = 8192, 16  # a few documents say little about others
THREADS = "number of threads"  # a name of an input
_GROWTH = 1.25  # tokens at a decision, over those at the one before
START_AGAIN = "delete that file to start again"
NOTHING_SAVED = "--resume found no saved progress, and began at the start"
# parts of a recipe that no statistic depends on
_FREE_TO_CHANGE = {"export", "evaluation", "description", "save_minutes"}


def compared_inputs(
    checkpoints: Sequence[ModelDirectory], recipe: Recipe, data: CalibrationData, world: World
) -> dict[str, Any]:
    """Return the inputs of the statistics, by their names in errors: a run resumes only with equal ones."""
    return {
        **_inputs_of_files(checkpoints),
        "recipe": recipe.model_dump(mode="json", exclude=_FREE_TO_CHANGE),
        "dataset": data.fingerprint,
        "number of processes": [world.rank, world.size],
        # a GPU's results do not depend on it
        THREADS: recipe.device == "cpu" and torch.get_num_threads(),
    }


def check_progress(path: Path, checkpoints: Sequence[ModelDirectory], *, resume: bool) -> None:
    """Refuse progress in `path` that this run would lose, or of another model, before any is loaded."""
    check_resumed(path, resume=resume)
    if path.exists():
        _, progress = load_progress(path, START_AGAIN)
        check_same_run(path, progress.get("run", {}), _inputs_of_files(checkpoints))


def check_unfinished(output: Path, *, resume: bool) -> None:
    """Refuse to resume where `output` is a finished calibration, and no progress towards another is saved."""
    if resume and has_calibration(output) and not progress_file(output, 0).exists():
        raise InputError(
            f"the calibration in '{output}' is finished, and nothing is left to resume; add --overwrite to "
            "measure again, or choose another -o"
        )


def check_resumed(path: Path, *, resume: bool) -> None:
    """Refuse to begin again where an earlier run has saved its progress in `path`."""
    if not path.exists() or resume:
        return
    of_all = re.sub(r"rank\d+\.progress$", "rank*.progress", glob.escape(path.name))
    files = sorted({path, *path.parent.glob(of_all)})
    named, is_one = ", ".join(f"'{file}'" for file in files), len(files) == 1
    again = START_AGAIN if is_one else START_AGAIN.replace("that file", "these files")
    raise InputError(
        f"{named} {'is' if is_one else 'are'} the progress of a run that was stopped; "
        f"give --resume to go on, or {again}"
    )


def _inputs_of_files(checkpoints: Sequence[ModelDirectory]) -> dict[str, Any]:
    return {
        **package_versions(),
        "model": [*map(fingerprint, checkpoints)],
        "file beside the weights": [*map(settings_digest, checkpoints)],
        # values that the fingerprint did not sample
        "state of the weight files": [checkpoint.sizes_and_times() for checkpoint in checkpoints],
    }


def package_versions(names: Sequence[str] = ()) -> dict[str, str]:
    """Return versions of what every result depends on, and of packages `names`, by their names in errors."""
    return {f"version of {name}": number for name, number in versions(names).items()}


@dataclass
class SavedProgress:
    """Statistics of one process so far, on disk; `inputs` are its `compared_inputs`."""

    path: Path
    inputs: dict[str, Any]
    every_seconds: float
    _saved_at: float = field(default_factory=time.monotonic)

    def load(self) -> tuple[KVStats | None, int]:
        """Return an earlier run's statistics and the batches they cover, or None and 0.

        Refuse progress of a run with other inputs.
        """
        if not self.path.exists():
            return None, 0
        stats, progress = load_progress(self.path, START_AGAIN)
        check_same_run(self.path, progress.get("run", {}), self.inputs)
        return stats, int(progress["batches"])

    def save_sometimes(self, stats: Callable[[], KVStats], batches: int) -> None:
        """Save `stats` of the first `batches` if the last time is long ago; refuse where it cannot."""
        if time.monotonic() - self._saved_at < self.every_seconds:
            return
        progress = {"run": self.inputs, "batches": batches}
        replace_progress(self.path, lambda scratch: save_stats(stats(), scratch, progress=progress))
        self._saved_at = time.monotonic()


def check_same_run(path: Path, earlier: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Refuse the progress in `path`, of a run with the inputs `earlier`, unless they are these `inputs`."""
    for name, value in inputs.items():
        if earlier.get(name) == value:
            continue
        both = f"{earlier.get(name, 'not recorded')}, now {value}"
        hint = "; see OMP_NUM_THREADS" if name == THREADS else ""
        figures = f" ({both}{hint})" if len(both) < 50 else ""
        raise InputError(
            f"'{path}' is of a run with another {name}{figures}, so --resume cannot go on; give the same "
            f"command, or {START_AGAIN}"
        )
    RESUMABLE.add(path)


def replace_progress(path: Path, write: Callable[[Path], None]) -> None:
    """Put what `write` writes to a scratch file in the place of the progress file `path`, in one step."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(scratch)
        scratch.replace(path)
        RESUMABLE.add(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot save progress to '{path}': {error}") from None
    finally:
        scratch.unlink(missing_ok=True)


def progress_file(output: Path, rank: int) -> Path:
    """Return the place where the process `rank` saves its progress towards `output`."""
    return output.parent / f".{output.name}.rank{rank}.progress"


def remove_progress(path: Path) -> None:
    """Remove a progress file, and what a run that was killed while it saved left beside it."""
    path.unlink(missing_ok=True)
    RESUMABLE.discard(path)
    for scratch in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        scratch.unlink(missing_ok=True)


@dataclass
class Share:
    """The `batches` of one process; `stats` covers the first `batches_read`, or is refused.

    Reading continues where `saved` says that an earlier run of the same inputs was stopped.
    `advance` is called with the tokens of each batch, after `skip` where an earlier run read it.
    """

    model: PreTrainedModel
    batches: Sequence[Batch]
    recipe: Recipe
    attention: AttentionMap
    saved: SavedProgress
    advance: Callable[[int], None] = lambda tokens: None
    skip: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.stats, self.batches_read = self.saved.load()
        if self.batches_read > len(self.batches):
            raise InputError(
                f"'{self.saved.path}' covers {self.batches_read} batches of {len(self.batches)}; "
                f"it is damaged, so {START_AGAIN}"
            )
        for batch in self.batches[: self.batches_read]:
            self.skip()
            self.advance(batch.num_tokens)

    def read(self, end: int | None = None) -> KVStats | None:
        """Read up to batch `end`, or all; return the statistics so far, None before the first batch."""
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


@dataclass(frozen=True)
class Stop:
    """The place where reading stopped."""

    batches: int
    layers: float  # share whose scales hold; at the end of the data it may be less than LAYER_SHARE
    tokens: int  # new ones, of which the forecast is made

    def line(self, stats: KVStats, available: int, share: float) -> str:
        """Say how much was read, and what is expected of the rest."""
        read = max(layer.tokens_read for layer in stats.layers.values())
        text = (
            f"--until {share:g}: {read:,} of {available:,} tokens were read; "
            f"the next {LOOKAHEAD * self.tokens:,} are expected to go at most {100 * share:g}% beyond the "
            f"scales in {int(100 * self.layers)}% of layers"
        )
        if self.layers >= LAYER_SHARE:
            return text
        return f"{text}, not in {LAYER_SHARE:.0%} as was asked: use more text, or --headroom auto"


def decision_points(batches: Sequence[Batch]) -> list[int]:
    """List how many batches to read before each decision; the numbers depend on the batches alone."""
    numbers, tokens, samples, due = [], 0, 0, FIRST_TOKENS
    for number, batch in enumerate(batches, 1):
        tokens += batch.num_tokens - batch.skip_first * len(batch.sample_ids)  # counted tokens
        samples += len(batch.sample_ids)
        if (tokens >= due and samples >= FIRST_SAMPLES) or number == len(batches):
            numbers.append(number)
            due = int(tokens * _GROWTH)
    return numbers


def read_until(
    share: Share, batches: Sequence[Batch], world: World, recipe: Recipe,
    data: CalibrationData | None = None,
) -> tuple[KVStats, Stop]:  # fmt: skip
    """Read `batches` together with the other processes until the scales hold; `share` is this process's part.

    Return the statistics of all processes, which do not depend on their number. Resumed processes skip the
    decisions before the furthest position: each had been to go on. Text that `data` repeats counts once; as
    long as too little is new, reading goes on.
    """
    counts = decision_points(batches)
    ends = [len(range(world.rank, count, world.size)) for count in counts]
    skip = max(world.gather(sum(end < share.batches_read for end in ends)))
    for decision, (count, end) in enumerate(zip(counts, ends, strict=True)):
        own = world.together(lambda end=end: share.read(end))  # type: ignore[misc]
        if decision < skip:
            continue
        stats = reduce(KVStats.merge, [part for part in world.gather(own) if part is not None])
        # a draft may hold NaN
        cached = {n: stats.layers[n] for n in stats.layers if n in share.attention.cached}
        own = replace(stats, layers=cached)
        if data is not None:
            read = data.only(i for batch in batches[:count] for i in batch.sample_ids)
            own = replace(own, text=read.summary(recipe.data.skip_first))
        tokens = max(own.discount_repeats(layer).tokens for layer in cached.values())
        if data is not None and tokens < MIN_TOKENS and count < len(batches):
            continue
        layers = covered_share(own, derive_scales(own, recipe), LOOKAHEAD, recipe.data.until or 0)
        if layers >= LAYER_SHARE or count == len(batches):
            return stats, Stop(count, layers, tokens)
    raise AssertionError("the last decision is at the end")
