"""From a checkpoint to its config, checked, its tokenizer, and the model in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from calib.errors import InputError, UnsupportedModelError
from calib.model.checkpoint import Checkpoint
from calib.model.config import auto_class, check_against_weights, making_sense, read_config
from calib.model.quantized import check_left_over, check_readable, forget_cache_quantization
from calib.progress import library_bars_hidden
from calib.recipe import Recipe

_CAUSAL = ("ForCausalLM", "LMHead", "ForConditionalGeneration")


def load_config(checkpoint: Checkpoint, recipe: Recipe) -> PreTrainedConfig:
    """Read the model's config and refuse, before any weight is read, what cannot be calibrated."""
    check_readable(checkpoint)
    trust = recipe.trust_remote_code
    config = read_config(checkpoint.path, checkpoint.config, trust_remote_code=trust)
    check_cacheable(config, checkpoint.config)
    check_against_weights(config, checkpoint, trust_remote_code=trust)
    forget_cache_quantization(config)
    return config


def check_cacheable(config: PreTrainedConfig, document: dict[str, Any]) -> None:
    """Refuse a model that caches no K and V per head; `document` is its config.json."""
    named = document.get("architectures")
    named = named if isinstance(named, list) else [named]
    names = [name for name in named if isinstance(name, str)] or [config.model_type]
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{names[0]} is an encoder-decoder; only decoder-only language models keep the "
            "KV cache that engines hold in FP8"
        )
    if not any(kind in name for name in names for kind in _CAUSAL):
        raise UnsupportedModelError(
            f"{names[0]} is not a causal language model; give a ...ForCausalLM checkpoint"
        )
    if getattr(config.get_text_config(decoder=True), "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{config.model_type} uses multi-head latent attention (MLA): it caches one compressed "
            "latent per token, so it has no K and V per head that a scale could describe"
        )


def check_positions(config: PreTrainedConfig, tokens: int, flag: str) -> None:
    """Check that the model has positions for the `tokens` that `flag` asks for."""
    positions = model_positions(config)
    if positions and tokens > positions:
        raise InputError(
            f"{flag} {tokens} is longer than the model's {positions} positions; "
            f"use {flag} {positions} or less"
        )


def fit_seq_len(config: PreTrainedConfig, tokens: int, *, given: bool) -> tuple[int, list[str]]:
    """Cut `tokens` to the model's positions, with a note; refuse instead if they were `given`."""
    positions = model_positions(config)
    if given or not positions or tokens <= positions:
        check_positions(config, tokens, "--seq-len")
        return tokens, []
    note = f"samples are cut to the model's {positions} positions; the default is {tokens} tokens"
    return positions, [note]


def model_positions(config: PreTrainedConfig) -> int | None:
    """Positions of the language model; None: no limit is known."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def load_model(checkpoint: Checkpoint, config: PreTrainedConfig, recipe: Recipe) -> PreTrainedModel:
    """Load the model; refuse it if a weight is not in the checkpoint."""
    device_map: str | dict[str, int] = "cpu"
    if uses_gpu(recipe):
        # one of several processes has a GPU of its own; one alone has them all
        alone = not torch.distributed.is_initialized()
        device_map = "auto" if alone else {"": torch.cuda.current_device()}
    with loading(f"'{checkpoint.path}'"):
        model, info = auto_class(config).from_pretrained(
            checkpoint.path,
            config=config,
            dtype=requested_dtype(recipe),
            device_map=device_map,
            trust_remote_code=recipe.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    check_complete(checkpoint, info)
    return model.eval()


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Hide the libraries' progress bars, and turn their refusal to load `what` into one line."""
    with making_sense(f"cannot load {what}"), library_bars_hidden():
        yield


def check_complete(checkpoint: Checkpoint, info: dict[str, Any]) -> None:
    """Check transformers' loading info: no weight was initialised at random, no scale left over."""
    check_left_over(checkpoint, info["unexpected_keys"])
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"'{checkpoint.path}' lacks {len(missing)} weights, such as '{missing[0]}': "
            "they would be random; download the model again"
        )


def requested_dtype(recipe: Recipe) -> str | torch.dtype:
    """The dtype to load weights in, as transformers takes it."""
    return recipe.dtype if recipe.dtype == "auto" else getattr(torch, recipe.dtype)


def uses_gpu(recipe: Recipe) -> bool:
    """Whether the model runs on a GPU; refuse `cuda` where there is none."""
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "--device cuda: torch sees no GPU; use --device cpu, or see `fp8kv doctor`"
        )
    return recipe.device != "cpu" and torch.cuda.is_available()


def load_tokenizer(checkpoint: Checkpoint, recipe: Recipe) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer."""
    with loading(f"the tokenizer of '{checkpoint.path}'"):
        return AutoTokenizer.from_pretrained(
            checkpoint.path, trust_remote_code=recipe.trust_remote_code
        )
