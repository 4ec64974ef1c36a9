"""Batches as trainers hold them, made into those of a calibration."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.data import Batch, make_batches
from calib.errors import InputError
from calib.models.load import model_positions

# token ids [B, T] or [T], or a dict of such `input_ids` and, for padded rows, an `attention_mask`
Given = Mapping[str, Any] | Tensor | Sequence[int] | Sequence[Sequence[int]]

# what a model's forward takes and K and V do not depend on, or that is read here
_HARMLESS = {
    "input_ids", "attention_mask", "labels", "use_cache", "return_dict", "logits_to_keep",
    "output_attentions", "output_hidden_states", "output_router_logits",
}  # fmt: skip
# of rows that hold several texts; taken as further arguments
_PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
_KINDS = {"token_type_ids", "mm_token_type_ids"}


def as_batches(given: Iterable[Batch | Given], model: PreTrainedModel, skip_first: int) -> Iterator[Batch]:
    """Batches of the same rows, padded on the right wherever they were; a `Batch` stays one.

    Rows of `skip_first` tokens or fewer are left out. Items of `given` are drawn in the modes of
    inference and gradients that this was called in, whatever those are where batches are asked for.

    Raises:
        InputError: what was given is no batch of token ids, or not of this model's.
    """
    has_items = isinstance(given, Iterable) or hasattr(given, "__getitem__")
    if isinstance(given, (Mapping, str)) or not has_items:
        raise InputError(f"batches must be a list or loader of batches, got {_described(given)}")
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    return _batches(_drawn(given, *modes), model, skip_first)


def _drawn(given: Iterable[Batch | Given], inference: bool, gradients: bool) -> Iterator[Batch | Given]:
    """The items of `given`, each made in these modes: tensors made to be kept can be trained on."""
    with _modes(inference, gradients):
        items = iter(given)
    while True:
        with _modes(inference, gradients):
            drawn = [*islice(items, 1)]
        if not drawn:
            return
        yield drawn[0]


@contextmanager
def _modes(inference: bool, gradients: bool) -> Iterator[None]:
    with torch.inference_mode(mode=inference), torch.set_grad_enabled(gradients):
        yield


def _batches(given: Iterable[Batch | Given], model: PreTrainedModel, skip_first: int) -> Iterator[Batch]:
    tokens = samples = 0
    for number, each in enumerate(given):
        if isinstance(each, Batch):
            yield each
            continue
        rows = _rows(each, model, f"batch {number}")
        kept = [i for i, row in enumerate(rows) if len(row) > skip_first]
        texts = [rows[i] for i in kept]
        for batch in make_batches(texts, len(texts), pad_id=0, skip_first=skip_first):
            ids = tuple(samples + kept[i] for i in batch.sample_ids)
            yield replace(batch, sample_ids=ids, first_token=tokens + batch.first_token)
        tokens += sum(map(len, texts))
        samples += len(rows)


def _rows(given: Given, model: PreTrainedModel, which: str) -> list[list[int]]:
    """The token ids of each row of the batch `which`, without padding."""
    held = given if isinstance(given, Mapping) else {"input_ids": given}
    ids = _table(held.get("input_ids"), f"{which}: input_ids")
    if any(row.dtype == torch.bool for row in ids):
        raise InputError(f"{which}: input_ids must be whole numbers, got bool: is that a mask?")
    real = _real(held.get("attention_mask"), ids, which)
    _check_others(held, real, model, which)
    rows = [row[kept].tolist() for row, kept in zip(ids, real, strict=True)]
    _check(rows, model, which)
    return rows


def _real(mask: Any, ids: list[Tensor], which: str) -> list[Tensor]:
    """Which tokens of each row are no padding: bool [T]."""
    if mask is None:
        return [torch.ones_like(row, dtype=torch.bool) for row in ids]
    masks = _table(mask, f"{which}: attention_mask")
    same = [len(row) for row in masks] == [len(row) for row in ids]
    if not same or any((row != row.bool()).any() for row in masks):
        raise InputError(
            f"{which}: attention_mask must be [B, T] as input_ids is, 1 for each token that is no "
            "padding and 0 for padding"
        )
    return [row.bool() for row in masks]


def _check_others(held: Mapping[str, Any], real: list[Tensor], model: PreTrainedModel, which: str) -> None:
    """Refuse what else changes K and V; positions that count each row's tokens do not."""
    # a forward may be wrapped by one that says nothing of what it takes
    forwards = (inspect.signature(each).parameters for each in (type(model).forward, model.forward))
    taken = _PACKED.union(*forwards) - _HARMLESS
    others = {name for name in taken if held.get(name) is not None}
    if hasattr(model.config, "vision_config"):  # zeros: text, and no picture
        others -= {name for name in _KINDS & others if not torch.as_tensor(held[name]).any()}
    if "position_ids" in others:
        places = _table(held["position_ids"], f"{which}: position_ids")
        places *= len(real) if len(places) == 1 else 1
        if [len(row) for row in places] == [len(row) for row in real]:
            counted = (row[kept] for row, kept in zip(places, real, strict=True))
            if all(row.tolist() == [*range(len(row))] for row in counted):
                others.remove("position_ids")
    if others:
        raise InputError(
            f"{which}: {', '.join(sorted(others))} can change K and V, and scales are measured of "
            "input_ids and attention_mask alone; split packed rows, and give text only"
        )


def _table(given: Any, what: str) -> list[Tensor]:
    """The rows [T] of a tensor [B, T] or [T], or of lists."""
    rows = [given] if isinstance(given, Tensor) or not _is_nested(given) else [*given]
    try:
        tensors = [torch.as_tensor(row, device="cpu") for row in rows]
    except (TypeError, ValueError, RuntimeError):
        tensors = []
    if not _is_nested(given):
        tensors = [*tensors[0]] if tensors and tensors[0].ndim == 2 else tensors
    elif any(tensor.ndim > 1 for tensor in tensors):
        raise InputError(
            f"{what} is a list of tables; give a dict of input_ids and attention_mask, or each as a batch"
        )
    if not tensors or any(row.ndim != 1 or row.is_floating_point() for row in tensors):
        raise InputError(f"{what} must be whole numbers [B, T] or [T], got {_described(given)}")
    return tensors


def _is_nested(given: Any) -> bool:
    first = given[0] if isinstance(given, Sequence) and given else None
    return isinstance(first, Sequence) or getattr(first, "ndim", 0) > 0


def _described(given: Any) -> str:
    if hasattr(given, "shape"):
        return f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
    if isinstance(given, int):
        return f"{given}; batches are a list, also of one batch"
    return "nothing" if given is None else " ".join(repr(given).split())[:60]


def _check(rows: list[list[int]], model: PreTrainedModel, which: str) -> None:
    longest, positions = max(map(len, rows), default=0), model_positions(model.config)
    if positions and longest > positions:
        raise InputError(
            f"{which}: a row of {longest} tokens is longer than the model's {positions} positions"
        )
    known = model.get_input_embeddings().weight.shape[0]
    wrong = next((token for row in rows for token in row if not 0 <= token < known), None)
    if wrong is not None:
        raise InputError(f"{which}: token id {wrong} is none of the model's {known:,}")
