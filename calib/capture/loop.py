"""The measurement: run batches, ours or those of a training loop, through the model and collect `KVStats`."""

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.arguments import check_arguments
from calib.capture.attention import AttentionMap, Draft, map_attention, observe_qkv
from calib.capture.running_amax import RunningLayer, count_tokens
from calib.data import Batch, MediaSample, make_batches
from calib.errors import CalibrationError, InputError, UnsupportedModelError, one_line
from calib.models.config import model_positions
from calib.models.load import input_device
from calib.recipe import Recipe
from calib.scales.stats import PER_TOKEN, KVStats

# token ids [B, T], a list of rows, or a mapping of such `input_ids` and, for padded rows, an `attention_mask`
TrainerBatch = Tensor | Sequence[Sequence[int]] | Mapping[str, Any]

# arguments of a model's forward that K and V do not depend on, or that are read here
_HARMLESS = {
    *("input_ids", "attention_mask", "labels", "use_cache", "return_dict", "logits_to_keep"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
}
# arguments for rows that hold several texts, which a forward takes without naming them
_PACKING = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
_MODALITIES = {"token_type_ids", "mm_token_type_ids"}
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
            if first_non_finite(layers, attention):
                raise _find_non_finite(model, batch, attention, recipe)
            on_batch(batch, lambda: results(layers, attention))
    return results(layers, attention)


def running_layers(attention: AttentionMap, recipe: Recipe) -> dict[str, RunningLayer]:
    """Return empty statistics of each cached attention module, by its name."""
    histogram = {"histogram"} if recipe.observer.needs_histogram else set()
    fields = {*PER_TOKEN, *histogram, *(("total", "low", "high") if recipe.collects_means else ())}
    query_fields = histogram if recipe.targets == "qkv" else set()
    modules = [*attention.cached.values(), *((attention.draft.module,) if attention.draft else ())]
    return {module.name: RunningLayer(module, fields, query_fields) for module in modules}


def results(layers: dict[str, RunningLayer], attention: AttentionMap) -> KVStats:
    """Return the statistics of all batches that were added to `layers`; an InputError if no token counts."""
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
    draft = attention.draft
    last = None if is_offloaded or draft else [*layers][-1]
    with observing(model, batch, layers, last=last):
        options = {"output_hidden_states": True} if draft and draft.layers else {}
        media = media_arguments(model, batch.media)
        output = attention.read(model, batch.input_ids, batch.attention_mask, **media, **options)
    if draft:
        states = [output.hidden_states[i] for i in draft.layers] or [output.last_hidden_state]
        hidden = torch.cat([state.to(output.last_hidden_state.device) for state in states], -1)
        observe_draft(draft, batch, hidden, layers)


def observe_draft(draft: Draft, batch: Batch, hidden: Any, layers: dict[str, RunningLayer]) -> None:
    """Add what a draft caches of `batch` to `layers`, from `hidden` as `Draft.read` takes it: [B, T, ...]."""
    own = {draft.inner: layers[draft.module.name]}
    with observing(draft.model, batch, own, last=draft.inner):
        draft.read(batch.input_ids, hidden)


def media_arguments(model: PreTrainedModel, sample: MediaSample | None) -> dict[str, Tensor]:
    """Return the arguments of `model` that hold the pictures of `sample`, of any shape, by their names.

    Raises an UnsupportedModelError for a class of text alone.
    """
    device, arguments = input_device(model), sample.arguments() if sample else {}
    named = inspect.signature(type(model).forward).parameters.keys()
    if arguments and (named - _MODALITIES).isdisjoint(arguments):
        raise UnsupportedModelError(
            f"transformers' {type(model).__name__} reads text alone; calibrate on text"
        )
    if sample and any(sample.counts) and "mm_token_type_ids" in named - arguments.keys():
        raise InputError("the model needs mm_token_type_ids, which its processor does not make; use text")
    return {n: x.to(device, model.dtype if x.is_floating_point() else None) for n, x in arguments.items()}


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


def first_non_finite(layers: dict[str, RunningLayer], attention: AttentionMap) -> str | None:
    """Return the model's first module and tensor that held NaN or Inf, as `model.layers.0.self_attn: K`."""
    for name, layer in layers.items():
        for letter, tensor in (("K", layer.k), ("V", layer.v), ("Q", layer.q)):
            if name in attention.cached and tensor.amax is not None and not torch.isfinite(tensor.amax).all():
                return f"{name}: {letter}"
    return None


def _find_non_finite(
    model: PreTrainedModel, batch: Batch, attention: AttentionMap, recipe: Recipe
) -> CalibrationError:
    """Run the batch again, sample by sample, to name the first that is to blame."""
    for single in singles(batch):
        layers = running_layers(attention, recipe)
        _observe(model, single, attention, layers)
        if place := first_non_finite(layers, attention):
            return blame(place, single)
    return blame(None, batch)


def singles(batch: Batch) -> list[Batch]:
    """Return the samples of `batch`, each a batch of its own and the first of a run."""
    if batch.media is not None:
        return [batch]
    rows = zip(batch.input_ids, batch.attention_mask, batch.sample_ids, strict=True)
    return [
        Batch(ids[None], mask[None], (i,), 0, batch.skip_first, places=batch.places) for ids, mask, i in rows
    ]


def blame(place: str | None, batch: Batch) -> CalibrationError:
    """Make the error for NaN or Inf; names the sample, or the batch if no sample alone shows it."""
    samples = list(batch.sample_ids)
    where = f"sample {samples[0]} of those read" if place else f"samples {samples}, only when batched"
    where += "".join(f" ({batch.places[i]})" for i in samples[:1] if place and i in batch.places)
    return CalibrationError(
        f"{place or 'a layer'} holds NaN or Inf in {where}; "
        "check the weights, and where they are float16, use --dtype bfloat16 or float32"
    )


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Keep every module of `model` in eval mode inside the block."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def read_batches(
    batches: Iterable[Batch | TrainerBatch], model: PreTrainedModel, skip_first: int
) -> Iterator[Batch]:
    """Yield batches of the same rows, padded on the right wherever they were; a `Batch` stays as it is.

    Rows of `skip_first` tokens or fewer are left out. An InputError if an item does not hold token ids of
    this model, or holds something else that changes K and V.
    """
    is_iterable = isinstance(batches, Iterable) or hasattr(batches, "__getitem__")
    if isinstance(batches, (Mapping, str)) or not is_iterable:
        raise InputError(
            f"batches must be a list or loader of batches, also for a single one, got {_describe(batches)}"
        )
    first_token = first_sample = 0
    for number, item in enumerate(batches):
        if isinstance(item, Batch):
            yield item
            continue
        rows = _token_ids(item, model, f"batch {number}")
        if max(map(len, rows)) > skip_first:
            for batch in make_batches(rows, len(rows), pad_id=0, skip_first=skip_first):
                samples = tuple(first_sample + i for i in batch.sample_ids)
                yield replace(batch, sample_ids=samples, first_token=first_token + batch.first_token)
        first_token += sum(len(row) for row in rows if len(row) > skip_first)
        first_sample += len(rows)


def _token_ids(item: TrainerBatch, model: PreTrainedModel, label: str) -> list[list[int]]:
    """Return the token ids of each row of a batch, without padding."""
    fields = item if isinstance(item, Mapping) else {"input_ids": item}
    ids, mask = _rows(fields.get("input_ids")), fields.get("attention_mask")
    if ids is None or any(row.dtype == torch.bool for row in ids):
        advice = "; give a mask under attention_mask" if ids else ""
        raise InputError(
            f"{label}: token ids must be whole numbers [B, T], a list of rows [T], or a mapping of "
            f"input_ids and attention_mask, got {_describe(fields.get('input_ids'))}{advice}"
        )
    real = [torch.ones_like(row) for row in ids] if mask is None else _rows(mask) or []
    if [*map(len, real)] != [*map(len, ids)] or any((row != row.bool()).any() for row in real):
        raise InputError(
            f"{label}: attention_mask must be [B, T] as input_ids is, 1 for a real token and 0 for padding"
        )
    _check_fields(fields, real, model, label)
    rows = [row[is_real.bool()].tolist() for row, is_real in zip(ids, real, strict=True)]
    longest, positions = max(map(len, rows)), model_positions(model.config)
    if positions and longest > positions:
        raise InputError(
            f"{label}: a row of {longest} tokens is longer than the model's {positions} positions"
        )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    unknown = next((token for row in rows for token in row if not 0 <= token < vocabulary), None)
    if unknown is not None:
        raise InputError(f"{label}: token id {unknown} is not one of the model's {vocabulary:,}")
    return rows


def _rows(table: Any) -> list[Tensor] | None:
    """Return the rows [T] of whole numbers or booleans in `table`; None if it holds something else."""
    try:
        rows = [torch.as_tensor(row, device="cpu") for row in table]
    except (TypeError, ValueError, RuntimeError):
        return None
    if rows and all(row.ndim == 0 for row in rows):  # numbers [T] are one row
        rows = [torch.stack(rows)]
    return rows if rows and all(x.ndim == 1 and not x.is_floating_point() for x in rows) else None


def _check_fields(fields: Mapping[str, Any], real: list[Tensor], model: PreTrainedModel, label: str) -> None:
    """Refuse fields that change K and V beside `input_ids`; positions that count real tokens do not."""
    # a forward may be wrapped by one that does not say what it takes
    forwards = (inspect.signature(forward).parameters for forward in (type(model).forward, model.forward))
    arguments = _PACKING.union(*forwards) - _HARMLESS
    harmful = {name for name in arguments if fields.get(name) is not None}
    if hasattr(model.config, "vision_config"):  # zeros stand for text
        harmful -= {name for name in _MODALITIES & harmful if not torch.as_tensor(fields[name]).any()}
    if "position_ids" in harmful:
        rows = _rows(fields["position_ids"]) or []
        rows *= len(real) if len(rows) == 1 else 1
        if [*map(len, rows)] == [*map(len, real)]:
            positions = [row[is_real.bool()].tolist() for row, is_real in zip(rows, real, strict=True)]
            harmful -= {"position_ids"} if all(row == [*range(len(row))] for row in positions) else set()
    if harmful:
        raise InputError(
            f"{label}: {', '.join(sorted(harmful))} can change K and V, and scales are measured of input_ids "
            "and attention_mask alone; split packed rows, and give text only"
        )


def _describe(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (list, tuple)) and any(hasattr(item, "shape") for item in value):
        return f"a {type(value).__name__} of {', '.join(map(_describe, value[:3]))}"
    return one_line(repr(value), 60)
