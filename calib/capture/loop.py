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
from calib.capture.statistics import RunningLayer, counted
from calib.capture.trainer_batches import Given, as_batches
from calib.data import Batch
from calib.errors import CalibrationError, InputError
from calib.models.devices import input_device
from calib.recipe import Recipe
from calib.scales.stats import KVStats

OnBatch = Callable[[Batch, Callable[[], KVStats]], None]


@check_arguments
def calibrate(
    model: PreTrainedModel,
    batches: Iterable[Batch | Given],
    recipe: Recipe,
    *,
    attention: AttentionMap | None = None,
    on_batch: OnBatch = lambda batch, so_far: None,
) -> KVStats:
    """Run `batches`, which are as for `scales_for`, and return the statistics of K, V and Q.

    Padding is excluded, the LM head is not computed, and the model is left exactly as it was.
    `attention` is what `map_attention` found, if the caller knows; `on_batch` gets each batch and a
    function that returns the statistics so far.

    Raises:
        InputError: a batch is none of token ids, or not of this model's.
        UnsupportedModelError: the model's attention cannot be observed.
        CalibrationError: K, V or Q held NaN or Inf; names layer, tensor and sample.
    """
    ready = as_batches(batches, model, recipe.data.skip_first)
    with torch.inference_mode(), eval_mode(model):
        attention = attention or map_attention(model)
        layers = running_layers(attention, recipe)
        for batch in ready:
            _observe(model, batch, attention, layers)
            if first_non_finite(layers):
                raise _non_finite(model, batch, attention, recipe)
            on_batch(batch, lambda: results(layers, attention))
    return results(layers, attention)


def running_layers(attention: AttentionMap, recipe: Recipe) -> dict[str, RunningLayer]:
    """Empty statistics of each cached attention module, by its name."""
    return {name: RunningLayer(module, recipe) for name, module in attention.cached.items()}


def results(layers: dict[str, RunningLayer], attention: AttentionMap) -> KVStats:
    """Statistics of all batches that `layers` have seen, at least one."""
    if not any(layer.tokens for layer in layers.values()):
        raise InputError("there is nothing to calibrate on: no token was read that counts")
    return KVStats({name: layer.result() for name, layer in layers.items()}, attention.shared)


class _LastLayerSeen(Exception):
    """Everything there is to measure in a batch has been measured."""


def _observe(
    model: PreTrainedModel, batch: Batch, attention: AttentionMap, layers: dict[str, RunningLayer]
) -> None:
    batch = to_device(batch, input_device(model))
    last = None if _is_offloaded(model) else list(layers)[-1]
    with observing(model, batch, layers, last=last):
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
    tokens = counted(batch)

    def sink(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        if name in layers:  # the others read another layer's cache
            layers[name].update(query, key, value, tokens)
        if name == last:
            raise _LastLayerSeen

    with observe_qkv(model, sink):
        try:
            yield
        except _LastLayerSeen as seen:
            # its frames hold activations, and cycles would keep those through the next batch
            traceback.clear_frames(seen.__traceback__)


def _is_offloaded(model: nn.Module) -> bool:
    # accelerate takes weights off the device again when a module returns, so each one must
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def first_non_finite(layers: dict[str, RunningLayer]) -> str | None:
    """The first module and tensor that held NaN or Inf, as `model.layers.0.self_attn: K`."""
    for name, layer in layers.items():
        for which in "KVQ":
            amax = getattr(layer, which.lower()).amax
            if amax is not None and not torch.isfinite(amax).all():
                return f"{name}: {which}"
    return None


def _non_finite(
    model: PreTrainedModel, batch: Batch, attention: AttentionMap, recipe: Recipe
) -> CalibrationError:
    """Run the batch again, sample by sample, to name the first that is to blame."""
    for single in singles(batch):
        layers = running_layers(attention, recipe)
        _observe(model, single, attention, layers)
        found = first_non_finite(layers)
        if found:
            return blame(found, single)
    return blame(None, batch)


def singles(batch: Batch) -> list[Batch]:
    """The samples of `batch`, each a batch of its own."""
    ids, mask, samples = batch.input_ids, batch.attention_mask, batch.sample_ids
    starts = accumulate(mask.sum(1).tolist(), initial=batch.first_token)
    return [
        replace(batch, input_ids=ids[i, None], attention_mask=mask[i, None], sample_ids=(sample,),
                first_token=start)
        for i, (sample, start) in enumerate(zip(samples, starts, strict=False))
    ]  # fmt: skip


def blame(found: str | None, batch: Batch) -> CalibrationError:
    """Make the error for NaN or Inf; names the sample, or the batch if no sample alone shows it."""
    samples = list(batch.sample_ids)
    where = f"sample {samples[0]}" if found else f"samples {samples}, only when batched"
    return CalibrationError(
        f"{found or 'a layer'} holds NaN or Inf in {where}; "
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
