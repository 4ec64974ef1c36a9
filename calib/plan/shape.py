"""Cost of a model, from its config: it is built on the meta device, which takes no memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from calib.errors import UnsupportedModelError
from calib.model.config import build_on_meta, making_sense, read_config
from calib.model.find import builtin_model, download_config
from calib.model.load import check_cacheable
from calib.offload.memory import activation_bytes
from calib.scalefiles.json import read_object


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
    with making_sense(f"a {config.model_type} of this config cannot be planned for"):
        return _measure(built, config)


def attention_heads(model: str, *, trust_remote_code: bool = False) -> tuple[int, int, int]:
    """Query heads, KV heads and head_dim of a model, which is found as by `model_shape`."""
    config = _read_config(model, trust_remote_code=trust_remote_code)
    with making_sense(f"a {config.model_type} of this config has heads of different sizes"):
        return _heads(config.get_text_config(decoder=True))


def _read_config(model: str, *, trust_remote_code: bool) -> PreTrainedConfig:
    path = _config_file(model)
    document = read_object(path)
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
    layers = _decoder_layers(model, int(text.num_hidden_layers))
    attending = _attending(model, layers, text)
    heads = int(text.num_attention_heads)
    cached = attending[: len(attending) - (getattr(text, "num_kv_shared_layers", None) or 0)]
    return ModelShape(
        config,
        config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16,
        sum(weight.numel() for weight in model.parameters()),
        [dict(layer.named_parameters()) for layer in layers],
        sum(2 * _met_by_a_token(each, text) for layer in layers for each in layer.modules()),
        sum(4 * heads * _head_dim(module, text) for module in attending),
        sum(_cached_values(module, text) for module in cached),
    )


def _attending(model: PreTrainedModel, layers: list[nn.Module], text: Any) -> list[nn.Module]:
    """The attention modules of the layers that cache K and V; others keep a state."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(layers)
    found = [
        next((m for m in layer.modules() if _is_attention(m)), None)
        for layer, kind in zip(layers, kinds, strict=True)
        if kind == "hybrid" or ("attention" in kind and "linear" not in kind)
    ]
    attending = [module for module in found if module]
    if not attending or not getattr(text, "num_attention_heads", None):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no attention layer that caches K and V per head, which "
            "a scale could describe: it is a state-space or recurrent model"
        )
    return attending


def _is_attention(module: nn.Module) -> bool:
    # a wrapper around it has neither
    is_it = hasattr(module, "layer_idx") or hasattr(module, "k_proj")
    return "Attention" in type(module).__name__ and is_it


def _decoder_layers(model: PreTrainedModel, count: int) -> list[nn.Module]:
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {count} decoder layers")


def _met_by_a_token(module: nn.Module, text: Any) -> int:
    """Values of the matrices that one token is multiplied with, of this very module."""
    weights = [weight for weight in module.parameters(recurse=False) if weight.dim() > 1]
    if isinstance(module, nn.Conv1d) or all(weight.dim() == 2 for weight in weights):
        return sum(weight.numel() for weight in weights)
    experts = getattr(text, "num_experts_per_tok", None)
    # fused experts [E, ., .]; without experts, blocks of a block-diagonal matrix
    return sum(weight[0].numel() * (experts or len(weight)) for weight in weights)


def _cached_values(attention: nn.Module, text: Any) -> int:
    """K and V of one token."""
    projections = [getattr(attention, name, None) for name in ("k_proj", "v_proj")]
    widths = [each.out_features for each in projections if isinstance(each, nn.Linear)]
    if len(widths) == len(projections):
        return sum(widths)
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
