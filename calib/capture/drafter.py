"""A drafter in a checkpoint of its own (EAGLE, EAGLE-3), loaded as far as its attention."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaModel, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from calib.capture.attention import AttentionMap, CachedAttention, Draft
from calib.engines.model_classes import architecture
from calib.errors import InputError, UnsupportedModelError
from calib.files.model_directory import ModelDirectory
from calib.formats import FORMATS
from calib.models.config import read_config
from calib.models.load import LazyWeight, input_device
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


class _DrafterLayer(LlamaDecoderLayer):  # type: ignore[misc]
    fc: nn.Linear
    hidden_norm: nn.Module  # of EAGLE-3 alone

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
    special = _special_settings(config) + _special_settings(nested)
    special += ["target_hidden_size"] * (
        config.get("target_hidden_size") not in (None, config["hidden_size"])
    )
    is_single = (len(drafter.modules), drafter.num_layers, config.get("model_type")) == (1, 1, "llama")
    layers = config.get(_LAYERS) or (2, count // 2, count - 3)
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
    elif not is_listed or any(layer not in range(count) for layer in layers):
        reason = f"the layers that it reads are {layers}, and the model has {count}"
    elif len({*layers}) != len(nested.get(_LAYERS) or range(3)):
        reason = f"the layers that it reads are {layers}, and vLLM wants 3 that differ"
    else:
        return tuple(sorted({*layers}))
    raise UnsupportedModelError(f"the drafter '{drafter.path}' cannot be measured: {reason}")


def _special_settings(settings: dict[str, Any]) -> list[str]:
    """Return the settings that change what a drafter reads, or how; an id of 0 is one, too."""
    special = [key for key in _NOT_KNOWN if not any(settings.get(key) is unset for unset in (None, False))]
    return special + ["use_aux_hidden_state"] * (settings.get("use_aux_hidden_state") is False)


def read_by_drafter(
    attention: AttentionMap, model: PreTrainedModel, drafter: ModelDirectory, layers: tuple[int, ...]
) -> AttentionMap:
    """Put the cache of `drafter`, which reads the inputs of `layers`, in the place of the model's own.

    An InputError if it lacks a weight, or is one for another model.
    """
    config: Any = read_config(drafter.path, drafter.config, trust_remote_code=False)
    weights = {name: LazyWeight(source) for name, source in all_weights(drafter, model.dtype).items()}
    last, embeddings, (name,) = [*attention.cached][-1], model.get_input_embeddings(), drafter.modules
    heads, architecture_name = config.num_key_value_heads, architecture(drafter.config)
    # K and V depend on no other weights
    config.update({"vocab_size": 1, "intermediate_size": 1, "pad_token_id": None})
    whole, layer = LlamaModel(config).eval(), _DrafterLayer(config, 0).eval()
    # of these classes SGLang's alone has a bias
    whole.layers[0], layer.fc = layer, nn.Linear(1, 1, bias=architecture_name == "LlamaForCausalLMEagle")
    parts = {f"{name}.{x}_proj": layer.get_submodule(f"self_attn.{x}_proj") for x in "qkv"}
    parts["fc"] = layer.fc
    if layers:
        layer.hidden_norm, outer = LlamaRMSNorm(1, config.rms_norm_eps), name.rpartition(".")[0]
        parts |= {f"{outer}.{x}": layer.get_submodule(x) for x in ("input_layernorm", "hidden_norm")}
    if "embed_tokens.weight" in weights:
        parts["embed_tokens"] = whole.embed_tokens
    device = next(model.get_submodule(last).parameters()).device
    _load_parts(drafter, parts, weights, device, model.dtype)
    whole.embed_tokens = whole.embed_tokens.to(input_device(model)) if "embed_tokens" in parts else embeddings
    rows, width = embeddings.weight.shape
    modules = layer.fc, layer.self_attn.k_proj, layer.self_attn.v_proj, whole.embed_tokens
    of_heads = config.head_dim * heads, width * (1 + bool(layers))
    shapes = [(width, width * (len(layers) or 2)), of_heads, of_heads, (rows, width)]
    if config.hidden_size != width or [module.weight.shape for module in modules] != shapes:
        raise InputError(
            f"'{drafter.path}' is a drafter of a model of another size, or not as its config says"
        )
    whole.rotary_emb.to(device)
    sizes = config.head_dim, config.head_dim
    module = CachedAttention(name, 0, config.num_attention_heads, heads, 1, *sizes)
    draft = Draft(whole, "layers.0.self_attn", module, layers)
    return replace(attention, cached={name: module}, shared={}, draft=draft)


def _load_parts(
    drafter: ModelDirectory,
    parts: dict[str, nn.Module],
    weights: dict[str, LazyWeight],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Load the `parts` of a drafter, by the names of their weights."""
    for prefix, module in parts.items():
        if f"{prefix}.bias" in weights and getattr(module, "bias", None) is None:
            raise InputError(
                f"'{drafter.path}' holds '{prefix}.bias', and {architecture(drafter.config)} has none"
            )
        for key, _ in [*module.named_parameters()]:
            if (weight := weights.get(f"{prefix}.{key}")) is None:
                raise InputError(f"'{drafter.path}' lacks the weight '{prefix}.{key}'; download it again")
            values = weight[...].to(device, dtype)
            setattr(module, key, nn.Parameter(values, requires_grad=False))
