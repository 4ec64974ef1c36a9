"""Write a checkpoint whose K and V are multiplied, and prove that nothing else changed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.capture.attention import CachedAttention
from calib.choices import Purpose
from calib.errors import InputError
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.names import JSON_FILE, is_of_cache
from calib.progress import SILENT, Progress
from calib.recipe import Recipe
from calib.rescale.edits import Coarser, Editing, fitting
from calib.rescale.parameters import cached_attention, rescaled_parameters
from calib.rescale.products import Factors, LayerFactors
from calib.rescale.proof import Observed, kl_between, load_exact, observe, prove, prove_written
from calib.rescale.shards import write_rescaled

Choose = Callable[[PreTrainedModel, dict[str, CachedAttention]], Factors]
# the nearest that the weights hold
Hold = Callable[[Editing, PreTrainedModel, dict[str, CachedAttention], Factors], Factors]


@dataclass(frozen=True)
class Rescaling:
    """What was changed, and what was seen before and after."""

    factors: Factors
    wanted: Factors  # where all weights would hold them
    changed: list[str]  # names of tensors in the checkpoint
    before: Observed
    after: Observed
    rounded: list[str]  # names of norms' weights that do not hold the product
    left: dict[str, str]  # layers that stay as they are, and why

    @property
    def kl(self) -> float:
        """Nats per token by which the outputs differ, on the few tokens of the proof."""
        return kl_between(self.before, self.after)

    @property
    def per_head(self) -> tuple[int, int]:
        """In how many layers heads have factors of their own, for K and for V."""
        k = sum(bool((layer.k != layer.k[:1]).any()) for layer in self.factors.values())
        return k, sum(bool((layer.v != layer.v[:1]).any()) for layer in self.factors.values())

    @property
    def v_as_it_is(self) -> int:
        """In how many layers V gets no factor."""
        return sum(bool((layer.v == 1).all()) for layer in self.factors.values())

    def short(self, purpose: Purpose) -> tuple[float, float]:
        """Octaves by which a factor is smaller than wanted at most, for K and for V.

        Integers have a scale for each head: what all channels of one lack costs them nothing.
        """
        pairs = [(self.wanted[name], self.factors[name]) for name in self.wanted]
        shares = purpose == "int8"

        def octaves(wanted: Tensor, factor: Tensor) -> float:
            lacking = (wanted / factor).log2()
            return float((lacking - shares * lacking.amin(-1, keepdim=True)).max())

        k, v = (max(octaves(getattr(w, x), getattr(f, x)) for w, f in pairs) for x in "kv")
        return k, v

    def factors_json(self) -> dict[str, Any]:
        """K's and V's factors by module: [K] where a head has one, else [K, D]."""
        return {name: {"k": _plain(each.k), "v": _plain(each.v)} for name, each in self.factors.items()}


def _plain(heads: Tensor) -> list[Any]:
    alike = bool((heads == heads[:, :1]).all())
    found: list[Any] = (heads[:, 0] if alike else heads).tolist()
    return found


def check_no_scales(checkpoint: ModelDirectory) -> None:
    """Refuse a model with KV scales, which fit no other K and V."""
    files = open_model_directory(checkpoint.path, weights=False)
    names = [tensor.name for tensor in files.tensors] + [JSON_FILE] * (files.json is not None)
    if scale := next(chain(filter(is_of_cache, checkpoint.entries), names), None):
        raise InputError(
            f"'{checkpoint.path}' has KV scales ('{scale}'), which would not fit another K and V; "
            "take them out with fp8kv strip"
        )


def rescale(
    checkpoint: ModelDirectory,
    out: Path,
    recipe: Recipe,
    choose: Choose,
    *,
    what: str,
    hold: Hold = lambda _editing, _model, _modules, wanted: wanted,
    coarser: Sequence[Coarser] = (),
    advice: str = "",
    exact: bool = True,
    progress: Progress = SILENT,
) -> Rescaling:
    """Fill `out` with `checkpoint`, its K and V multiplied by the factors that are chosen.

    Unless `exact` is False, factors are powers of two, and the same outputs are proved bit for bit
    on what lies on disk, but for norms that round a weight; else on the model in memory, with the
    nearest powers. Refusals name `what` was to be made, with `advice` where a product is not exact.
    The recipe's dtype is that of the written weights. `hold` and `coarser` factors are for weights
    that do not hold those that are chosen.
    """
    progress.stage("load")
    model = load_exact(checkpoint, recipe)
    before, modules = observe(model), cached_attention(model)
    dtype = None if recipe.dtype == "auto" else torch.float32
    editing = Editing.of(checkpoint, dtype, advice, exact=exact)
    progress.stage("choose factors")
    wanted = choose(model, modules)
    if not exact:
        powers = {name: _powers_of_two(each) for name, each in wanted.items()}
        tried = observe(model, rescaled_parameters(model, modules, powers))
        prove(before, tried, modules, powers, what)
    near = hold(editing, model, modules, wanted)
    factors, edits, left = fitting(editing, model, modules, near, coarser)
    norms = editing.norms_adding_one(model, rescaled_parameters(model, modules, factors))
    rounded = [pair for pair in norms if exact and not pair[0].is_exact(pair[1])]
    own = {each.name: model.get_parameter(each.name).detach().clone() for each, _ in rounded}
    del model  # one copy in memory is enough
    write_rescaled(checkpoint, edits, out, dtype, progress)
    progress.stage("prove")
    model = load_exact(open_model_directory(out), recipe)
    after = observe(model)
    if exact:
        same = observe(model, [change for change, _ in rounded], own) if rounded else after
        prove(before, same, modules, factors, what)
        prove_written(model, rounded, what)
    checkpoint.check_unchanged()
    return Rescaling(factors, wanted, sorted(edits), before, after, sorted(own), left)


def _powers_of_two(factors: LayerFactors) -> LayerFactors:
    return LayerFactors(*(each.log2().round().exp2() for each in (factors.k, factors.v)))
