"""One process's share of a calibration: its batches, from where an earlier run had come."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from calib.measure.attention import AttentionMap
from calib.data import Batch
from calib.errors import InputError
from calib.measure.loop import calibrate
from calib.recipe import Recipe
from calib.measure.resume import SavedProgress
from calib.scales.stats import KVStats


def calibrate_share(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    recipe: Recipe,
    attention: AttentionMap,
    saved: SavedProgress,
    *,
    resume: bool,
    advance: Callable[[int], None] = lambda tokens: None,
) -> KVStats:
    """Calibrate on `batches`, saving now and then; with `resume`, only on those not yet done.

    Args:
        model: the model.
        batches: this process's.
        recipe: says what is collected.
        attention: the model's cached attention modules.
        saved: where progress is kept.
        resume: go on where an earlier run of the same kind was stopped.
        advance: called with the tokens of each batch.

    Raises:
        InputError: the saved progress is damaged or of another run, or cannot be written.
        CalibrationError: K, V or Q held NaN or Inf.
    """
    if not resume:
        saved.forget()
    before, done = saved.load()
    if done > len(batches):
        raise InputError(
            f"the saved progress covers {done} batches of {len(batches)}; it is damaged, so leave "
            "--resume away to start again"
        )
    for batch in batches[:done]:
        advance(batch.num_tokens)

    def on_batch(batch: Batch, so_far: Callable[[], KVStats]) -> None:
        nonlocal done
        done += 1
        advance(batch.num_tokens)
        saved.save_sometimes(lambda: _merged(before, so_far()), done)

    if before is not None and done == len(batches):
        return before
    rest = batches[done:]
    return _merged(before, calibrate(model, rest, recipe, attention=attention, on_batch=on_batch))


def _merged(before: KVStats | None, new: KVStats) -> KVStats:
    return new if before is None else before.merge(new)
