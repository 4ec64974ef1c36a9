"""`--until`: read until the scales hold what more text is expected to add, and no further."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from calib.capture.processes import World
from calib.capture.resume import Share
from calib.data import Batch
from calib.recipe import Recipe
from calib.scales.stats import KVStats, derive_scales
from calib.scales.summary import covered_share

LOOKAHEAD = 4  # the scales must hold so many times the tokens that were read
LAYER_SHARE = 0.95  # and must do so in this share of the layers
FIRST_TOKENS, FIRST_SAMPLES = 8192, 16  # a few documents say little about others
_GROWTH = 1.25  # of the tokens from one decision to the next


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
            f"the next {LOOKAHEAD * stats.tokens:,} are expected to go at most {100 * share:g}% beyond the "
            f"scales in {int(100 * self.layers)}% of layers"
        )
        if self.layers >= LAYER_SHARE:
            return text
        return f"{text}, not in {LAYER_SHARE:.0%} as was asked: use more text, or --headroom auto"


def decision_points(batches: Sequence[Batch]) -> list[int]:
    """Return the numbers of batches after which to decide; they depend on the batches alone."""
    numbers, tokens, samples, due = [], 0, 0, FIRST_TOKENS
    for number, batch in enumerate(batches, 1):
        tokens += batch.num_tokens - batch.skip_first * len(batch.sample_ids)  # those that are counted
        samples += len(batch.sample_ids)
        if (tokens >= due and samples >= FIRST_SAMPLES) or number == len(batches):
            numbers.append(number)
            due = int(tokens * _GROWTH)
    return numbers


def read_until(share: Share, batches: Sequence[Batch], world: World, recipe: Recipe) -> tuple[KVStats, Stop]:
    """Read `batches` together with the other processes until the scales hold; `share` is this process's part.

    Return the statistics of all processes, which do not depend on their number. A resumed process that has
    read further passes the decisions of before: all were to go on.
    """
    counts = decision_points(batches)
    ends = [len(range(world.rank, count, world.size)) for count in counts]
    skip = max(world.gather(sum(end < share.batches_read for end in ends)))
    for decision, (count, end) in enumerate(zip(counts, ends, strict=True)):
        own = world.together(lambda end=end: share.read(end))  # type: ignore[misc]
        if decision < skip:
            continue
        stats = reduce(KVStats.merge, [part for part in world.gather(own) if part is not None])
        layers = covered_share(stats, derive_scales(stats, recipe), LOOKAHEAD, recipe.data.until or 0)
        if layers >= LAYER_SHARE or count == len(batches):
            return stats, Stop(count, layers)
    raise AssertionError("the last decision is at the end")
