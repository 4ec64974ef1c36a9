"""Cost of a model, from its config: it is built on the meta device, which takes no memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from calib.errors import UnsupportedModelError
from calib.files.model_directory import check_layers, read_index
from calib.files.names import SINGLE_FILE
from calib.files.safetensors_header import read_header
from calib.files.strict_json import read_object
from calib.layerwise.memory import activation_bytes
from calib.models.config import (
    build_on_meta,
    caches_latents,
    check_cacheable,
    explain_nonsense,
    layer_configs,
    read_config,
)
from calib.models.sources import builtin_model, download_config
from fp8kv_runtime.hf import is_latent


@dataclass(frozen=True)
class ModelShape:
    """Sizes in bytes, counts, and floating-point operations."""

    config: PreTrainedConfig
    dtype: torch.dtype
    parameters: int
    layers: list[dict[str, Tensor]]  # each decoder layer's weights, on the meta device
    flops_per_token: int  # of the weights that one token meets, in the decoder
    flops_per_pair: int  # of a query and a key, over all layers
    cached_values: int  # of K and V, or of latents, per token

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.parameters * self.dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of the largest decoder layer's weights."""
        sizes = (sum(weight.numel() for weight in layer.values()) for layer in self.layers)
        return max(sizes) * self.dtype.itemsize

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one token between two layers."""
        text = self.config.get_text_config(decoder=True)
        return int(text.hidden_size) * self.dtype.itemsize

    def flops(self, samples: int, seq_len: int) -> int:
        """Floating-point operations of one pass; layers with a sliding window need less."""
        pairs = seq_len * (seq_len + 1) // 2
        return samples * (seq_len * self.flops_per_token + pairs * self.flops_per_pair)

    def activation_bytes(self, rows: int, columns: int) -> int:
        """Bytes alive while one layer computes a batch."""
        return activation_bytes(self.config, self.dtype, self.layers, rows, columns)


def model_shape(model: str, *, trust_remote_code: bool = False) -> ModelShape:
    """The shape of a model directory, a config.json, or a model on the Hub; reads no weight."""
    config = _read_config(model, trust_remote_code=trust_remote_code)
    built = build_on_meta(config, trust_remote_code=trust_remote_code)
    with explain_nonsense(f"a {config.model_type} of this config cannot be planned for"):
        return _measure(built, config)


def attention_heads(model: str, *, trust_remote_code: bool = False) -> tuple[int, int, int]:
    """Query heads, KV heads and head_dim of a model, which is found as by `model_shape`."""
    config = _read_config(model, trust_remote_code=trust_remote_code)
    if caches_latents(config):
        raise UnsupportedModelError(
            f"{config.model_type} caches latents (MLA), and the kernels are for K and V of "
            "heads; give their shape with --heads instead of MODEL"
        )
    with explain_nonsense(f"a {config.model_type} of this config has heads of different sizes"):
        shapes = {_heads(layer) for layer in layer_configs(config)}
    if len(shapes) > 1:
        sizes = " and ".join("/".join(map(str, shape)) for shape in sorted(shapes))
        raise UnsupportedModelError(
            f"layers of this {config.model_type} have other heads ({sizes}); give the shape of one "
            "with --heads instead of MODEL"
        )
    return shapes.pop()


def _read_config(model: str, *, trust_remote_code: bool) -> PreTrainedConfig:
    path = _config_file(model)
    document = read_object(path)
    if Path(model).is_dir():
        single = path.with_name(SINGLE_FILE)
        weights = read_header(single) if single.exists() else {}
        check_layers(path.parent, document, read_index(path.parent) or weights)
    config = read_config(path, document, trust_remote_code=trust_remote_code)
    check_cacheable(config, document)
    return config


def _config_file(model: str) -> Path:
    path = builtin_model(model) if model.startswith("builtin:") else Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    return path if path.exists() or path.suffix == ".json" else download_config(model)


def _measure(model: PreTrainedModel, config: PreTrainedConfig) -> ModelShape:
    text = config.get_text_config(decoder=True)
    layers = _decoder_layers(model, text)
    attending = _attending(model, layers, text)
    heads = int(text.num_attention_heads)
    settings = [_of_layer(module, config) for module in attending]
    cached = attending[: len(attending) - (getattr(text, "num_kv_shared_layers", None) or 0)]
    return ModelShape(
        config,
        config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16,
        sum(weight.numel() for weight in model.parameters()),
        [dict(layer.named_parameters()) for layer in layers],
        sum(2 * _met_by_a_token(each, text) for layer in layers for each in layer.modules()),
        sum(2 * heads * _attended_values(*each) for each in zip(attending, settings, strict=True)),
        sum(_cached_values(*each) for each in zip(cached, settings, strict=False)),
    )


def _of_layer(attention: Any, config: PreTrainedConfig) -> Any:
    """The settings of the layer that an attention module is in."""
    layers = layer_configs(config)
    return layers[attention.layer_idx] if len(layers) > 1 else layers[0]


def _attending(model: PreTrainedModel, layers: list[nn.Module], text: Any) -> list[nn.Module]:
    """The attention modules of the layers that cache K and V; others keep a state."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(layers)
    attending = [
        module
        for layer, kind in zip(layers, kinds, strict=True)
        if kind == "hybrid" or ("attention" in kind and "linear" not in kind)
        for module in _attention_of(layer)
    ]
    if not attending or not getattr(text, "num_attention_heads", None):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no attention layer that caches K and V, or a latent, "
            "which a scale could describe: it is a state-space or recurrent model"
        )
    return attending


def _attention_of(layer: nn.Module) -> list[nn.Module]:
    """The attention modules of a layer: one, or as many as cache a latent."""
    latent = [module for module in layer.modules() if is_latent(module)]
    return latent or [module for module in layer.modules() if _is_attention(module)][:1]


def _is_attention(module: nn.Module) -> bool:
    # a wrapper around it has neither
    is_it = hasattr(module, "layer_idx") or hasattr(module, "k_proj")
    return "Attention" in type(module).__name__ and is_it


def _decoder_layers(model: PreTrainedModel, text: Any) -> list[nn.Module]:
    # LongCat counts its two attentions per layer as two hidden layers
    counts = [int(text.num_hidden_layers), getattr(text, "num_layers", None)]
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) in counts:
            return list(module)
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {counts[0]} decoder layers")


def _met_by_a_token(module: nn.Module, text: Any) -> int:
    """Values of the matrices that one token is multiplied with, of this very module."""
    weights = [weight for weight in module.parameters(recurse=False) if weight.dim() > 1]
    if isinstance(module, nn.Conv1d) or all(weight.dim() == 2 for weight in weights):
        return sum(weight.numel() for weight in weights)
    experts = getattr(text, "num_experts_per_tok", None)
    # fused experts [E, ., .]; without experts, blocks of a block-diagonal matrix
    return sum(weight[0].numel() * (experts or len(weight)) for weight in weights)


def _attended_values(attention: Any, text: Any) -> int:
    """K and V of one token and head, as a head attends to them."""
    if is_latent(attention):
        parts = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return sum(int(getattr(attention, part)) for part in parts)
    head_dim = _head_dim(attention, text)
    return head_dim + int(getattr(attention, "v_head_dim", None) or head_dim)


def _cached_values(attention: Any, text: Any) -> int:
    """K and V of one token, or its latent and k_pe."""
    if is_latent(attention):
        return int(attention.kv_lora_rank) + int(attention.qk_rope_head_dim)
    key, value = (getattr(attention, name, None) for name in ("k_proj", "v_proj"))
    value = key if value is None else value  # V is made of what K is made of
    if isinstance(key, nn.Linear) and isinstance(value, nn.Linear):
        return key.out_features + value.out_features
    return 2 * _heads(text)[1] * _head_dim(attention, text)


def _head_dim(attention: nn.Module, text: Any) -> int:
    own = getattr(attention, "head_dim", None)  # layers of some models differ
    return own if isinstance(own, int) else _heads(text)[2]


def _heads(text: Any) -> tuple[int, int, int]:
    heads = int(text.num_attention_heads)
    kv_heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_kv_heads", None)
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        kv_heads = 1
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads, int(kv_heads or heads), int(head_dim)
