"""The measurement: run batches through the model and collect `KVStats`. Nothing else."""

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.attention import AttentionMap, map_attention, observe_qkv
from calib.data import Batch
from calib.derive import recipe_observer
from calib.devices import input_device
from calib.errors import CalibrationError, InputError
from calib.recipe import Recipe
from calib.running import RunningLayer
from calib.stats import KVStats


@torch.inference_mode()
def calibrate(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    recipe: Recipe,
    *,
    attention: AttentionMap | None = None,
    on_batch: Callable[[Batch], None] = lambda batch: None,
) -> KVStats:
    """Run `batches` through the decoder stack of `model` and return what its K, V and Q held.

    Padding is excluded, the LM head is not computed, and the model is left exactly as it was.

    Args:
        model: a causal language model.
        batches: token ids with their attention masks.
        recipe: says which statistics the observer needs.
        attention: the model's cached attention modules, where the caller has mapped them already.
        on_batch: called after each batch.

    Raises:
        UnsupportedModelError: the model's attention cannot be observed.
        CalibrationError: K, V or Q held NaN or Inf; names layer, tensor and sample.
    """
    with _eval_mode(model):
        attention = attention or map_attention(model)
        layers = _running_layers(attention, recipe)
        for batch in batches:
            _observe(model, batch, layers)
            if not _all_finite(layers):
                raise _non_finite(model, batch, attention, recipe)
            on_batch(batch)
    if not any(layer.tokens for layer in layers.values()):
        raise InputError("calibration needs at least one batch; the dataset gave none")
    return KVStats({name: layer.result() for name, layer in layers.items()}, attention.shared)


def _running_layers(attention: AttentionMap, recipe: Recipe) -> dict[str, RunningLayer]:
    histogram = recipe_observer(recipe).needs_histogram
    return {
        name: RunningLayer(module, targets=recipe.targets, histogram=histogram, means=recipe.means)
        for name, module in attention.cached.items()
    }


class _LastLayerSeen(Exception):
    """Everything there is to measure in a batch has been measured."""


def _observe(model: PreTrainedModel, batch: Batch, layers: dict[str, RunningLayer]) -> None:
    device = input_device(model)
    input_ids, mask = batch.input_ids.to(device), batch.attention_mask.to(device)
    valid = mask.flatten().nonzero().squeeze(-1) if batch.has_padding else None

    last = None if _is_offloaded(model) else list(layers)[-1]

    def sink(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        if name in layers:  # the others read another layer's cache
            layers[name].update(query, key, value, _on(valid, key))
        if name == last:
            raise _LastLayerSeen

    with observe_qkv(model, sink):
        try:
            model.get_decoder()(input_ids=input_ids, attention_mask=mask, use_cache=False)
        except _LastLayerSeen as seen:
            # its frames hold activations, and cycles would keep those through the next batch
            traceback.clear_frames(seen.__traceback__)


def _is_offloaded(model: nn.Module) -> bool:
    # accelerate takes weights off the device again when a module returns, so each one must
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def _on(index: Tensor | None, x: Tensor) -> Tensor | None:
    return None if index is None else index.to(x.device)


def _all_finite(layers: dict[str, RunningLayer]) -> bool:
    return not any(_non_finite_tensors(layers))


def _non_finite_tensors(layers: dict[str, RunningLayer]) -> Iterator[str]:
    for name, layer in layers.items():
        for which in "KVQ":
            amax = getattr(layer, which.lower()).amax
            if amax is not None and not torch.isfinite(amax).all():
                yield f"{name}: {which}"


def _non_finite(
    model: PreTrainedModel, batch: Batch, attention: AttentionMap, recipe: Recipe
) -> CalibrationError:
    """Run the batch again, sample by sample, to name the first that is to blame."""
    for row, sample in enumerate(batch.sample_ids):
        layers = _running_layers(attention, recipe)
        single = Batch(batch.input_ids[row, None], batch.attention_mask[row, None], (sample,))
        _observe(model, single, layers)
        found = next(_non_finite_tensors(layers), None)
        if found:
            return _blame(found, f"sample {sample}")
    return _blame("a layer", f"samples {list(batch.sample_ids)}, only when batched")


def _blame(what: str, where: str) -> CalibrationError:
    return CalibrationError(
        f"{what} holds NaN or Inf in {where}; check the weights, or use --dtype bfloat16 or float32"
    )


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
