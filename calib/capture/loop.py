"""The measurement: run batches through the model and collect `KVStats`. Nothing else."""

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.arguments import check_arguments
from calib.capture.attention import AttentionMap, map_attention, observe_qkv
from calib.capture.running_amax import RunningLayer, count_tokens
from calib.capture.trainer_batches import TrainerBatch, read_batches
from calib.data import Batch
from calib.errors import CalibrationError, InputError
from calib.models.load import input_device
from calib.recipe import Recipe
from calib.scales.stats import PER_TOKEN, KVStats

OnBatch = Callable[[Batch, Callable[[], KVStats]], None]


@check_arguments
def calibrate(
    model: PreTrainedModel,
    batches: Iterable[Batch | TrainerBatch],
    recipe: Recipe,
    *,
    attention: AttentionMap | None = None,
    on_batch: OnBatch = lambda batch, so_far: None,
) -> KVStats:
    """Run `batches`, which are as for `scales_for`, and return the statistics of K, V and Q.

    Padding is excluded, the LM head is not computed, and the model is left exactly as it was. `attention` is
    the result of `map_attention`, if the caller has it; `on_batch` gets each batch and a function that
    returns the statistics so far.

    Raises:
        InputError: a batch does not hold token ids, or not this model's.
        UnsupportedModelError: the model's attention cannot be observed.
        CalibrationError: K, V or Q held NaN or Inf; names layer, tensor and sample.
    """
    # batches are drawn in the modes of inference and gradients of the caller, whose loader may keep tensors
    with eval_mode(model):
        with torch.inference_mode():
            attention = attention or map_attention(model)
        layers = running_layers(attention, recipe)
        for batch in read_batches(batches, model, recipe.data.skip_first):
            _observe(model, batch, attention, layers)
            if first_non_finite(layers):
                raise _find_non_finite(model, batch, attention, recipe)
            on_batch(batch, lambda: results(layers, attention))
    return results(layers, attention)


def running_layers(attention: AttentionMap, recipe: Recipe) -> dict[str, RunningLayer]:
    """Return empty statistics of each cached attention module, by its name."""
    histogram = {"histogram"} if recipe.observer.needs_histogram else set()
    fields = {*PER_TOKEN, *histogram, *(("total", "low", "high") if recipe.collects_means else ())}
    query_fields = histogram if recipe.targets == "qkv" else set()
    return {name: RunningLayer(module, fields, query_fields) for name, module in attention.cached.items()}


def results(layers: dict[str, RunningLayer], attention: AttentionMap) -> KVStats:
    """Return the statistics of all batches that were added to `layers`, at least one."""
    if not any(layer.tokens for layer in layers.values()):
        raise InputError("there is nothing to calibrate on: no token was read that counts")
    return KVStats({name: layer.result() for name, layer in layers.items()}, attention.shared)


class _LastLayerSeen(Exception):
    """Everything there is to measure in a batch has been measured."""


@torch.inference_mode()
def _observe(
    model: PreTrainedModel, batch: Batch, attention: AttentionMap, layers: dict[str, RunningLayer]
) -> None:
    batch = to_device(batch, input_device(model))
    # accelerate takes weights off the device again when a module returns, so each one must
    is_offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    with observing(model, batch, layers, last=None if is_offloaded else [*layers][-1]):
        attention.read(model, batch.input_ids, batch.attention_mask)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return `batch` with its tensors on `device`."""
    ids, mask = batch.input_ids.to(device), batch.attention_mask.to(device)
    return replace(batch, input_ids=ids, attention_mask=mask)


@contextmanager
def observing(
    model: PreTrainedModel, batch: Batch, layers: dict[str, RunningLayer], *, last: str | None
) -> Iterator[None]:
    """Add Q, K and V of attention calls inside the block to `layers`; leave it after `last`."""
    tokens = count_tokens(batch)

    def sink(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        if name in layers:  # modules that read another layer's cache are not
            layers[name].update(query, key, value, tokens)
        if name == last:
            raise _LastLayerSeen

    with observe_qkv(model, sink):
        try:
            yield
        except _LastLayerSeen as stop:
            # its frames hold activations, and cycles would keep those through the next batch
            traceback.clear_frames(stop.__traceback__)


def first_non_finite(layers: dict[str, RunningLayer]) -> str | None:
    """Return the first module and tensor that held NaN or Inf, as `model.layers.0.self_attn: K`."""
    for name, layer in layers.items():
        for letter, tensor in (("K", layer.k), ("V", layer.v), ("Q", layer.q)):
            if tensor.amax is not None and not torch.isfinite(tensor.amax).all():
                return f"{name}: {letter}"
    return None


def _find_non_finite(
    model: PreTrainedModel, batch: Batch, attention: AttentionMap, recipe: Recipe
) -> CalibrationError:
    """Run the batch again, sample by sample, to name the first that is to blame."""
    for single in singles(batch):
        layers = running_layers(attention, recipe)
        _observe(model, single, attention, layers)
        if place := first_non_finite(layers):
            return blame(place, single)
    return blame(None, batch)


def singles(batch: Batch) -> list[Batch]:
    """Return the samples of `batch`, each a batch of its own."""
    starts = accumulate(batch.attention_mask.sum(1).tolist(), initial=batch.first_token)
    rows = zip(batch.input_ids, batch.attention_mask, batch.sample_ids, starts, strict=False)
    return [Batch(ids[None], mask[None], (i,), start, batch.skip_first) for ids, mask, i, start in rows]


def blame(place: str | None, batch: Batch) -> CalibrationError:
    """Make the error for NaN or Inf; names the sample, or the batch if no sample alone shows it."""
    samples = list(batch.sample_ids)
    where = f"sample {samples[0]}" if place else f"samples {samples}, only when batched"
    return CalibrationError(
        f"{place or 'a layer'} holds NaN or Inf in {where}; "
        "check the weights, or use --dtype bfloat16 or float32"
    )


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside the block every module of `model` is in eval mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
