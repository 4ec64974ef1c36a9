"""A drafter in a checkpoint of its own (EAGLE, EAGLE-3), loaded as far as its attention."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaModel, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from calib.capture.attention import AttentionMap, CachedAttention, Draft
from calib.engines.model_classes import architecture
from calib.errors import InputError, UnsupportedModelError, one_line
from calib.files.model_directory import ModelDirectory
from calib.files.tensors import Source
from calib.formats import FORMATS
from calib.models.config import read_config
from calib.models.load import input_device
from calib.models.quantized.weights import all_weights
from calib.recipe import Recipe

# types of models whose hidden states were compared with those that a drafter reads in vLLM
_MODELS = ("llama", "qwen2", "qwen3")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_NOT_KNOWN = (
    *("norm_before_fc", "fc_norm", "use_aux_norm", "num_aux_hidden_states"),
    *("ptd_token_id", "pard_token", "mask_token_id", "parallel_drafting"),  # of P-EAGLE
    *("dflash_config", "target_layer_ids", "dspark_target_layer_ids", "layer_ids"),
)


class _DrafterLayer(nn.Module):
    """The parts of a drafter of size `width` that K and V depend on."""

    def __init__(self, attention: nn.Module, width: int, states: int, eps: float, *, has_bias: bool) -> None:
        super().__init__()
        self.fc, self.self_attn = nn.Linear(width * (states or 2), width, bias=has_bias), attention
        del attention.o_proj
        if states:  # EAGLE-3
            self.input_layernorm, self.hidden_norm = LlamaRMSNorm(width, eps), LlamaRMSNorm(width, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, angles: Any, *_: Any) -> None:
        if hasattr(self, "hidden_norm"):
            joined = torch.cat((self.input_layernorm(embedded), self.hidden_norm(self.fc(hidden))), -1)
        else:
            joined = self.fc(torch.cat((embedded, hidden), -1))
        self.self_attn(joined, angles, None)


def layers_read(drafter: ModelDirectory, model: PreTrainedConfig, recipe: Recipe) -> tuple[int, ...]:
    """Return the layers of `model` whose inputs a drafter reads; none: it reads the last hidden states.

    An UnsupportedModelError where what engines run of it is not known.
    """
    config, name, count = drafter.config, architecture(drafter.config), model.num_hidden_layers
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    formats = {form: FORMATS[form] for form in recipe.export.formats}
    unknown = [form for form, x in formats.items() if x.nvfp4 or not (x.rules and name in x.rules.drafts)]
    values = [(key, settings.get(key)) for settings in (config, nested) for key in _NOT_KNOWN]
    key = "use_aux_hidden_state"
    values += [(key, not settings.get(key, True)) for settings in (config, nested)]
    special = [key for key, value in values if value is not None and value is not False]  # an id may be 0
    is_single = (len(drafter.modules), drafter.num_layers, config.get("model_type")) == (1, 1, "llama")
    layers, number = config.get(_LAYERS) or (2, count // 2, count - 3), len(nested.get(_LAYERS) or range(3))
    is_listed = isinstance(layers, list | tuple) and all(type(layer) is int for layer in layers)
    if recipe.targets == "qkv":
        reason = "whether engines load a query scale of one is not known; use --targets kv"
    elif unknown:
        reason = f"the engine of --format {unknown[0]} is not known to load scales of a drafter {name}"
    elif model.model_type not in _MODELS:
        reason = f"what it reads of a {model.model_type} is not known, only of {', '.join(_MODELS)}"
    elif special or not is_single:
        reason = f"its config.json says {special[0]}" if special else "it is not one layer of a llama"
    elif "Eagle3" not in str(name):
        return ()
    elif (config.get(_LAYERS) or nested.get(_LAYERS)) and "sglang" in formats:
        reason = f"SGLang counts {_LAYERS} of its config.json in another way than vLLM"
    elif nested.get(_LAYERS) not in (None, [], config.get(_LAYERS)):
        reason = f"vLLM reads {_LAYERS} beside eagle_config, and there config.json says something else"
    elif not is_listed or len({*layers} & {*range(count)}) != number or number != len(layers):
        reason = f"the layers that it reads are {layers}, and vLLM wants {number} of the model's {count}"
    else:
        return tuple(sorted(layers))
    raise UnsupportedModelError(f"the drafter '{drafter.path}' cannot be measured: {reason}")


def read_by_drafter(
    attention: AttentionMap, model: PreTrainedModel, drafter: ModelDirectory, layers: tuple[int, ...]
) -> AttentionMap:
    """Put the cache of `drafter`, which reads the inputs of `layers`, in the place of the model's own.

    An InputError if it is one for another model, or its weights are not those that its config says.
    """
    config: Any = read_config(drafter.path, drafter.config, trust_remote_code=False)
    weights, (name,) = all_weights(drafter, model.dtype), drafter.modules
    device = next(model.get_submodule([*attention.cached][-1]).parameters()).device
    embeddings, (rows, width) = model.get_input_embeddings(), model.get_input_embeddings().weight.shape
    problems = _size_problems(config, weights, rows, width)
    # K and V depend on no other weights
    config.update({"vocab_size": 1, "intermediate_size": 1, "pad_token_id": None})
    config.hidden_size = width * (2 if layers else 1)
    with torch.device("meta"):
        whole: Any = LlamaModel(config)
        own, has_bias = whole.layers[0].self_attn, architecture(drafter.config) == "LlamaForCausalLMEagle"
        layer = _DrafterLayer(own, width, len(layers), config.rms_norm_eps, has_bias=has_bias)
    whole.layers[0], whole.rotary_emb = layer, LlamaRotaryEmbedding(config).to(device)
    outer = name.removesuffix("self_attn")
    places = {x if x == "fc" else f"{outer}{x}": x for x, _ in layer.named_modules()}
    names = {x: x.rpartition(".") for x in weights if x.endswith((".weight", ".bias"))}
    state = {f"{places[x]}.{key}": name for name, (x, _, key) in names.items() if x in places}
    try:
        tensors = {key: weights[x].read().to(device, model.dtype) for key, x in state.items()}
        layer.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        problems.append(one_line(str(error).partition(":")[2], 200))
    if problems:
        is_wrong = "is a drafter of a model of another size, or not as its config says"
        raise InputError(f"'{drafter.path}' {is_wrong}: {problems[0]}")
    if (table := weights.get("embed_tokens.weight")) is not None:
        embeddings = nn.Embedding(rows, width, _weight=table.read().to(input_device(model), model.dtype))
    whole.embed_tokens = embeddings
    sizes = config.num_key_value_heads, 1, config.head_dim, config.head_dim
    module = CachedAttention(name, 0, config.num_attention_heads, *sizes)
    draft = Draft(whole.eval().requires_grad_(False), "layers.0.self_attn", module, layers)
    return replace(attention, cached={name: module}, shared={}, draft=draft)


def _size_problems(config: Any, weights: Mapping[str, Source], rows: int, width: int) -> list[str]:
    """Say what differs between a drafter's config, its weights, and a model of so many tokens."""
    tokens = getattr(config, "draft_vocab_size", None) or config.vocab_size
    sizes = {"vocab_size": (config.vocab_size, rows), "hidden_size": (config.hidden_size, width)}
    sizes["target_hidden_size"] = (getattr(config, "target_hidden_size", None) or width, width)
    tables = {"embed_tokens.weight": config.vocab_size, "lm_head.weight": tokens, "d2t": tokens}
    sizes |= {x: (weights[x].shape[0], n) for x, n in tables.items() if x in weights}
    return [f"{name} {one:,}, not {other:,}" for name, (one, other) in sizes.items() if one != other]
