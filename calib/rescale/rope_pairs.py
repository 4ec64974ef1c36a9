"""Pairs of channels of K that a model's RoPE turns together, found by trying.

Zeros show them: if a channel is zeroed before RoPE and not zero after it, it received a part of another
channel, however small. Each trial zeroes half of the channels, then the other half; one trial per bit of the
channel's index tells which channel that is.
"""

from collections.abc import Mapping
from contextlib import suppress
from inspect import signature

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from calib.capture.attention import CachedAttention, observe_qkv
from calib.errors import UnsupportedModelError
from calib.models.load import input_device
from calib.rescale.proof import PROBE_TOKENS, apply_changes, probe_tokens
from calib.rescale.weight_changes import LayerFactors, list_changes


def find_pairs(model: PreTrainedModel, modules: Mapping[str, CachedAttention]) -> dict[str, Tensor]:
    """Return `rotated_pairs` [D] of every module, tried once for all with the same RoPE."""
    config = model.config.get_text_config(decoder=True)
    by_layer = [getattr(config, key, None) or () for key in ("layer_types", "no_rope_layers")]
    tried: dict[object, Tensor] = {}
    pairs = {}
    for name, module in modules.items():
        layer = slice(module.layer_idx, module.layer_idx + 1)
        # layers that are equal in these have the same RoPE, as far as the config says
        kind = module.head_dim, *(tuple(values[layer]) for values in by_layer)
        if kind not in tried:
            tried[kind] = rotated_pairs(model, module)
        pairs[name] = tried[kind]
    return pairs


@torch.inference_mode()
def rotated_pairs(model: PreTrainedModel, cached: CachedAttention) -> Tensor:
    """Return the channel, [D] int64, that each one of K is rotated with; refuse any mixture but pairs."""
    channels = torch.arange(cached.head_dim)
    before = _keys(model, cached, torch.ones(cached.head_dim))
    partner = channels.clone()
    for bit in range((cached.head_dim - 1).bit_length()):
        half = (channels >> bit & 1).float()
        is_alone = torch.ones_like(channels, dtype=torch.bool)
        for mask in (half, 1 - half):
            is_alone &= (_keys(model, cached, mask) == before * mask).flatten(0, 2).all(0)
        partner = torch.where(is_alone, partner, partner ^ (1 << bit))
    is_mutual = bool((partner < len(partner)).all()) and torch.equal(partner[partner], channels)
    distances = (partner - channels).abs()
    if not is_mutual or len(set(distances[distances > 0].tolist())) > 1:
        raise UnsupportedModelError(
            f"{cached.name} mixes channels of K in another way than RoPE's pairs, so no factor per pair can "
            "be moved"
        )
    return partner


def fold_pairs(amax: Tensor, partner: Tensor) -> Tensor:
    """Return the larger `amax` [..., D] of each RoPE pair for both its channels; `partner` is [D] int64."""
    return amax.maximum(amax[..., partner])


class _KeysReached(Exception):
    """K has been computed, so the forward pass may end."""


def _keys(model: PreTrainedModel, cached: CachedAttention, factor: Tensor) -> Tensor:
    """Return K [1, K, T, D] of a module, its channels multiplied by `factor` [D] before RoPE.

    Queries are divided by it, also by zeros: nothing reads them. Tokens are at the last positions that the
    model knows: at the first ones its slowest pairs hardly turn.
    """
    keys = []

    def note(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        if name == cached.name:
            keys.append(key.to("cpu", copy=True))
            raise _KeysReached

    k, v = (torch.ones(cached.num_kv_heads, size) for size in (cached.head_dim, cached.v_head_dim))
    changes = list_changes(model, {cached.name: cached}, {cached.name: LayerFactors(k * factor, v)})
    inputs = {"input_ids": probe_tokens(model), "use_cache": False}
    last = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if last and "position_ids" in signature(model.forward).parameters:
        places = torch.arange(last - PROBE_TOKENS, last).clamp(min=0)
        inputs["position_ids"] = places[None].to(input_device(model))
    with observe_qkv(model, note), apply_changes(model, changes) as products, suppress(_KeysReached):
        try:
            functional_call(model, products, kwargs=inputs)
        except (IndexError, RuntimeError):  # MiniMax-M3 looks for the blocks of tokens before these
            functional_call(model, products, kwargs=inputs | {"position_ids": None})
    return keys[0]
