"""The device that a model takes its inputs on, and a check of token ids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from calib.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids go; with offloaded weights accelerate moves them on from the CPU."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


def check_token_ids(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Check that every token id has a row in the embedding; a tokenizer may know more ids."""
    rows, largest = model.get_input_embeddings().weight.shape[0], max(ids, default=0)
    if largest >= rows:
        raise InputError(
            f"the tokenizer has {len(tokenizer):,} tokens and the model's embedding {rows:,} rows, "
            f"none for token id {largest:,} of this text, {tokenizer.decode([largest])!r}; use the "
            "tokenizer that the model was trained with, or text without that token"
        )
