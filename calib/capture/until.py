"""`--until`: read until the scales hold what more text is expected to add, and no further."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from calib.capture.processes import World
from calib.capture.resume import Share
from calib.data import Batch
from calib.recipe import Recipe
from calib.scales.clipping import covered_share
from calib.scales.derive import derive_scales
from calib.scales.stats import KVStats

AHEAD = 4  # times as many tokens as were read
LAYERS = 0.95  # so many of them have to hold
FIRST_TOKENS, FIRST_SAMPLES = 8192, 16  # a few documents say little about others
_MORE = 1.25  # between two looks


@dataclass(frozen=True)
class Stop:
    """Where reading stopped."""

    batches: int
    layers: float  # the share that holds; at the end of the data it may be less than was asked

    def line(self, stats: KVStats, available: int, share: float) -> str:
        """What was read, and what is expected of the rest."""
        done = max(layer.tokens_read for layer in stats.layers.values())
        read = f"--until {share:g}: {done:,} of {available:,} tokens were read"
        ahead = f"the next {AHEAD * stats.tokens:,} are expected to go at most {100 * share:g}%"
        found = f"{read}; {ahead} beyond the scales in {int(100 * self.layers)}% of layers"
        if self.layers >= LAYERS:
            return found
        return f"{found}, not in {LAYERS:.0%} as was asked: use more text, or --headroom auto"


def looks(batches: Sequence[Batch]) -> list[int]:
    """Numbers of batches after which to look; they depend on the batches alone."""
    found, tokens, samples, due = [], 0, 0, FIRST_TOKENS
    for number, batch in enumerate(batches, 1):
        count = len(batch.sample_ids)
        tokens += batch.num_tokens - batch.skip_first * count  # those that are counted
        samples += count
        if (tokens >= due and samples >= FIRST_SAMPLES) or number == len(batches):
            found.append(number)
            due = int(tokens * _MORE)
    return found


def read_until(share: Share, batches: Sequence[Batch], world: World, recipe: Recipe) -> tuple[KVStats, Stop]:
    """Read this process's `share` of `batches` with the others, and look together.

    The statistics are those of all processes, of the first batches up to the stop: the same
    whatever their number. A process that has read further already, before it was resumed, knows
    that all decided to go on.
    """
    counts = looks(batches)
    ends = [len(range(world.rank, count, world.size)) for count in counts]
    passed = max(world.gather(sum(end < share.batches_read for end in ends)))
    for look, (count, end) in enumerate(zip(counts, ends, strict=True)):
        mine = world.together(lambda end=end: share.read(end))  # type: ignore[misc]
        if look < passed:
            continue
        seen = [stats for stats in world.gather(mine) if stats is not None]
        together = reduce(KVStats.merge, seen)
        layers = covered_share(together, derive_scales(together, recipe), AHEAD, recipe.data.until or 0)
        if layers >= LAYERS or count == len(batches):
            return together, Stop(count, layers)
    raise AssertionError("the last look is at the end")
