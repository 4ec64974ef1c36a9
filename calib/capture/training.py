"""Scales of a model that is in memory, for a trainer that hands its weights to an engine."""

import warnings
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from calib.arguments import check_arguments
from calib.capture.attention import AttentionMap, map_attention
from calib.capture.capabilities import check_scales
from calib.capture.loop import TrainerBatch, calibrate, eval_mode
from calib.capture.processes import World, surrounding_world
from calib.choices import FormatName, Strategy
from calib.data import Batch
from calib.errors import InputError
from calib.files.config import find_quantization_config
from calib.files.model_directory import ModelDirectory
from calib.files.names import SINGLE_FILE
from calib.files.safetensors_header import Entry
from calib.formats import Export, check_recipe, export
from calib.formats.base import refusals_of
from calib.models.config import check_cacheable
from calib.recipe import Recipe
from calib.scales.scales import KVScales
from calib.scales.stats import KVStats, derive_scales
from calib.scales.text_summary import TextSummary
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.hf.swap import hold

# attributes of ZeRO-3's parameters and of DTensor: weights that are spread over processes
_SPREAD = ("ds_id", "placements")


@check_arguments
def scales_for(
    model: nn.Module,
    batches: Iterable[TrainerBatch],
    *,
    strategy: Strategy | None = None,
    format: FormatName = "vllm",
    recipe: Recipe | None = None,
    gather: bool = True,
) -> dict[str, Tensor]:
    """Measure `model` on `batches` and return its scales, by the names that engines load them by.

    These are the names in a checkpoint of `format`, such as `model.layers.0.self_attn.k_scale`, which an
    engine's loader takes as it takes those of weights. vLLM 0.32.0 on a CPU, serving a checkpoint of format
    vllm, takes such scales by `reload_weights`, with all weights; given alone to a second `load_weights` they
    are dropped without a word (make interop-scales). Scales are float32 on the CPU, [1] or, of strategy
    attn_head, [heads, 1, 1]; `x ≈ x_fp8 * scale`.

    A batch is a tensor [B, T] of token ids, a list of rows [T], or a mapping with `input_ids` and, where rows
    are padded, `attention_mask`. Other arguments of the model's forward that would change K or V are refused
    (pictures, embeddings, positions of packed rows); other keys are not read.

    Of `recipe` these count: strategy, observer, targets, fp8_dtype, headroom, center_keys, data.skip_first,
    data.allow_few_tokens, export.reduce and export.tp_size. `strategy` overrides the recipe's. Centred keys
    are refused: no engine has names for their means. Few tokens and repeated rows are a Python warning.

    DDP, torch.compile and, by `get_base_model`, PEFT are looked through. The model runs in eval mode and is
    left exactly as it was, and so are the random numbers, also after an error. Where torch.distributed is
    initialised, every process must call this: each measures its own batches, and all get the scales of all.
    With `gather=False` each is for itself.

    Raises:
        InputError: few tokens (fewer than 64, or than 16 different ones, unless data.allow_few_tokens), no
            transformers model, or one that is quantised, spread out, or in use by another thread.
        UnsupportedModelError: the model's attention cannot be observed.
        UnsupportedExportError: the format cannot hold such scales.
        CalibrationError: K, V or Q held NaN or Inf.
    """
    inner, changes = _unwrap(model), {"strategy": strategy} if strategy else {}
    recipe = (recipe or Recipe()).model_copy(update=changes)
    _check_weights(model, inner)
    with refusals_of("scales_for"):
        check_recipe(format, recipe)
        check_scales(recipe, (), inner.config, type(inner).__name__, "targets='qkv'")
        stats, doubts = _measure(inner, batches, recipe, format, gather)
        exported = _export(inner, derive_scales(stats, recipe), recipe, format)
    for doubt in (*doubts, *exported.doubts):
        warnings.warn(doubt, stacklevel=3)
    with torch.inference_mode(mode=False):
        return {name: tensor.clone() for name, tensor in exported.tensors.items()}


def _unwrap(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside of wrappers."""
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):  # PEFT
            inner = inner.get_base_model()
            continue
        # DDP, DeepSpeed and DataParallel; torch.compile
        parts = (getattr(inner, name, None) for name in ("module", "_orig_mod"))
        inner = next((part for part in parts if isinstance(part, nn.Module)), None)
        if inner is None:
            raise InputError(
                f"{type(model).__name__} is neither a transformers model nor a wrapper that is known (DDP, "
                "torch.compile, PEFT); give the PreTrainedModel inside"
            )
    return inner


def _check_weights(model: nn.Module, inner: PreTrainedModel) -> None:
    """Refuse weights that cannot be measured as they are in memory."""
    name = type(inner).__name__
    check_cacheable(inner.config, {"architectures": [name]})
    fsdp = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    if fsdp or any(hasattr(weight, mark) for weight in inner.parameters() for mark in _SPREAD):
        raise InputError(
            f"the weights of this {name} are spread over processes (FSDP, ZeRO-3, or tensor parallel); "
            "give a model that holds them whole, or save one for fp8kv-calibrate"
        )
    if any(weight.is_meta for weight in inner.parameters()):
        raise InputError(f"weights of this {name} are on device meta; load them first")
    if find_quantization_config(inner.config.to_dict()) is not None:
        raise InputError(
            f"the weights of this {name} are quantised; give the model that they are of, or use "
            "fp8kv-calibrate on its checkpoint"
        )


def _measure(
    model: PreTrainedModel, batches: Iterable[TrainerBatch], recipe: Recipe, format: FormatName, gather: bool
) -> tuple[KVStats, list[str]]:
    """Return the statistics of all processes that `gather`, and warnings about the text that they read."""
    rows: list[array[int]] = []

    def note(batch: Batch, _: object) -> None:
        for ids, real in zip(batch.input_ids, batch.attention_mask.bool(), strict=True):
            rows.append(array("q", ids[real].tolist()))

    def measure() -> KVStats:
        stats = calibrate(model, batches, recipe, attention=attention, on_batch=note)
        return replace(stats, text=TextSummary.of(rows, recipe.data.skip_first))

    try:
        with surrounding_world() if gather else nullcontext(World()) as world, ExitStack() as stack:
            world.together(lambda: stack.enter_context(_restore(model)))
            attention = world.together(lambda: _map_attention(model, recipe, format))
            world.check_same("models or recipes", [[*attention.cached], recipe.model_dump()])
            stats = world.reduce(world.together(measure))
    except AttentionError as error:
        raise InputError(str(error)) from None
    assert stats.text is not None
    if not recipe.data.allow_few_tokens:
        stats.text.check()
    return stats, stats.text.warnings()


def _map_attention(model: PreTrainedModel, recipe: Recipe, format: FormatName) -> AttentionMap:
    """Find the model's attention; refuse a format that cannot hold its scales."""
    with eval_mode(model), torch.inference_mode():
        attention = map_attention(model)
    units = attention.unit_scales(recipe.strategy, recipe.fp8_dtype)
    if not _export(model, units, recipe, format).tensors:
        raise InputError(f"format '{format}' is a file or statistics, not tensors; use format='vllm'")
    return attention


def _export(model: PreTrainedModel, scales: KVScales, recipe: Recipe, format: FormatName) -> Export:
    """Make `scales` tensors of the format, as for a checkpoint that the model would be saved as."""
    # any name inside of a module shows how transformers calls that module on disk
    own = {f"{module}.kv.scale": torch.empty(0) for module in scales.expand_shared()}
    header = dict.fromkeys(revert_weight_conversion(model, own), Entry("F32", (0,), 0, 0))
    name = type(model).__name__
    config = {**model.config.to_dict(), "architectures": [name]}
    checkpoint = ModelDirectory(Path(model.name_or_path or name), config, {SINGLE_FILE: header})
    return export(scales, checkpoint, format, reduce=recipe.export.reduce, tp_size=recipe.export.tp_size)


@contextmanager
def _restore(model: PreTrainedModel) -> Iterator[None]:
    """Run plainly what was compiled; put back all that a forward pass or a batch changes."""
    gpus = sorted({weight.device.index for weight in model.parameters() if weight.is_cuda})
    plain = torch.compiler.set_stance("force_eager")
    with hold(model.get_decoder()), torch.random.fork_rng(gpus), plain:
        # some RoPEs keep, or write into a buffer, frequencies for the length of the last text
        tables = [table for module in model.modules() for table in (vars(module), module._buffers)]
        before = [(table, dict(table)) for table in tables]
        values = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
        try:
            yield
        finally:
            for table, content in before:
                table.clear()
                table.update(content)
            with torch.inference_mode():
                for buffer, value in values:
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)
