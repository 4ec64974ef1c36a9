"""The whole evaluation: calibrate on one part of the data, measure every variant on another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.data import CalibrationData, load_data
from calib.devices import check_token_ids
from calib.errors import InputError
from calib.eval.calibration import calibrate_on, calibrate_on_random_tokens, evaluation_recipe
from calib.eval.continuation import Continuation, split_texts
from calib.eval.given import given_variants, samples_seen
from calib.eval.material import Material, make_material
from calib.eval.measure import Measured, measure
from calib.eval.search import Search, search
from calib.eval.suites import Suite, fitting_suite
from calib.eval.task_files import Tasks, find_tasks
from calib.eval.tasks import run_tasks, task_variants
from calib.eval.variants import Variant, build_variants
from calib.model import find_checkpoint, load_config, load_model, load_tokenizer, model_positions
from calib.recipe import EvaluationRecipe, Recipe
from calib.stats import KVStats
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.hf import Backend


@dataclass(frozen=True)
class Evaluation:
    """What was measured, and on what."""

    model: str
    suite: Suite
    backend: str
    dtype: str
    device: str  # torch's word: "cpu", "cuda"
    source: str
    fingerprint: str
    calibration_tokens: int
    bytes_per_token: dict[str, int]  # K and V of one token: "fp8" and "16bit"
    measured: dict[str, Measured]
    prompts: tuple[str, ...]
    texts: dict[str, list[Continuation]]  # after each prompt, by variant
    search: Search | None
    tasks: dict[str, Any]  # as in the report; empty: none were asked for
    warnings: tuple[str, ...]


def evaluate(
    model_name: str,
    recipe: Recipe,
    *,
    scales: Sequence[Path] = (),
    suite: Suite | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Evaluation:
    """Compare FP8 caches of `model_name` with its own, on documents that no scale has seen.

    Args:
        model_name: local directory, Hub id or `builtin:` name.
        recipe: what is measured, on which data, and how the model is loaded.
        scales: calibrations to compare, besides the scales that are derived here.
        suite: how much is measured; default: as the recipe says.
        progress: called with what is being done.

    Raises:
        Fp8kvError: anything that a user can put right.
    """
    wanted = recipe.evaluation
    checkpoint = find_checkpoint(model_name)
    config = load_config(checkpoint, recipe)
    suite, notes = fitting_suite(config, wanted, suite)
    recipe = _on_cpu_in_float32(evaluation_recipe(recipe, suite))
    tasks = find_tasks(wanted.tasks, wanted.task_limit)
    progress("load")
    tokenizer, model = load_tokenizer(checkpoint, recipe), load_model(checkpoint, config, recipe)
    compared = given_variants(scales, model)
    data, material, warnings = _data(recipe, suite, scales, tokenizer, model)
    progress("calibrate")
    stats = calibrate_on(model, data.samples[: suite.calibration_samples], recipe)
    built_in = build_variants(stats, calibrate_on_random_tokens(model, tokenizer, recipe))
    chosen = _chosen(built_in, wanted.variants) + compared
    return Evaluation(
        model=model_name,
        suite=suite,
        backend=_backend(model, wanted.backend),
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        source=data.source,
        fingerprint=data.fingerprint,
        calibration_tokens=stats.tokens,
        bytes_per_token=_bytes_per_token(stats),
        prompts=tuple(map(tokenizer.decode, material.prompts)),
        warnings=(*notes, *data.warnings, *warnings),
        **_results(model, tokenizer, chosen, material, tasks, wanted, progress),
    )


def _results(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    variants: Sequence[Variant],
    material: Material,
    tasks: Tasks,
    wanted: EvaluationRecipe,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """What is measured, by its name in `Evaluation`."""
    try:
        measured = measure(model, tokenizer, variants, material, wanted.backend, progress)
        caches = task_variants(variants, wanted.variants)
        return {
            "measured": measured,
            "texts": _texts(tokenizer, measured),
            "search": _search(model, variants, material, wanted, progress),
            "tasks": run_tasks(model, tokenizer, tasks, caches, wanted.backend, progress),
        }
    except AttentionError as error:
        raise InputError(str(error)) from error


def _search(
    model: PreTrainedModel,
    variants: Sequence[Variant],
    material: Material,
    wanted: EvaluationRecipe,
    progress: Callable[[str], None],
) -> Search | None:
    """Among the layers of the first scales that were given, else of scales per head, else any."""
    if wanted.kl_budget is None:
        return None
    ranks = {"given": 0, "attn_head": 1}
    served = [variant for variant in variants if variant.served]
    if not served:
        raise InputError("a search needs scales that engines load: give --scales or keep attn_head")
    subject = min(served, key=lambda v: min(ranks.get(v.kind, 2), ranks.get(v.name, 2)))
    documents = material.documents[: material.layer_documents]
    return search(model, subject, documents, wanted.kl_budget, wanted.backend, progress)


def _texts(
    tokenizer: PreTrainedTokenizerBase, measured: dict[str, Measured]
) -> dict[str, list[Continuation]]:
    return {
        name: split_texts(tokenizer, found.texts, found.same_tokens)
        for name, found in measured.items()
        if found.texts
    }


def _data(
    recipe: Recipe,
    suite: Suite,
    scales: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
) -> tuple[CalibrationData, Material, list[str]]:
    """Samples to calibrate on, and what is measured: of the samples those no scale has seen."""
    seen, warnings = samples_seen(scales, recipe.data)
    samples = max(seen, suite.calibration_samples) + suite.documents
    wanted = recipe.data.model_copy(update={"samples": samples})
    data, positions = load_data(wanted, tokenizer, lambda: model), model_positions(model.config)
    material = make_material(tokenizer, data.samples, suite, seen=seen, positions=positions)
    check_token_ids(chain(*data.samples, material.passkey_ids), tokenizer, model)
    return data, material, warnings


def _on_cpu_in_float32(recipe: Recipe) -> Recipe:
    # rounding activations to bfloat16 would hide most of what the cache changes
    on_cpu = recipe.device == "cpu" or not torch.cuda.is_available()
    dtype = "float32" if recipe.dtype == "auto" and on_cpu else recipe.dtype
    return recipe.model_copy(update={"dtype": dtype})


def _chosen(variants: list[Variant], names: Sequence[str] | None) -> list[Variant]:
    if names is None:
        return variants
    return [v for v in variants if v.name in names or v.kind == "control"]


def _backend(model: PreTrainedModel, backend: Backend) -> str:
    if backend != "auto":
        return backend
    return "triton" if model.device.type == "cuda" else "torch"


def _bytes_per_token(stats: KVStats) -> dict[str, int]:
    values = sum(layer.k.amax.numel() + layer.v.amax.numel() for layer in stats.layers.values())
    return {"fp8": values, "16bit": 2 * values}
