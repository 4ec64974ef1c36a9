"""A model's config.json, checked before anything is built from it."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from calib.errors import Fp8kvError, InputError, UnsupportedModelError
from calib.files.cache_folder import cache_refusal
from calib.files.config import LAYER_KEYS
from calib.files.model_directory import ModelDirectory

# far beyond every model there is, and near enough to build one in no time
_MOST_LAYERS = 1_000
_LIMITS = {
    **dict.fromkeys(LAYER_KEYS, _MOST_LAYERS),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 10**8),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads"), 2**16),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv", "head_dim"), 2**16),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "vocab_size"), 2**24),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 2**24),
}
# types whose own code, in the repository, is that of another with the same fields and weights
_SAME = {"kimi_k2": "deepseek_v3"}
# what transformers raises where a value makes no sense to it
_NONSENSE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError),
    *(AssertionError, ImportError, StrictDataclassError),
)


def read_config(path: Path, document: dict[str, Any], *, trust_remote_code: bool) -> PreTrainedConfig:
    """Read the config at `path`, which holds `document`; refuse sizes that no model has."""
    _check_sizes(path, document)
    with making_sense(f"cannot read the config of '{path}'"):
        config = _same_as_known(document)
        if config is None:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        sizes = ("num_attention_heads", "num_key_value_heads")
        heads_of_layers = zip(*(of_layers(config, key) for key in sizes), strict=True)
    for heads, kv_heads in heads_of_layers:
        if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
            raise InputError(
                f"the config of '{path}' has {heads} attention heads, which {kv_heads} key-value "
                "heads cannot share equally; download it again"
            )
    return config


def layer_configs(config: PreTrainedConfig) -> list[Any]:
    """The language model's settings in each of its layers; one where layers do not differ.

    transformers raises where a setting that differs is read from the whole config.
    """
    text = config.get_text_config(decoder=True)
    return [*text.per_layer_config] if getattr(text, "is_heterogeneous", False) else [text]


def of_layers(config: PreTrainedConfig, key: str) -> list[Any]:
    """One setting in each layer, as `layer_configs`; None where there is none."""
    return [getattr(layer, key, None) for layer in layer_configs(config)]


def _same_as_known(document: dict[str, Any]) -> PreTrainedConfig | None:
    """The config of a model type that transformers knows under another name alone."""
    known = _SAME.get(str(document.get("model_type")))
    if known is None:
        return None
    own = {"auto_map", "model_type"}
    fields = {key: value for key, value in document.items() if key not in own}
    return AutoConfig.for_model(known, **fields)


def build_on_meta(config: PreTrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    """Build a model on the meta device, where weights take no memory."""
    auto = auto_class(config)
    with (
        making_sense(f"the config of this {config.model_type} makes no model"),
        init_empty_weights(include_buffers=True),
    ):
        return auto.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)


def check_against_weights(
    config: PreTrainedConfig,
    checkpoint: ModelDirectory,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Check that the weights have the `shapes`, by name, that the config says.

    The model is returned, on the meta device.
    """
    model = build_on_meta(config, trust_remote_code=trust_remote_code)
    wanted = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    for name, shape in shapes.items():
        expected = wanted.get(name, shape)
        # experts are fused, and matrices of some models transposed, while they are loaded
        if len(shape) < 3 and sorted(expected) != sorted(shape):
            raise InputError(
                f"'{name}' is {list(shape)} in the weights of '{checkpoint.path}', and "
                f"its config.json wants {list(expected)}; download the model again"
            )
    return model


def auto_class(config: PreTrainedConfig) -> Any:
    """The auto class of transformers that builds this causal language model."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping or hasattr(config, "auto_map"):
            return auto
    raise UnsupportedModelError(f"{config.model_type} is not a causal language model that transformers knows")


@contextmanager
def making_sense(message: str) -> Iterator[None]:
    """Turn transformers' errors about impossible config values into one line."""
    try:
        yield
    except Fp8kvError:
        raise  # it says what is wrong
    except _NONSENSE as error:
        if refusal := cache_refusal(error):
            raise InputError(refusal) from error
        reason = " ".join(str(error).split())[:1000]
        raise InputError(f"{message}: {reason or type(error).__name__}") from error


def _check_sizes(path: Path, document: dict[str, Any]) -> None:
    for key, value in document.items():
        if isinstance(value, dict):
            _check_sizes(path, value)
        limit = _LIMITS.get(key)
        # null stands for a default, a list for a value per layer
        for each in value if isinstance(value, list) else [value]:
            is_size = type(each) is int and limit is not None and 0 < each <= limit
            if limit is not None and value is not None and not is_size:
                raise InputError(
                    f"the config of '{path}' has {key} {each!r:.80}; it must be a whole "
                    f"number from 1 to {limit:,}"
                )
