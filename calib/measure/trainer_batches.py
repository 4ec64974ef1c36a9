"""Batches as trainers hold them, made into those of a calibration."""

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
from calib.model.load import check_positions

# token ids [B, T] or [T], or a dict of such `input_ids` and, for padded rows, an `attention_mask`
Given = Mapping[str, Any] | Tensor | Sequence[int] | Sequence[Sequence[int]]


def as_batches(given: Iterable[Given], model: PreTrainedModel, skip_first: int) -> Iterator[Batch]:
    """Batches of the same rows, padded on the right wherever they were.

    Rows of `skip_first` tokens or fewer are left out. Items of `given` are drawn in the modes of
    inference and gradients that this was called in, whatever those are where batches are asked for.

    Raises:
        InputError: what was given is no batch of token ids, or not of this model's.
    """
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    return _batches(_drawn(given, *modes), model, skip_first)


def _drawn(given: Iterable[Given], inference: bool, gradients: bool) -> Iterator[Given]:
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


def _batches(given: Iterable[Given], model: PreTrainedModel, skip_first: int) -> Iterator[Batch]:
    tokens = samples = 0
    for number, each in enumerate(given):
        rows = _rows(each, number)
        _check(rows, model, number)
        kept = [i for i, row in enumerate(rows) if len(row) > skip_first]
        texts = [rows[i] for i in kept]
        for batch in make_batches(texts, len(texts), pad_id=0, skip_first=skip_first):
            ids = tuple(samples + kept[i] for i in batch.sample_ids)
            yield replace(batch, sample_ids=ids, first_token=tokens + batch.first_token)
        tokens += sum(map(len, texts))
        samples += len(rows)


def _rows(given: Given, number: int) -> list[list[int]]:
    """The token ids of each row, without padding."""
    ids, mask = (
        (given.get("input_ids"), given.get("attention_mask"))
        if isinstance(given, Mapping)
        else (given, None)
    )
    rows = _table(ids, f"batch {number}: input_ids")
    if mask is None:
        return [row.tolist() for row in rows]
    masks = _table(mask, f"batch {number}: attention_mask")
    if [len(row) for row in rows] != [len(row) for row in masks]:
        raise InputError(
            f"batch {number}: attention_mask must be [B, T] as input_ids is, 1 for each token that "
            "is no padding"
        )
    return [row[real.bool()].tolist() for row, real in zip(rows, masks, strict=True)]


def _table(given: Any, what: str) -> list[Tensor]:
    """The rows [T] of a tensor [B, T] or [T], or of lists."""
    rows = [given] if isinstance(given, Tensor) or not _is_nested(given) else [*given]
    try:
        tensors = [torch.as_tensor(row, device="cpu") for row in rows]
    except (TypeError, ValueError, RuntimeError):
        tensors = []
    if any(tensor.ndim == 2 for tensor in tensors):
        tensors = [row for tensor in tensors for row in tensor]
    if not tensors or any(row.ndim != 1 or row.is_floating_point() for row in tensors):
        raise InputError(f"{what} must be whole numbers [B, T] or [T], got {_described(given)}")
    return tensors


def _is_nested(given: Any) -> bool:
    return isinstance(given, Sequence) and bool(given) and not isinstance(given[0], int)


def _described(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
    return "nothing" if given is None else type(given).__name__


def _check(rows: list[list[int]], model: PreTrainedModel, number: int) -> None:
    check_positions(model.config, max(map(len, rows), default=0), f"batch {number}: a row of")
    known = model.get_input_embeddings().weight.shape[0]
    wrong = next((token for row in rows for token in row if not 0 <= token < known), None)
    if wrong is not None:
        raise InputError(f"batch {number}: token id {wrong} is none of the model's {known:,}")
