"""Write a checkpoint whose K and V are multiplied, and prove that nothing else changed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedModel

from calib.errors import InputError
from calib.measure.attention import CachedAttention
from calib.model.checkpoint import Checkpoint, open_checkpoint
from calib.recipe import Recipe
from calib.rescale.edits import Coarser, Editing, fitting
from calib.rescale.parameters import Factors, cached_attention
from calib.rescale.proof import Observed, load_exact, observe, prove
from calib.rescale.shards import write_rescaled
from calib.scalefiles.file_names import JSON_FILE
from calib.scalefiles.names import is_of_cache

Choose = Callable[[PreTrainedModel, dict[str, CachedAttention]], Factors]


@dataclass(frozen=True)
class Rescaling:
    """What was changed, and what was seen before and after."""

    factors: Factors
    wanted: Factors  # where all weights would hold them
    changed: list[str]  # names of tensors in the checkpoint
    before: Observed
    after: Observed


def check_no_scales(checkpoint: Checkpoint) -> None:
    """Refuse a model with KV scales, which fit no other K and V."""
    files = [JSON_FILE] if (checkpoint.path / JSON_FILE).exists() else []
    if scale := next(chain(filter(is_of_cache, checkpoint.entries), files), None):
        raise InputError(
            f"'{checkpoint.path}' has KV scales ('{scale}'), which would not fit another K and V; "
            "take them out with fp8kv strip"
        )


def rescale(
    checkpoint: Checkpoint,
    out: Path,
    recipe: Recipe,
    choose: Choose,
    *,
    what: str,
    coarser: Sequence[Coarser] = (),
    advice: str = "",
    exact: bool = True,
) -> Rescaling:
    """Fill `out` with `checkpoint`, its K and V multiplied by the factors that are chosen.

    Unless `exact` is False, factors are powers of two, and the same outputs are proved bit for bit
    on what lies on disk. Refusals name `what` was to be made, with `advice` where a product is not
    exact. The recipe's dtype is that of the written weights. `coarser` factors are for weights
    that do not hold those.
    """
    model = load_exact(checkpoint, recipe)
    before, modules = observe(model), cached_attention(model)
    dtype = None if recipe.dtype == "auto" else torch.float32
    editing = Editing.of(checkpoint, dtype, advice, exact=exact)
    wanted = choose(model, modules)
    factors, edits = fitting(editing, model, modules, wanted, coarser)
    del model  # one copy in memory is enough
    write_rescaled(checkpoint, edits, out, dtype)
    after = observe(load_exact(open_checkpoint(out), recipe))
    if exact:
        prove(before, after, modules, factors, what)
    checkpoint.check_unchanged()
    return Rescaling(factors, wanted, sorted(edits), before, after)
