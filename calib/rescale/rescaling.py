"""Write a checkpoint whose K and V are multiplied, and prove that nothing else changed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from calib.measure.attention import CachedAttention
from calib.model.checkpoint import Checkpoint, open_checkpoint
from calib.recipe import Recipe
from calib.rescale.edits import FOR_FP8, Coarser, Editing, fitting
from calib.rescale.parameters import (
    Factors,
    LayerFactors,
    cached_attention,
    rescaled_parameters,
)
from calib.rescale.proof import Observed, load_exact, observe, prove
from calib.rescale.shards import write_rescaled

Choose = Callable[[PreTrainedModel, dict[str, CachedAttention]], Factors]


@dataclass(frozen=True)
class Rescaling:
    """What was changed, and what was seen before and after."""

    factors: Factors
    wanted: Factors  # where all weights would hold them
    changed: list[str]  # names of tensors in the checkpoint
    before: Observed
    after: Observed


def rescale(
    checkpoint: Checkpoint,
    out: Path,
    recipe: Recipe,
    choose: Choose,
    *,
    what: str,
    coarser: Sequence[Coarser] = FOR_FP8,
    advice: str = "",
    exact: bool = True,
) -> Rescaling:
    """Fill `out` with `checkpoint`, its K and V multiplied by the factors that are chosen.

    Unless `exact` is False, factors are powers of two, and the same outputs are proved bit for bit
    on what lies on disk; else on the model in memory, with the nearest powers. Refusals name `what`
    was to be made, with `advice` where a product is not exact. The recipe's dtype is that of the
    written weights. `coarser` factors are for quantised weights that do not hold those.
    """
    model = load_exact(checkpoint, recipe)
    before, modules = observe(model), cached_attention(model)
    editing = Editing.of(checkpoint, advice, exact=exact)
    wanted = choose(model, modules)
    if not exact:
        near = {name: _powers_of_two(each) for name, each in wanted.items()}
        tried = observe(model, rescaled_parameters(model, modules, near))
        prove(before, tried, modules, near, what)
    factors, edits = fitting(editing, model, modules, wanted, coarser)
    del model  # one copy in memory is enough
    write_rescaled(checkpoint, edits, out, None if recipe.dtype == "auto" else torch.float32)
    after = observe(load_exact(open_checkpoint(out), recipe))
    if exact:
        prove(before, after, modules, factors, what)
    checkpoint.check_unchanged()
    return Rescaling(factors, wanted, sorted(edits), before, after)


def _powers_of_two(factors: LayerFactors) -> LayerFactors:
    return LayerFactors(*(each.log2().round().exp2() for each in (factors.k, factors.v)))
