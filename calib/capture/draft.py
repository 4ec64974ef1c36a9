"""Layers that draft tokens, of a model (MTP) or a drafter (EAGLE), loaded as far as their attention."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaModel, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.utils.generic import ContextManagers

from calib.capture.attention import AttentionMap, CachedAttention, Draft
from calib.engines.catalogue import load_catalogue
from calib.engines.model_classes import architecture
from calib.errors import InputError, UnsupportedModelError
from calib.files.model_directory import ModelDirectory
from calib.files.names import layer_of
from calib.files.tensors import Source
from calib.formats import FORMATS
from calib.models.config import read_config
from calib.models.load import LazyWeight, input_device
from calib.models.quantized.detect import is_quantized
from calib.models.quantized.weights import all_weights
from calib.progress import library_bars_hidden
from calib.recipe import Recipe

_NOT_NEEDED = (".mlp.", "embed_tokens.", "shared_head.")
# types of models whose hidden states were compared with those that a drafter reads in vLLM
_MODELS = ("llama", "qwen2", "qwen3")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_NOT_KNOWN = (
    *("norm_before_fc", "fc_norm", "use_aux_norm", "num_aux_hidden_states"),
    *("ptd_token_id", "pard_token", "mask_token_id", "parallel_drafting"),  # of P-EAGLE
    *("dflash_config", "target_layer_ids", "dspark_target_layer_ids", "layer_ids"),
)


def add_draft_layer(
    attention: AttentionMap,
    model: PreTrainedModel,
    checkpoint: ModelDirectory,
    device: torch.device | None = None,
    *,
    is_cut: bool = False,
) -> AttentionMap:
    """Add the MTP layer of a checkpoint, or why it is not measured; `is_cut`: the last layers are not run."""
    modules, name = checkpoint.draft_modules, architecture(checkpoint.config)
    if not modules:
        return attention
    if not any(name in engine.drafts for engine in load_catalogue().values()):
        reason = f"under which names engines load scales of those of {name} is not known"
    elif len(modules) > 1:
        reason = f"there are {len(modules)}, and what the second reads is not known"
    elif is_quantized(model.config):
        reason = "their weights are quantised in a way that only transformers reads"
    elif not hasattr(MtpModel, "get_weight_conversions"):
        reason = "transformers loads them from version 5.20 on"
    elif is_cut:
        reason = "a pass layer by layer ends at the last layer that caches K and V; use --offload none"
    elif isinstance(draft := _load(model, checkpoint, attention, device), Draft):
        return replace(attention, draft=draft)
    else:
        reason = f"the files lack a weight of theirs, '{draft}'; download the model again"
    note = f"layers that draft tokens (MTP) were not measured, and work at scale 1.0: {reason}"
    return replace(attention, note="; ".join(filter(None, (attention.note, note))))


def _load(
    model: PreTrainedModel, checkpoint: ModelDirectory, attention: AttentionMap, device: torch.device | None
) -> Draft | str:
    """Load the draft; return the name of a weight that its files lack."""
    last = [*attention.cached.values()][-1]
    layer: Any = model.get_submodule(last.name.rpartition(".")[0])
    config = deepcopy(model.config.get_text_config(decoder=True))
    kinds = {"mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["dense"]}
    config.update({"num_mtp_layers": 1, **kinds})
    parts = SimpleNamespace(layers=[layer], rotary_emb=model.get_decoder().rotary_emb)
    own = {"get_decoder": lambda: parts, "get_input_embeddings": model.get_input_embeddings}
    whole: Any = SimpleNamespace(config=config, lm_head=None, **own)
    with ContextManagers(MtpModel.get_init_context(model.dtype, False, False, None)):
        mtp = MtpModel(whole, 1)
    weights = {
        name: LazyWeight(source)
        for name, source in all_weights(checkpoint, model.dtype).items()
        if checkpoint.is_of_draft(name) and not any(part in name for part in _NOT_NEEDED)
    }
    device, mapping = device or next(layer.parameters()).device, mtp.get_weight_conversions(model)
    loading = LoadStateDictConfig(device_map={"": device}, dtype=model.dtype, weight_mapping=mapping)
    with library_bars_hidden():
        convert_and_load_state_dict_in_model(mtp, weights, loading)
    names = (n for n, x in mtp.named_parameters() if x.is_meta and n.startswith("layers."))
    if missing := next((n for n in names if ".mlp." not in n and "post_norm" not in n), None):
        return str(missing)
    (name,) = checkpoint.draft_modules
    module = replace(last, name=name, layer_idx=layer_of(name) or 0)
    return Draft(mtp.eval(), f"layers.0.mtp_block.{last.name.rpartition('.')[2]}", module)


class _DrafterLayer(nn.Module):
    """The parts of a drafter of size `width` that K and V depend on."""

    def __init__(self, attention: nn.Module, width: int, states: int, eps: float, *, has_bias: bool) -> None:
        super().__init__()
        self.fc, self.self_attn = nn.Linear(width * (states or 2), width, bias=has_bias), attention
        del attention.o_proj
        if states:  # EAGLE-3
            self.input_layernorm, self.hidden_norm = LlamaRMSNorm(width, eps), LlamaRMSNorm(width, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, angles: Any, *_: Any) -> None:
        """Attend from `embedded` tokens [B, T, W] and `hidden` states [B, T, W], or [B, T, layers * W]."""
        if hasattr(self, "hidden_norm"):
            joined = torch.cat((self.input_layernorm(embedded), self.hidden_norm(self.fc(hidden))), -1)
        else:
            joined = self.fc(torch.cat((embedded, hidden), -1))
        self.self_attn(joined, angles, None)


def layers_read(drafter: ModelDirectory, model: PreTrainedConfig, recipe: Recipe) -> tuple[int, ...]:
    """Return the layers of `model` whose inputs a drafter reads, or none; refuse one that is not known."""
    config, name = drafter.config, architecture(drafter.config)
    nested, count = config.get("eagle_config"), model.get_text_config(decoder=True).num_hidden_layers
    nested = nested if isinstance(nested, dict) else {}
    formats = {form: FORMATS[form] for form in recipe.export.formats}
    unknown = [form for form, x in formats.items() if x.nvfp4 or not (x.rules and name in x.rules.drafts)]
    pairs = [*config.items(), *nested.items()]
    special = [x for x, y in pairs if x in _NOT_KNOWN and y is not None and y is not False]  # an id may be 0
    special += [x for x, y in pairs if x == "use_aux_hidden_state" and not y]
    is_single = (len(drafter.modules), drafter.num_layers, config.get("model_type")) == (1, 1, "llama")
    layers = config.get(_LAYERS) or (2, count // 2, count - 3)
    is_listed = isinstance(layers, list | tuple) and all(type(layer) is int for layer in layers)
    number = len(layers) if is_listed and nested.get(_LAYERS) else 3
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

    Refuse weights that are not as its config says.
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
    modules, outer = dict(layer.named_modules()), name.removesuffix("self_attn")
    names = {x.removeprefix(outer): x for x in weights if x.endswith((".weight", ".bias"))}
    state = {key: weights[x] for key, x in names.items() if key.rpartition(".")[0] in modules}
    problems += _shape_problems(layer, state)
    if problems:
        is_wrong = "is a drafter of another model, or not as its config says"
        raise InputError(f"'{drafter.path}' {is_wrong}: {problems[0]}")
    layer.load_state_dict({k: x.read().to(device, model.dtype) for k, x in state.items()}, assign=True)
    if (table := weights.get("embed_tokens.weight")) is not None:
        embeddings = nn.Embedding(rows, width, _weight=table.read().to(input_device(model), model.dtype))
    whole.embed_tokens = embeddings
    sizes = config.num_key_value_heads, 1, config.head_dim, config.head_dim
    module = CachedAttention(name, 0, config.num_attention_heads, *sizes)
    draft = Draft(whole.eval().requires_grad_(False), "layers.0.self_attn", module, layers)
    return replace(attention, cached={name: module}, shared={}, draft=draft)


def _shape_problems(layer: nn.Module, state: Mapping[str, Source]) -> list[str]:
    """Say which weights of a drafter's `layer` its files lack, hold in another shape, or hold in vain."""
    shapes, sizes = ({x: [*y.shape] for x, y in part.items()} for part in (layer.state_dict(), state))
    problems = [f"its files lack {x}" for x in shapes if x not in sizes]
    problems += [f"its files hold {x}, and its architecture has none" for x in sizes if x not in shapes]
    wrong = [x for x in sizes if sizes[x] != shapes.get(x, sizes[x])]
    return problems + [f"{x} has shape {sizes[x]}, and config.json asks for {shapes[x]}" for x in wrong]


def _size_problems(config: Any, weights: Mapping[str, Source], rows: int, width: int) -> list[str]:
    """Say what differs between a drafter's config, its weights, and a model of so many tokens."""
    tokens = getattr(config, "draft_vocab_size", None) or config.vocab_size
    sizes = {"vocab_size": (config.vocab_size, rows), "hidden_size": (config.hidden_size, width)}
    sizes["target_hidden_size"] = (getattr(config, "target_hidden_size", None) or width, width)
    tables = {"embed_tokens.weight": config.vocab_size, "lm_head.weight": tokens, "d2t": tokens}
    sizes |= {x: (weights[x].shape[0], n) for x, n in tables.items() if x in weights}
    return [f"{name} {one:,}, not {other:,}" for name, (one, other) in sizes.items() if one != other]
