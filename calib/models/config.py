"""A model's config.json, checked before anything is built from it, and against the weights' headers."""

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
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from calib.errors import Fp8kvError, InputError, UnsupportedModelError, one_line
from calib.files.cache_folder import cache_refusal
from calib.files.config import LAYER_KEYS
from calib.files.model_directory import ModelDirectory, check_model_type
from calib.models.quantized.detect import (
    check_unused_tensors,
    drop_quantization_config,
    is_quantized,
    unused_codes,
)
from calib.models.quantized.weights import split_weights

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
_TYPE_ALIASES = {"kimi_k2": "deepseek_v3"}
_CAUSAL = ("ForCausalLM", "LMHead", "ForConditionalGeneration")
# types of models, and of layers, that keep a state of fixed size and no K and V of tokens
_RECURRENT = {"rwkv", "xlstm"}
_WITHOUT_ATTENTION = {"linear_attention", "mamba", "recurrent", "conv", "moe", "mlp"}
_COMPRESSED = {"compressed_sparse_attention", "heavily_compressed_attention"}  # of DeepSeek-V4
# what transformers raises where a value makes no sense to it
_NONSENSE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError),
    *(AssertionError, ImportError, StrictDataclassError),
)


def load_config(checkpoint: ModelDirectory, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read the model's config and refuse, before any weight is read, what cannot be calibrated."""
    if "fc.weight" in checkpoint.entries and "Eagle" in str(checkpoint.config.get("architectures")):
        raise InputError(f"'{checkpoint.path}' is a drafter (EAGLE): give its model, and --draft with this")
    label, coded, plain = split_weights(checkpoint)
    config = read_config(checkpoint.path, checkpoint.config, trust_remote_code=trust_remote_code)
    check_cacheable(config, checkpoint.config)
    drop_quantization_config(config, is_coded=label is not None)
    shapes = {name: entry.shape for name, entry in plain.items()}
    shapes = {} if is_quantized(config) else shapes | {weight.name: weight.shape for weight in coded}
    model = build_on_meta(config, trust_remote_code=trust_remote_code)
    unused = unused_codes(model, shapes)
    parameters = dict(model.named_parameters())
    for name, shape in shapes.items():
        expected = parameters[name].shape if name in parameters else shape
        # experts are fused, and matrices of some models transposed, while they are loaded
        if len(shape) < 3 and sorted(expected) != sorted(shape):
            raise InputError(
                f"'{name}' is {list(shape)} in the weights of '{checkpoint.path}', and "
                f"its config.json wants {list(expected)}; download the model again"
            )
    check_unused_tensors(checkpoint, unused, shapes)
    return config


def read_config(path: Path, document: dict[str, Any], *, trust_remote_code: bool) -> PreTrainedConfig:
    """Read the config at `path`, which holds `document`; refuse sizes that no model has."""
    _check_sizes(path, document)
    check_model_type(path, document)
    with explain_nonsense(f"cannot read the config of '{path}'"):
        alias = _TYPE_ALIASES.get(str(document.get("model_type")))
        if alias:
            fields = {key: document[key] for key in document if key not in ("auto_map", "model_type")}
            config = AutoConfig.for_model(alias, **fields)
        else:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        heads = layer_settings(config, "num_attention_heads")
        kv_heads = layer_settings(config, "num_key_value_heads")
    for count, kv_count in zip(heads, kv_heads, strict=True):
        if isinstance(count, int) and isinstance(kv_count, int) and count % kv_count:
            raise InputError(
                f"the config of '{path}' has {count} attention heads, which {kv_count} key-value "
                "heads cannot share equally; download it again"
            )
    return config


def check_cacheable(config: PreTrainedConfig, document: dict[str, Any]) -> None:
    """Refuse a model that caches no K and V; `document` is its config.json."""
    architectures = document.get("architectures")
    architectures = architectures if isinstance(architectures, list) else [architectures]
    names = [name for name in architectures if isinstance(name, str)]
    name = next(iter(names), config.model_type)
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder; only decoder-only language models keep the "
            "KV cache that engines hold in FP8"
        )
    if not names:
        default_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        add = f'add "architectures": ["{default_name}"], or ' if isinstance(default_name, str) else ""
        raise InputError(
            f"config.json of this {config.model_type} names no architecture, by which engines "
            f"choose a class; {add}download it again"
        )
    if not any(kind in name for name in names for kind in _CAUSAL):
        raise UnsupportedModelError(
            f"{name} is not a causal language model; give a ...ForCausalLM checkpoint"
        )
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ["attention"]
    if config.model_type in _RECURRENT or _WITHOUT_ATTENTION.issuperset(kinds):
        raise UnsupportedModelError(
            f"no layer of {name} attends: what it keeps of a text is a state of fixed size, so "
            "it has no KV cache to calibrate"
        )
    if _COMPRESSED.intersection(kinds):
        raise UnsupportedModelError(
            f"{name} attends to K and V that several tokens were compressed into, which fp8kv does not "
            "measure; such models are not supported"
        )


def caches_latents(config: PreTrainedConfig) -> bool:
    """Return whether layers cache a latent instead of K and V per head (MLA), by the config."""
    return any(layer_settings(config, "kv_lora_rank"))


def layer_configs(config: PreTrainedConfig) -> list[Any]:
    """Return the language model's settings in each of its layers; one where layers do not differ.

    transformers raises where a setting that differs is read from the whole config.
    """
    text = config.get_text_config(decoder=True)
    return [*text.per_layer_config] if getattr(text, "is_heterogeneous", False) else [text]


def layer_settings(config: PreTrainedConfig, key: str) -> list[Any]:
    """Return one setting in each layer, as `layer_configs`; None where there is none."""
    return [getattr(layer, key, None) for layer in layer_configs(config)]


def model_positions(config: PreTrainedConfig) -> int | None:
    """Return the positions of the language model; None: no limit is known."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def takes_media(config: Mapping[str, Any]) -> bool:
    """Return whether a model of this config.json has a part that reads pictures or sound."""
    return any(config.get(name) for name in ("vision_config", "audio_config"))


def check_positions(config: PreTrainedConfig, tokens: int, flag: str) -> None:
    """Check that the model has positions for the `tokens` that `flag` asks for."""
    positions = model_positions(config)
    if positions and tokens > positions:
        problem = f"{flag} {tokens} is longer than the model's {positions} positions"
        raise InputError(f"{problem}; use {flag} {positions} or less")


def fit_seq_len(config: PreTrainedConfig, tokens: int, *, is_default: bool) -> tuple[int, list[str]]:
    """Cut a default of `tokens` to the model's positions, with a note; refuse a number that is too large."""
    positions = model_positions(config)
    if is_default and positions and tokens > positions:
        note = f"samples are cut to the model's {positions} positions; the default is {tokens} tokens"
        return positions, [note]
    check_positions(config, tokens, "--seq-len")
    return tokens, []


def build_on_meta(config: PreTrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    """Build a model on the meta device, where weights take no memory; refuse a model of several."""
    auto = auto_class(config)
    with (
        explain_nonsense(f"the config of this {config.model_type} makes no model"),
        init_empty_weights(include_buffers=True),
    ):
        model: PreTrainedModel = auto.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
    try:
        model.get_input_embeddings()
    except NotImplementedError:
        raise UnsupportedModelError(
            f"{type(model).__name__} consists of several models, and transformers does not say which of them "
            "reads text; such models are not supported"
        ) from None
    return model


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' auto class that builds this causal language model, and its towers; or refuse."""
    # the first one leaves the towers of Qwen3.5 and others out; in transformers 5.24 Llama 4 fails with them
    step = -1 if takes_media(vars(config)) and config.model_type != "llama4" else 1
    for auto in (AutoModelForCausalLM, AutoModelForMultimodalLM)[::step]:
        if type(config) in auto._model_mapping or auto.__name__ in (getattr(config, "auto_map", None) or ()):
            return auto
    raise UnsupportedModelError(f"{config.model_type} is not a causal language model that transformers knows")


@contextmanager
def explain_nonsense(message: str) -> Iterator[None]:
    """Turn transformers' errors about impossible config values into an InputError of one line."""
    try:
        yield
    except Fp8kvError:
        raise  # it says what is wrong
    except _NONSENSE as error:
        if refusal := cache_refusal(error):
            raise InputError(refusal) from error
        raise InputError(f"{message}: {one_line(error, 1000) or type(error).__name__}") from error


def _check_sizes(path: Path, document: dict[str, Any]) -> None:
    for key, value in document.items():
        if isinstance(value, dict):
            _check_sizes(path, value)
        limit = _LIMITS.get(key)
        # null stands for a default; GLM-5 next, whose latent attention has no RoPE, says 0
        if limit is None or value is None or (key, value) == ("head_dim", 0):
            continue
        for size in value if isinstance(value, list) else [value]:  # of layers that differ
            if type(size) is not int or not 0 < size <= limit:
                problem = f"the config of '{path}' has {key} {size!r:.80}"
                raise InputError(f"{problem}; it must be a whole number from 1 to {limit:,}")
