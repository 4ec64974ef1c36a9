"""The factors of K that norms hold which multiply by 1 + weight, channel pair by channel pair."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.capture.attention import CachedAttention
from calib.choices import Purpose
from calib.rescale.edits import Editing
from calib.rescale.one_plus import is_held
from calib.rescale.pairs import pairs_of
from calib.rescale.parameters import rescaled_parameters
from calib.rescale.products import Factors, LayerFactors
from calib.scales.stats import KVStats

_POWERS = torch.arange(-16, 17)  # of two, that are tried


def held_factors(
    editing: Editing,
    model: PreTrainedModel,
    modules: Mapping[str, CachedAttention],
    wanted: Factors,
    stats: KVStats,
    purpose: Purpose,
) -> Factors:
    """The factors nearest to `wanted` that norms of K hold; those of other layers as they are.

    For integers only the differences between channels matter, so all may be larger or smaller.
    For FP8 no channel becomes larger than the largest is meant to be.
    """
    tables = {name: _table(editing, model, module) for name, module in modules.items()}
    of_norms = {name: table for name, table in tables.items() if table is not None}
    pairs = pairs_of(model, {name: modules[name] for name in of_norms})
    found = dict(wanted)
    for name, table in of_norms.items():
        pair, powers = pairs[name], wanted[name].k[0].log2().round().long()
        table = table & table[:, pair]
        shifts = [0]
        if purpose == "int8":
            shifts = sorted(_POWERS.tolist(), key=abs)
        else:
            amax = stats.layers[name].k.amax.amax(0)
            table = table & _below_largest(amax.maximum(amax[pair]), powers)
        far, k = min((_nearest(table, powers + shift) for shift in shifts), key=lambda x: x[0])
        if far < float("inf"):
            found[name] = LayerFactors(k.float().exp2().expand_as(wanted[name].k), wanted[name].v)
    return found


def _table(editing: Editing, model: PreTrainedModel, module: CachedAttention) -> Tensor | None:
    """Whether each channel holds each power of two [powers, D]; None without such norms."""
    if module.latent or not editing.exact:
        return None
    heads = torch.ones(module.num_kv_heads, module.head_dim)
    twice = LayerFactors(2 * heads, torch.ones(module.num_kv_heads, module.v_head_dim))
    changes = rescaled_parameters(model, {module.name: module}, {module.name: twice})
    norms = editing.norms_adding_one(model, changes)
    if not norms:
        return None
    octaves = [(each, weight, each.factor.log2()) for each, weight in norms]
    return torch.stack(
        [
            is_held([(replace(x, factor=(o * power).exp2()), weight) for x, weight, o in octaves])
            for power in _POWERS
        ]
    )


def _below_largest(amax: Tensor, powers: Tensor) -> Tensor:
    """Which factors leave channels of `amax` [D] below the largest one times its power [D]."""
    largest = (amax.double() * powers.double().exp2()).amax()
    products = amax.double() * _POWERS.double().exp2()[:, None]
    return (_POWERS[:, None] <= powers) | (products <= largest)


def _nearest(table: Tensor, powers: Tensor) -> tuple[float, Tensor]:
    """How far the nearest powers [D] that `table` allows are in all, and these."""
    far = (_POWERS[:, None] - powers).abs().double().masked_fill(~table, torch.inf)
    least, at = far.min(0)
    return least.sum().item(), _POWERS[at]
