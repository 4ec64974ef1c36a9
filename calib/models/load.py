"""From a checkpoint to its config, checked, its tokenizer, and the model in memory."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import GENERATION_CONFIG_NAME

from calib.errors import InputError, UnsupportedModelError
from calib.files.model_directory import ModelDirectory
from calib.files.strict_json import read_object, regular_size
from calib.files.tensors import Source
from calib.models.config import (
    auto_class,
    build_on_meta,
    check_against_weights,
    making_sense,
    of_layers,
    read_config,
)
from calib.models.quantized.detect import (
    check_unused_tensors,
    drop_quantization_config,
    find_weight_format,
    is_quantized,
    unused_codes,
)
from calib.models.quantized.weights import all_weights, weight_shapes
from calib.progress import library_bars_hidden
from calib.recipe import Recipe
from fp8kv_runtime.hf import is_latent

_CAUSAL = ("ForCausalLM", "LMHead", "ForConditionalGeneration")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json")  # the first there is read
# types of models, and of layers, that keep a state of fixed size and no K and V of tokens
_RECURRENT = {"rwkv", "xlstm"}
_NOT_ATTENDING = {"linear_attention", "mamba", "recurrent", "conv", "moe", "mlp"}
_SERVED_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def load_config(checkpoint: ModelDirectory, recipe: Recipe) -> PreTrainedConfig:
    """Read the model's config and refuse, before any weight is read, what cannot be calibrated."""
    layout = find_weight_format(checkpoint)
    trust = recipe.trust_remote_code
    config = read_config(checkpoint.path, checkpoint.config, trust_remote_code=trust)
    check_cacheable(config, checkpoint.config)
    drop_quantization_config(config, layout)
    shapes = {} if is_quantized(config) else weight_shapes(checkpoint, layout)
    model = check_against_weights(config, checkpoint, shapes, trust_remote_code=trust)
    check_unused_tensors(checkpoint, unused_codes(model, shapes), shapes)
    return config


def check_cacheable(config: PreTrainedConfig, document: dict[str, Any]) -> None:
    """Refuse a model that caches no K and V; `document` is its config.json."""
    named = document.get("architectures")
    named = named if isinstance(named, list) else [named]
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    names = [name for name in named if isinstance(name, str)]
    name = next(iter(names), config.model_type)
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder; only decoder-only language models keep the "
            "KV cache that engines hold in FP8"
        )
    if not names:
        add = f'add "architectures": ["{known}"], or ' if isinstance(known, str) else ""
        raise InputError(
            f"config.json of this {config.model_type} names no architecture, by which engines "
            f"choose a class; {add}download it again"
        )
    if not any(kind in name for name in names for kind in _CAUSAL):
        raise UnsupportedModelError(
            f"{name} is not a causal language model; give a ...ForCausalLM checkpoint"
        )
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ["attention"]
    if config.model_type in _RECURRENT or _NOT_ATTENDING.issuperset(kinds):
        raise UnsupportedModelError(
            f"no layer of {name} attends: what it keeps of a text is a state of fixed size, so "
            "it has no KV cache to calibrate"
        )


def caches_latents(config: PreTrainedConfig) -> bool:
    """Whether layers cache a latent instead of K and V per head (MLA), by the config."""
    return any(of_layers(config, "kv_lora_rank"))


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


def load_model(checkpoint: ModelDirectory, config: PreTrainedConfig, recipe: Recipe) -> PreTrainedModel:
    """Load the model, with weights that are decoded; refuse it if one is not in the checkpoint."""
    device_map: str | dict[str, int] = "cpu"
    if uses_gpu(recipe):
        # one of several processes has a GPU of its own; one alone has them all
        alone = not torch.distributed.is_initialized()
        device_map = "auto" if alone else {"": torch.cuda.current_device()}
    if find_weight_format(checkpoint):
        sources = weight_sources(checkpoint, config, recipe)
        pending = {name: Pending(source) for name, source in sources.items()}
        return load_from(pending, checkpoint, config, recipe, device_map)
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
    check_complete(checkpoint, info, checkpoint.entries.keys())
    return _ready(model)


def load_from(
    weights: Mapping[str, Any],
    checkpoint: ModelDirectory,
    config: PreTrainedConfig,
    recipe: Recipe,
    device_map: Any,
) -> PreTrainedModel:
    """Load the model from `weights`, by name, which transformers indexes when it needs them."""
    generation = None
    if (checkpoint.path / GENERATION_CONFIG_NAME).exists():
        with loading(f"'{checkpoint.path / GENERATION_CONFIG_NAME}'"):
            generation = GenerationConfig.from_pretrained(checkpoint.path)
    with loading(f"'{checkpoint.path}'"):
        model_class = type(build_on_meta(config, trust_remote_code=recipe.trust_remote_code))
        if not isinstance(config, model_class.config_class):
            config = config.get_text_config(decoder=True)
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=requested_dtype(recipe),
            device_map=device_map,
            generation_config=generation,
            output_loading_info=True,
        )
    check_complete(checkpoint, info, weights)
    return _ready(model)


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    """Make `model` one that reads.

    Latent attention makes K and V for each query head, whatever number of KV heads its config
    says; transformers would repeat them, and stop on the heads that it has then.
    """
    for module in filter(is_latent, model.modules()):
        module.num_key_value_groups = 1
    return model.eval()


def weight_sources(
    checkpoint: ModelDirectory, config: PreTrainedConfig, recipe: Recipe
) -> Mapping[str, Source]:
    """Every weight of the checkpoint, as a plain one would name it, to be read when needed."""
    wanted = requested_dtype(recipe)
    # as transformers resolves `auto`
    dtype = wanted if isinstance(wanted, torch.dtype) else config.dtype
    return all_weights(checkpoint, find_weight_format(checkpoint), dtype)


class Pending:
    """A weight that is read when transformers takes its elements."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.dtype = source.dtype
        self.memory: Tensor | None = None

    def is_floating_point(self) -> bool:
        """Whether its type may be the model's."""
        return self.dtype.is_floating_point

    def __getitem__(self, index: object) -> Tensor:
        return self._source.read(self.memory)


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Hide the libraries' progress bars, and turn their refusal to load `what` into one line."""
    with making_sense(f"cannot load {what}"), library_bars_hidden():
        yield


def check_complete(checkpoint: ModelDirectory, info: dict[str, Any], names: Collection[str]) -> None:
    """Check transformers' loading info: no weight was initialised at random, no scale left over.

    `names` are those of the weights that it was given.
    """
    check_unused_tensors(checkpoint, info["unexpected_keys"], names)
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
        raise InputError("--device cuda: torch sees no GPU; use --device cpu, or see `fp8kv doctor`")
    return recipe.device != "cpu" and torch.cuda.is_available()


def load_tokenizer(checkpoint: ModelDirectory, recipe: Recipe) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer."""
    files = [checkpoint.path / name for name in _TOKENIZERS]
    for file in [file for file in files if file.exists()][:1]:
        regular_size(file)
    try:
        with loading(f"the tokenizer of '{checkpoint.path}'"):
            return AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=recipe.trust_remote_code)
    except Exception as error:  # the library tokenizers raises nothing narrower
        if type(error) in (InputError, Exception):
            _check_tokenizer(checkpoint.path / _TOKENIZERS[0])
        if type(error) is Exception:
            raise InputError(f"cannot load the tokenizer of '{checkpoint.path}': {error}") from error
        raise


def _check_tokenizer(file: Path) -> None:
    """Refuse a tokenizer.json that is no JSON, or without a vocabulary."""
    if file.exists():
        model = read_object(file).get("model")
        if not (isinstance(model, dict) and model.get("vocab")):
            raise InputError(f"'{file}' holds no tokenizer: it has no model with a vocab; download it again")


def served_dtype(checkpoint: ModelDirectory) -> torch.dtype | None:
    """The 16-bit type that engines load the weights in, as far as the config says."""
    says = checkpoint.config
    return _SERVED_DTYPES.get(str(says.get("dtype") or says.get("torch_dtype")))
