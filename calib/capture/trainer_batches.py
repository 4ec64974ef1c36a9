"""Batches of a training loop, made into those of a calibration."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.data import Batch, make_batches
from calib.errors import InputError, one_line
from calib.models.config import model_positions

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
    rows = [row[mask.bool()].tolist() for row, mask in zip(ids, real, strict=True)]
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
            positions = [row[mask.bool()].tolist() for row, mask in zip(rows, real, strict=True)]
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
