"""What a model's config says about its cost: built on the meta device, where nothing has a size."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from calib.builtin import builtin_model
from calib.checkpoint import read_json
from calib.errors import InputError, UnsupportedModelError
from calib.hub import download_config
from calib.model import auto_class, check_cacheable
from calib.offload.budget import activation_bytes


@dataclass(frozen=True)
class ModelShape:
    """Sizes in bytes, counts, and floating-point operations."""

    config: PreTrainedConfig
    dtype: torch.dtype
    parameters: int
    layers: list[dict[str, Tensor]]  # each decoder layer's weights, on the meta device
    flops_per_token: int  # of the weights that one token meets, in the decoder
    flops_per_pair: int  # of a query and a key, over all layers
    cached_values: int  # of K and V per token

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
        return int(_text(self.config).hidden_size) * self.dtype.itemsize

    def flops(self, samples: int, seq_len: int) -> int:
        """Floating-point operations of one pass; layers with a sliding window need less."""
        pairs = seq_len * (seq_len + 1) // 2
        return samples * (seq_len * self.flops_per_token + pairs * self.flops_per_pair)

    def activation_bytes(self, rows: int, columns: int) -> int:
        """Bytes alive while one layer computes a batch."""
        return activation_bytes(self.config, self.dtype, self.layers, rows, columns)


def model_shape(model: str, *, trust_remote_code: bool = False) -> ModelShape:
    """The shape of a model directory, a config.json, or a model on the Hub; no weight is read.

    Raises:
        InputError: there is no such model, or its config cannot be read.
        UnsupportedModelError: it is not a decoder that keeps K and V per head.
    """
    config = _read_config(model, trust_remote_code=trust_remote_code)
    with init_empty_weights(include_buffers=True):
        built = auto_class(config).from_config(
            copy.deepcopy(config), trust_remote_code=trust_remote_code
        )
    return _measure(built, config)


def attention_heads(model: str, *, trust_remote_code: bool = False) -> tuple[int, int, int]:
    """Query heads, KV heads and head_dim; raises as `model_shape` does."""
    return _heads(_text(_read_config(model, trust_remote_code=trust_remote_code)))


def _read_config(model: str, *, trust_remote_code: bool) -> PreTrainedConfig:
    path = _config_file(model)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"cannot read '{path}': {' '.join(str(error).split())}") from None
    check_cacheable(config, read_json(path))
    return config


def _config_file(model: str) -> Path:
    is_builtin = model.startswith("builtin:")
    path = builtin_model(model) if is_builtin else Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    return path if path.exists() or path.suffix == ".json" else download_config(model)


def _measure(model: PreTrainedModel, config: PreTrainedConfig) -> ModelShape:
    text = _text(config)
    layers = _decoder_layers(model, int(text.num_hidden_layers))
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(layers)
    attending = sum("attention" in kind and "linear" not in kind for kind in kinds)
    heads, kv_heads, head_dim = _heads(text)
    return ModelShape(
        config,
        config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16,
        sum(weight.numel() for weight in model.parameters()),
        [dict(layer.named_parameters()) for layer in layers],
        sum(2 * _met_by_a_token(weight, text) for m in layers for weight in m.parameters()),
        4 * attending * heads * head_dim,
        2 * attending * kv_heads * head_dim,
    )


def _decoder_layers(model: PreTrainedModel, count: int) -> list[nn.Module]:
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {count} decoder layers")


def _met_by_a_token(weight: Tensor, text: Any) -> int:
    """Values of a matrix that one token is multiplied with."""
    if weight.dim() == 2:
        return weight.numel()
    if weight.dim() == 3:  # fused experts [E, ., .]
        return weight[0].numel() * int(text.num_experts_per_tok)
    return 0


def _heads(text: Any) -> tuple[int, int, int]:
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    return heads, kv_heads, int(getattr(text, "head_dim", None) or text.hidden_size // heads)


def _text(config: PreTrainedConfig) -> Any:
    return config.get_text_config(decoder=True)
