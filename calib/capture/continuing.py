"""Whether a model can write on with an FP8 cache, known from a few tokens."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from calib.capture.attention import AttentionMap, map_attention
from calib.errors import UnsupportedModelError
from calib.models.devices import input_device
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.hf import fp8_attention

NO_FP8_CACHE = "eval and generate cannot run this model on an FP8 cache"
_TOKENS = 8
# what code of a model raises that does not know our layers of a cache, or misses an image
_MISFITS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, AssertionError)


def check_fp8_cache(model: PreTrainedModel) -> None:
    """Refuse a model that cannot run on an FP8 cache."""
    if reason := reason_against_fp8(model, map_attention(model)):
        raise UnsupportedModelError(reason)


@torch.inference_mode()
def reason_against_fp8(model: PreTrainedModel, attention: AttentionMap) -> str | None:
    """Say why `model` cannot read tokens, and then one more, on an FP8 cache; None: it can."""
    ids = torch.arange(_TOKENS, device=input_device(model))[None]
    try:
        with fp8_attention(model, attention.unit_scales(), backend="torch"):
            cache: Any = model(input_ids=ids, use_cache=True).past_key_values
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
    except torch.OutOfMemoryError:
        raise
    except AttentionError as error:
        reason = str(error)
    except _MISFITS as error:
        reason = _why(model, ids, error)
    else:
        return None
    return f"{NO_FP8_CACHE}: {reason}; its scales are not affected"


def _why(model: PreTrainedModel, ids: torch.Tensor, error: Exception) -> str:
    """Name what is special about `model`, or else the error that ended it."""
    name = type(model).__name__
    try:
        cache = model(input_ids=ids, use_cache=True).past_key_values
    except _MISFITS:
        return f"{name} takes no text alone"
    if type(cache) is not DynamicCache:
        return f"{name} has a cache class of its own, {type(cache).__name__}"
    text = " ".join(str(error).split())[:200]
    return f"the code of {name} fails there ({type(error).__name__}: {text})"
