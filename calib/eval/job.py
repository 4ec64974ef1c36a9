"""The whole evaluation: calibrate on one part of the data, measure every variant on another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.checkpoint import Checkpoint
from calib.data import load_data, make_batches, resolve_batch_size
from calib.derive import check_fits, load_scales
from calib.errors import InputError
from calib.eval.continuation import Continuation, make_passkeys, split_texts
from calib.eval.measure import Material, Measured, measure
from calib.eval.variants import Variant, build_variants
from calib.measure import calibrate
from calib.model import check_positions, find_checkpoint, load_config, load_model, load_tokenizer
from calib.recipe import Recipe
from calib.stats import KVStats
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.hf import Backend

_RANDOM_SAMPLES = 4


@dataclass(frozen=True)
class Suite:
    """How much is measured."""

    calibration_samples: int
    documents: int
    seq_len: int
    prompts: int
    new_tokens: int
    passkey_tokens: tuple[int, ...]
    passkey_depths: tuple[float, ...]
    layer_documents: int


SUITES = {
    "quick": Suite(12, 10, 512, 4, 32, (256,), (0.0, 0.5, 1.0), 2),
    "full": Suite(64, 64, 1024, 16, 64, (256, 512, 1024), (0.0, 0.25, 0.5, 0.75, 1.0), 8),
}


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
        variants: names to keep; default: all.
        backend: where FP8 caches run.
        progress: called with what is being done.

    Raises:
        Fp8kvError: anything that a user can put right.
    """
    recipe = _on_cpu_in_float32(_resized(recipe, suite))
    checkpoint = find_checkpoint(model_name)
    others = {_name(path): load_scales(path) for path in scales}
    progress("load")
    model, tokenizer = _load(checkpoint, recipe)
    data = load_data(recipe.data, tokenizer, lambda: model)
    held_out = _held_out(data.samples, suite)
    for each in others.values():
        check_fits(model, each)
    progress("calibrate")
    stats = _calibrate(model, data.samples[: suite.calibration_samples], recipe)
    random = _random_stats(model, tokenizer, recipe)
    chosen = _chosen(build_variants(stats, random, others), variants)
    material = _material(tokenizer, held_out, suite)
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
    check_positions(config, recipe.data.seq_len, "documents of")
    tokenizer = load_tokenizer(checkpoint, recipe)
    return load_model(checkpoint, config, recipe), tokenizer


def _resized(recipe: Recipe, suite: Suite) -> Recipe:
    samples = suite.calibration_samples + suite.documents
    data = recipe.data.model_copy(update={"samples": samples, "seq_len": suite.seq_len})
    return recipe.model_copy(update={"data": data, "means": True, "targets": "qkv"})


def _on_cpu_in_float32(recipe: Recipe) -> Recipe:
    # rounding activations to bfloat16 would hide most of what the cache changes
    on_cpu = recipe.device == "cpu" or not torch.cuda.is_available()
    dtype = "float32" if recipe.dtype == "auto" and on_cpu else recipe.dtype
    return recipe.model_copy(update={"dtype": dtype})


def _name(path: Path) -> str:
    return path.resolve().name


def _held_out(samples: Sequence[Sequence[int]], suite: Suite) -> list[Tensor]:
    held_out = samples[suite.calibration_samples :]
    if len(held_out) < suite.documents:
        raise InputError(
            f"the dataset gives {len(samples)} samples; this suite calibrates on "
            f"{suite.calibration_samples} and measures {suite.documents} others: "
            "use a larger dataset"
        )
    return [torch.tensor(sample) for sample in held_out]


def _calibrate(model: PreTrainedModel, samples: Sequence[Sequence[int]], recipe: Recipe) -> KVStats:
    batch_size = resolve_batch_size(recipe.data, model.device.type)
    return calibrate(model, make_batches(samples, batch_size, pad_id=0), recipe)


def _random_stats(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> KVStats:
    data = recipe.data.model_copy(update={"dataset": "random", "samples": _RANDOM_SAMPLES})
    samples = load_data(data, tokenizer, lambda: model).samples
    return _calibrate(model, samples, recipe)


def _chosen(variants: list[Variant], names: Sequence[str] | None) -> list[Variant]:
    if names is None:
        return variants
    known = {variant.name for variant in variants}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"no variant '{unknown[0]}'; there are: {', '.join(sorted(known))}")
    return [v for v in variants if v.name in names or v.kind == "control"]


def _material(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Tensor], suite: Suite
) -> Material:
    prompt_len = max(1, suite.seq_len // 8)
    prompts = [d[:prompt_len] for d in documents if len(d) >= prompt_len][: suite.prompts]
    lengths = [n for n in suite.passkey_tokens if n <= suite.seq_len]
    passkeys = make_passkeys(tokenizer, lengths, suite.passkey_depths)
    return Material(documents, prompts, suite.new_tokens, passkeys, suite.layer_documents)


def _backend(model: PreTrainedModel, backend: Backend) -> str:
    if backend != "auto":
        return backend
    return "triton" if model.device.type == "cuda" else "torch"


def _bytes_per_token(stats: KVStats) -> dict[str, int]:
    values = sum(layer.k.amax.numel() + layer.v.amax.numel() for layer in stats.layers.values())
    return {"fp8": values, "16bit": 2 * values}
