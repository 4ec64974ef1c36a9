"""`--until`: read until the scales hold what more text is expected to add, and no further."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from calib.capture.processes import World
from calib.capture.resume import Share
from calib.data import Batch
from calib.recipe import Recipe
from calib.scales.clipping import covered_share
from calib.scales.stats import KVStats, derive_scales

AHEAD = 4  # times as many tokens as were read
LAYERS = 0.95  # so many of them have to hold
FIRST_TOKENS, FIRST_SAMPLES = 8192, 16  # a few documents say little about others
_GROWTH = 1.25  # of the tokens between two looks


@dataclass(frozen=True)
class Stop:
    """The place where reading stopped."""

    batches: int
    layers: float  # the share that holds; at the end of the data it may be less than was asked

    def line(self, stats: KVStats, available: int, share: float) -> str:
        """Say how much was read, and what is expected of the rest."""
        read = max(layer.tokens_read for layer in stats.layers.values())
        text = (
            f"--until {share:g}: {read:,} of {available:,} tokens were read; "
            f"the next {AHEAD * stats.tokens:,} are expected to go at most {100 * share:g}% beyond the "
            f"scales in {int(100 * self.layers)}% of layers"
        )
        if self.layers >= LAYERS:
            return text
        return f"{text}, not in {LAYERS:.0%} as was asked: use more text, or --headroom auto"


def looks(batches: Sequence[Batch]) -> list[int]:
    """Return the numbers of batches after which to look; they depend on the batches alone."""
    numbers, tokens, samples, due = [], 0, 0, FIRST_TOKENS
    for number, batch in enumerate(batches, 1):
        tokens += batch.num_tokens - batch.skip_first * len(batch.sample_ids)  # those that are counted
        samples += len(batch.sample_ids)
        if (tokens >= due and samples >= FIRST_SAMPLES) or number == len(batches):
            numbers.append(number)
            due = int(tokens * _GROWTH)
    return numbers


def read_until(share: Share, batches: Sequence[Batch], world: World, recipe: Recipe) -> tuple[KVStats, Stop]:
    """Read this process's `share` of `batches` with the others, and look together.

    The statistics are those of all processes, of the first batches up to the stop: the same whatever their
    number. A process that has read further already, before it was resumed, knows that all decided to go on.
    """
    counts = looks(batches)
    ends = [len(range(world.rank, count, world.size)) for count in counts]
    skip = max(world.gather(sum(end < share.batches_read for end in ends)))
    for look, (count, end) in enumerate(zip(counts, ends, strict=True)):
        own = world.together(lambda end=end: share.read(end))  # type: ignore[misc]
        if look < skip:
            continue
        stats = reduce(KVStats.merge, [part for part in world.gather(own) if part is not None])
        layers = covered_share(stats, derive_scales(stats, recipe), AHEAD, recipe.data.until or 0)
        if layers >= LAYERS or count == len(batches):
            return stats, Stop(count, layers)
    raise AssertionError("the last look is at the end")
