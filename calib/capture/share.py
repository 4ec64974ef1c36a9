"""The batches of one process, read step by step, with progress saved now and then."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from calib.capture.attention import AttentionMap
from calib.capture.loop import calibrate
from calib.capture.resume import SavedProgress
from calib.data import Batch
from calib.errors import InputError
from calib.recipe import Recipe
from calib.scales.stats import KVStats


class Share:
    """Statistics so far of `batches`, of which the first `done` were read.

    With `resume` it continues where an earlier run of the same kind was stopped, by what `saved`
    holds. `advance` is called with the tokens of each batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Sequence[Batch],
        recipe: Recipe,
        attention: AttentionMap,
        saved: SavedProgress,
        resume: bool,
        advance: Callable[[int], None],
    ) -> None:
        if not resume:
            saved.forget()
        self.stats, self.done = saved.load()
        if self.done > len(batches):
            raise InputError(
                f"the saved progress covers {self.done} batches of {len(batches)}; it is damaged, "
                "so leave --resume away to start again"
            )
        self._model, self._batches, self._recipe = model, batches, recipe
        self._attention, self._saved, self._advance = attention, saved, advance
        for batch in batches[: self.done]:
            advance(batch.num_tokens)

    def read(self, end: int) -> KVStats | None:
        """Read on to the first `end` batches; None where these are none, and none were read."""
        before, rest = self.stats, self._batches[self.done : end]

        def merged(new: KVStats) -> KVStats:
            return new if before is None else before.merge(new)

        def on_batch(batch: Batch, so_far: Callable[[], KVStats]) -> None:
            self.done += 1
            self._advance(batch.num_tokens)
            self._saved.save_sometimes(lambda: merged(so_far()), self.done)

        if rest or not self._batches:
            attention = self._attention
            new = calibrate(self._model, rest, self._recipe, attention=attention, on_batch=on_batch)
            self.stats = merged(new)
        return self.stats


def calibrate_share(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    recipe: Recipe,
    attention: AttentionMap,
    saved: SavedProgress,
    resume: bool,
    advance: Callable[[int], None] = lambda tokens: None,
) -> KVStats:
    """Read all `batches`; see `Share`."""
    share = Share(model, batches, recipe, attention, saved, resume, advance)
    stats = share.read(len(batches))
    assert stats is not None
    return stats
