"""The factors that `fp8kv bake` would put into a model's weights, without writing them."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from calib.choices import Purpose
from calib.errors import InputError
from calib.files.model_directory import ModelDirectory
from calib.rescale.choosing import check_purpose, factors_for_fp8, factors_for_int8, per_part
from calib.rescale.edits import FOR_FP8, FOR_INT8, Editing, fitting
from calib.rescale.held import held_factors
from calib.rescale.parameters import cached_attention, rescaled_parameters
from calib.rescale.products import LayerFactors
from calib.rescale.proof import kl_between, observe, prove
from calib.rescale.rescaling import check_no_scales
from calib.scales.observers import AbsMax
from calib.scales.stats import KVStats


def baked_factors(
    model: PreTrainedModel, checkpoint: ModelDirectory, stats: KVStats, purpose: Purpose
) -> tuple[dict[int, LayerFactors], list[str]]:
    """What K and V of each layer_idx would be multiplied by, proved on a few tokens; warnings.

    InputError or UnsupportedModelError where `bake` refuses the model, or has nothing to change.
    """
    check_purpose(stats, purpose)
    check_no_scales(checkpoint)
    modules = cached_attention(model)
    if purpose == "fp8":
        each = per_part(stats)
        scales = each.scales(strategy="attn_head", observer=AbsMax(), targets="kv")
        wanted, coarser = factors_for_fp8(scales, model, modules), FOR_FP8
    else:
        wanted, coarser = factors_for_int8(stats, model, modules), FOR_INT8
    editing = Editing.of(checkpoint, None, "", exact=True)
    near = held_factors(editing, model, modules, wanted, stats, purpose)
    factors, _, _ = fitting(editing, model, modules, near, coarser)
    changes = rescaled_parameters(model, modules, factors)
    if not changes:
        raise InputError(f"K and V are as an {purpose} cache wants them: nothing to bake")
    # times 1 as well: kernels may add in another order where memory is aligned otherwise
    same = [replace(each, factor=torch.ones_like(each.factor)) for each in changes]
    before, after = observe(model, same), observe(model, changes)
    prove(before, after, modules, factors, "the model cannot be baked")
    norms = editing.norms_adding_one(model, changes)
    rounded = {
        each.name: each.product(weight).to(model.get_parameter(each.name))
        for each, weight in norms
        if not each.is_exact(weight)
    }
    warnings = []
    if rounded:
        exact = [each for each in changes if each.name not in rounded]
        kl = kl_between(before, observe(model, exact, rounded))
        warnings = [
            f"rows on weights baked for {purpose} leave out that `bake` rounds {len(rounded)} "
            f"weights of norms: a KL of {kl:.2g} nats per token on a few random tokens"
        ]
    return {modules[name].layer_idx: each for name, each in factors.items()}, warnings
