"""`fp8kv bake`: a model that computes the same, whose K and V suit a cache without scales."""

import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from calib.capture.directory_scales import attention_facts
from calib.choices import DType, Purpose
from calib.engines.cache_support import find_int8_flag
from calib.engines.catalogue import find_engine
from calib.engines.simulate_loading import find_flags_at_one
from calib.errors import InputError
from calib.files.atomic import atomic_directory, claimed
from calib.files.cache_type import FP8_MAX
from calib.files.calibration import statistics_file
from calib.files.fingerprint import baked_for, fingerprint, fingerprints, weights_digest
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.names import BAKE_FILE, BAKE_KEY, CONFIG_FILE
from calib.files.strict_json import read_object
from calib.formats.card import prepend_card, render_card
from calib.formats.directory import (
    ADAPTER_FILE,
    back_up,
    check_output,
    check_places,
    complete,
    local_directory,
    other_weights,
    write_json,
)
from calib.models.quantized.weights import split_weights
from calib.models.sources import find_model, short_name
from calib.progress import SILENT, Progress
from calib.recipe import Recipe
from calib.rescale.factors import FactorChoice, baked_fp8_type, check_purpose, choose_baked_factors
from calib.rescale.pipeline import (
    RescalePlan,
    Rescaling,
    check_no_scales,
    choose_dtype_flag,
    exact_recipe,
    plan_rescaling,
    rescale,
)
from calib.rescale.proof import kl_between, observe, prove
from calib.rescale.stored_weights import StoredModel
from calib.rescale.weight_changes import LayerFactors
from calib.same_model.check import ModelFacts, check_same_model, model_facts, scales_facts, statistics_layers
from calib.scales.stats import KVStats
from calib.scales.stats_file import Calibration, open_calibration
from calib.scales.text_summary import records_json, text_warnings


@dataclass(frozen=True)
class Baked:
    """A model that was baked."""

    model: str
    output: Path
    purpose: Purpose
    dtype: str  # of the weights: auto, the source's, or float32
    rescaling: Rescaling
    latent: bool = False  # K are latents, V k_pe (MLA), in at least one layer
    backup: Path | None = None  # of the files that were replaced in place
    warnings: tuple[str, ...] = ()  # of too little text, and of an engine that does not take the model

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints, also kept beside the weights."""
        plan = self.rescaling.plan
        return {
            "fp8kv_bake": 1,
            "model": self.model,
            "output": str(self.output),
            "for": self.purpose,
            "exact": not plan.rounded,
            "dtype": self.dtype,
            "kl": self.rescaling.kl,
            "rounded": self.rescaling.rounded,
            "left": plan.unchanged_layers,
            "layers": len(plan.factors),
            "latent": self.latent,
            "layers_with_factors_per_head": dict(zip("kv", plan.layers_per_head, strict=True)),
            "layers_with_v_as_it_is": plan.layers_without_v,
            "octaves_short": dict(zip("kv", plan.missing_octaves(self.purpose), strict=True)),
            "changed": self.rescaling.changed,
            "backup": self.backup and str(self.backup),
            "warnings": [*self.warnings],
        }


def bake(
    name: str,
    scales: Path,
    purpose: Purpose,
    output: Path | None = None,
    *,
    in_place: bool = False,
    overrides: dict[str, Any],
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> Baked:
    """Write the model `name` with factors moved from Q to K and from the output projection to V.

    The factors are made of the calibration `scales`. If the model cannot be shown to compute
    the same, nothing is written and an InputError or UnsupportedModelError is raised.
    """
    check_places(output, in_place=in_place, overwrite=overwrite)
    recipe = exact_recipe(overrides)
    progress.stage("load")
    checkpoint = find_model(name)
    if in_place:
        output = local_directory(name)
    else:
        output = output or Path(f"{short_name(name)}-baked-{purpose}")
        check_output(output, checkpoint.path, overwrite=overwrite)
        check_output(output, statistics_file(scales).parent, overwrite=overwrite, kind="calibration")
    _check_bakeable(checkpoint, recipe.dtype, in_place=in_place)
    calibration = open_calibration(scales)
    stats, measured = calibration.stats, calibration.recipe()
    check_purpose(stats, purpose)
    _check_measured(calibration, name, checkpoint)

    def choose(source: StoredModel) -> FactorChoice:
        shapes = attention_facts(type(source.model).__name__, source.modules, stats.shared)
        check_same_model(ModelFacts(str(scales), layers=statistics_layers(stats)), shapes)
        return choose_baked_factors(stats, purpose, measured, source)

    with (
        claimed(output, overwrite=overwrite or in_place) as claim,
        atomic_directory(output, claim=claim) as scratch,
    ):
        refusal = f"'{name}' cannot be baked"
        rescaling = rescale(checkpoint, scratch, recipe, choose, refusal=refusal, progress=progress)
        warnings = tuple(_list_warnings(stats, purpose, rescaling.plan))
        baked = Baked(name, output, purpose, recipe.dtype, rescaling, stats.latent, warnings=warnings)
        _check_fits(scales, baked)
        _describe(baked, checkpoint, scratch, calibration)
        if in_place:
            complete(scratch, output)
            baked = replace(baked, backup=back_up(output, scratch))
    return baked


def baked_factors(
    model: PreTrainedModel, checkpoint: ModelDirectory, stats: KVStats, purpose: Purpose
) -> tuple[dict[int, LayerFactors], list[str]]:
    """Return factors as `bake` writes them, proved, by layer_idx, and warnings; refuse what it refuses."""
    check_purpose(stats, purpose)
    check_no_scales(checkpoint)
    source = StoredModel(model, checkpoint)
    plan = plan_rescaling(source, partial(choose_baked_factors, stats, purpose, Recipe()))
    changes = source.list_changes(plan.factors)
    if not changes:
        raise InputError(f"K and V are as an {purpose} cache wants them: nothing to bake")
    # the reference multiplies by 1: with another alignment of memory, kernels may add in another order
    ones = [replace(change, factor=torch.ones_like(change.factor)) for change in changes]
    before, after = observe(model, ones), observe(model, changes)
    prove(before, after, source.modules, plan.factors, "the model cannot be baked")
    warnings = []
    if plan.rounded:
        rounded = {
            change.name: change.product(weight).to(model.get_parameter(change.name))
            for change, weight in plan.rounded
        }
        exact = [change for change in changes if change.name not in rounded]
        kl = kl_between(before, observe(model, exact, rounded))
        warnings = [
            f"rows on weights baked for {purpose} leave out that `bake` rounds {len(rounded)} weights of "
            f"norms: a KL of {kl:.2g} on a few random tokens"
        ]
    layers = {x: layer for name, layer in plan.factors.items() for x in (name, *source.modules[name].readers)}
    return {model.get_submodule(name).layer_idx: layer for name, layer in layers.items()}, warnings


def _check_bakeable(checkpoint: ModelDirectory, dtype: DType, *, in_place: bool) -> None:
    """Refuse a model that was baked, has scales or other weights, or is quantised and gets a `dtype`."""
    if purpose := baked_for(checkpoint):
        raise InputError(f"'{checkpoint.path}' is baked for {purpose}; bake the model it was made from")
    check_no_scales(checkpoint)
    unused = other_weights(checkpoint)
    if unused and (in_place or ADAPTER_FILE in unused):
        name = ADAPTER_FILE if ADAPTER_FILE in unused else unused[0]
        way = "merge adapters first" if name == ADAPTER_FILE else "move it away, or write elsewhere with -o"
        raise InputError(f"'{checkpoint.path}' holds '{name}' too, which would not fit what is baked; {way}")
    if dtype != "auto" and split_weights(checkpoint).label:
        raise InputError(
            f"the weights of '{checkpoint.path}' are quantised: their scales take powers of two in their own "
            "type; leave --dtype away"
        )


def _check_measured(calibration: Calibration, name: str, checkpoint: ModelDirectory) -> None:
    """Refuse statistics of another model; of another checkpoint, unless K and V are the same."""
    # the config's number of layers is not compared (LongCat's is half the true one): `choose` compares layers
    source = scales_facts(calibration.path, report=calibration.report)
    model = replace(model_facts(checkpoint, calibration.stats.layers), name=name)
    if source.marks is None:  # the fingerprint reads samples alone, and recognises edited models less often
        model = replace(model, fingerprints=fingerprints(checkpoint))
    check_same_model(source, model)


def _check_fits(scales: Path, baked: Baked) -> None:
    """Refuse a model that does not change, or whose K and V go far beyond FP8 on the tokens of the proof."""
    if not baked.rescaling.changed:
        raise InputError(f"'{baked.model}' is as an {baked.purpose} cache wants it: nothing to bake")
    largest = max(map(baked.rescaling.after.amax, "kv"))  # other text may go a little beyond
    parts = "a latent or k_pe" if baked.latent else "K or V"
    if baked.purpose == "fp8" and largest > 2 * FP8_MAX["e4m3fn"]:
        raise InputError(
            f"{parts} reaches {largest:g} at 1.0, beyond FP8: '{scales}' is not of this model, or saw too "
            "little text; calibrate again"
        )


def _describe(baked: Baked, checkpoint: ModelDirectory, out: Path, calibration: Calibration) -> None:
    facts = {
        "fp8_dtype": baked_fp8_type(calibration.recipe()),
        "source": fingerprint(checkpoint),
        "weights": weights_digest(open_model_directory(out, weights=False)),
        "dataset": calibration.report["dataset"],
        "factors": baked.rescaling.plan.factors_json(),
        **records_json(calibration.stats.records),
    }
    document = baked.to_json()
    write_json(out / BAKE_FILE, document | facts)
    config = read_object(out / CONFIG_FILE)
    write_json(out / CONFIG_FILE, config | {BAKE_KEY: {"for": baked.purpose, "weights": facts["weights"]}})
    card = document | {"purpose": baked.purpose, "dataset": facts["dataset"]}
    card_text = render_card("bake", **card, commands=_list_serve_commands(baked, checkpoint))
    prepend_card(checkpoint.path, card_text, out)


def _list_warnings(stats: KVStats, purpose: Purpose, plan: RescalePlan) -> list[str]:
    """Say whether too little text was read, and whether vLLM's INT8 cache takes heads of this size."""
    warnings = text_warnings(stats.text, stats.tokens)
    if purpose == "int8" and (problem := find_int8_flag(find_engine("vllm"), plan.shapes)[1]):
        warnings.append(f"vLLM does not serve it: {problem}")
    return warnings


def _list_serve_commands(baked: Baked, checkpoint: ModelDirectory) -> list[str]:
    """Return the commands that serve a baked model; empty if no engine is known to serve it."""
    path, is_float32 = shlex.quote(str(baked.output)), baked.dtype == "float32"
    dtype = choose_dtype_flag(baked.dtype, latent=baked.latent)
    # TensorRT-LLM's and LMDeploy's flags for the type of the weights are not known
    names = ("vllm", "sglang") if is_float32 else ("vllm", "sglang", "tensorrt-llm", "lmdeploy")
    commands = []
    for engine in map(find_engine, names):
        flags = find_flags_at_one(engine, checkpoint.config) if baked.latent else engine.flag
        if baked.purpose == "int8":
            flags = find_int8_flag(engine, baked.rescaling.plan.shapes)[0]
        if flags:
            commands.append(f"{engine.serve.format(path=path)} {flags}{dtype}")
    return commands
