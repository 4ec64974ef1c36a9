"""The whole evaluation: calibrate on one part of the data, measure every variant on another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.checkpoint import Checkpoint
from calib.data import load_data
from calib.errors import InputError
from calib.eval.calibration import calibrate_on, calibrate_on_random_tokens, evaluation_recipe
from calib.eval.continuation import Continuation, split_texts
from calib.eval.given import given_variants
from calib.eval.material import make_material
from calib.eval.measure import Measured, measure
from calib.eval.suites import Suite
from calib.eval.variants import Variant, build_variants
from calib.model import check_positions, find_checkpoint, load_config, load_model, load_tokenizer
from calib.recipe import Recipe
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
    warnings: tuple[str, ...]


def evaluate(
    model_name: str,
    recipe: Recipe,
    suite: Suite,
    *,
    scales: Sequence[Path] = (),
    variants: Sequence[str] | None = None,
    backend: Backend = "auto",
    progress: Callable[[str], None] = lambda stage: None,
) -> Evaluation:
    """Compare FP8 caches of `model_name` with its own, on documents that no scale has seen.

    Args:
        model_name: local directory, Hub id or `builtin:` name.
        recipe: the data, and how the model is loaded; samples and lengths are the suite's.
        suite: how much is measured.
        scales: calibrations to compare, besides the scales that are derived here.
        variants: names to keep besides controls and `scales`; default: all.
        backend: where FP8 caches run.
        progress: called with what is being done.

    Raises:
        Fp8kvError: anything that a user can put right.
    """
    recipe = _on_cpu_in_float32(evaluation_recipe(recipe, suite))
    checkpoint = find_checkpoint(model_name)
    progress("load")
    model, tokenizer = _load(checkpoint, recipe)
    given = given_variants(scales, model)
    data = load_data(recipe.data, tokenizer, lambda: model)
    material = make_material(tokenizer, data.samples, suite, _positions(model))
    progress("calibrate")
    stats = calibrate_on(model, data.samples[: suite.calibration_samples], recipe)
    random = calibrate_on_random_tokens(model, tokenizer, recipe)
    chosen = _chosen(build_variants(stats, random), variants) + given
    try:
        measured = measure(model, tokenizer, chosen, material, backend, progress)
    except AttentionError as error:
        raise InputError(str(error)) from error
    ran, dtype = _backend(model, backend), str(model.dtype).removeprefix("torch.")
    source = (data.source, data.fingerprint, stats.tokens, _bytes_per_token(stats))
    prompts = tuple(tokenizer.decode(prompt) for prompt in material.prompts)
    texts = {
        name: split_texts(tokenizer, found.texts, found.same_tokens)
        for name, found in measured.items()
        if found.texts
    }
    conditions = (ran, dtype, model.device.type, *source)
    return Evaluation(model_name, suite, *conditions, measured, prompts, texts, data.warnings)


def _load(
    checkpoint: Checkpoint, recipe: Recipe
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    config = load_config(checkpoint, recipe)
    check_positions(config, recipe.data.seq_len, "--seq-len")
    tokenizer = load_tokenizer(checkpoint, recipe)
    return load_model(checkpoint, config, recipe), tokenizer


def _on_cpu_in_float32(recipe: Recipe) -> Recipe:
    # rounding activations to bfloat16 would hide most of what the cache changes
    on_cpu = recipe.device == "cpu" or not torch.cuda.is_available()
    dtype = "float32" if recipe.dtype == "auto" and on_cpu else recipe.dtype
    return recipe.model_copy(update={"dtype": dtype})


def _chosen(variants: list[Variant], names: Sequence[str] | None) -> list[Variant]:
    if names is None:
        return variants
    known = {variant.name for variant in variants}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"no variant '{unknown[0]}'; there are: {', '.join(sorted(known))}")
    return [v for v in variants if v.name in names or v.kind == "control"]


def _positions(model: PreTrainedModel) -> int | None:
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def _backend(model: PreTrainedModel, backend: Backend) -> str:
    if backend != "auto":
        return backend
    return "triton" if model.device.type == "cuda" else "torch"


def _bytes_per_token(stats: KVStats) -> dict[str, int]:
    values = sum(layer.k.amax.numel() + layer.v.amax.numel() for layer in stats.layers.values())
    return {"fp8": values, "16bit": 2 * values}
