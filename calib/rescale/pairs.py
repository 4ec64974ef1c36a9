"""Which channels of K a model's RoPE turns together, found by trying.

Zeros in single channels show it: a channel that is zeroed in front of RoPE and is no zero behind it
holds some of another one, however small beside its own. Trials of half of the channels, once these
and once the others, tell bit by bit which one that is.
"""

from collections.abc import Mapping
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from calib.capture.attention import CachedAttention, observe_qkv
from calib.errors import UnsupportedModelError
from calib.models.load import input_device
from calib.rescale.parameters import rescaled_parameters
from calib.rescale.products import LayerFactors
from calib.rescale.proof import PROBE_TOKENS, multiplied, probe_tokens


@torch.inference_mode()
def rotated_pairs(model: PreTrainedModel, cached: CachedAttention) -> Tensor:
    """For each channel [D] of K of one module the one it is rotated with; its own without RoPE.

    UnsupportedModelError where channels mix in any other way than RoPE's pairs.
    """
    channels = torch.arange(cached.head_dim)
    before = _keys(model, cached, torch.ones(cached.head_dim))
    partner = channels.clone()
    for bit in range((cached.head_dim - 1).bit_length()):
        half = (channels >> bit & 1).float()
        is_alone = torch.ones_like(channels, dtype=torch.bool)
        for kept in (half, 1 - half):
            is_alone &= (_keys(model, cached, kept) == before * kept).flatten(0, 2).all(0)
        partner = torch.where(is_alone, partner, partner ^ (1 << bit))
    if not _is_rope(partner):
        raise UnsupportedModelError(
            f"{cached.name} mixes channels of K in another way than RoPE's pairs, so no factor per "
            "pair can be moved"
        )
    return partner


def pairs_of(model: PreTrainedModel, modules: Mapping[str, CachedAttention]) -> dict[str, Tensor]:
    """`rotated_pairs` of each of `modules`, tried once for all with the same RoPE."""
    tried: dict[object, Tensor] = {}
    found = {}
    for name, module in modules.items():
        kind = _kind(model, module)
        if kind not in tried:
            tried[kind] = rotated_pairs(model, module)
        found[name] = tried[kind]
    return found


def _kind(model: PreTrainedModel, module: CachedAttention) -> tuple[object, ...]:
    """What layers with the same RoPE have in common, as far as the config says."""
    config = model.config.get_text_config(decoder=True)
    by_layer = (getattr(config, key, None) or () for key in ("layer_types", "no_rope_layers"))
    here = slice(module.layer_idx, module.layer_idx + 1)
    return module.head_dim, *(tuple(each[here]) for each in by_layer)


class _Seen(Exception):
    """Ends a forward pass once its K is known."""


def _keys(model: PreTrainedModel, cached: CachedAttention, factor: Tensor) -> Tensor:
    """K [1, K, T, D] of a module, its channels multiplied by `factor` [D] before RoPE.

    Queries are divided by it, also by zeros: nothing reads them.
    """
    found = []

    def note(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        if name == cached.name:
            found.append(key.to("cpu", copy=True))
            raise _Seen

    heads = torch.ones(cached.num_kv_heads, cached.v_head_dim)
    factors = LayerFactors(factor.expand(cached.num_kv_heads, -1), heads)
    changes = rescaled_parameters(model, {cached.name: cached}, {cached.name: factors})
    with observe_qkv(model, note), multiplied(model, changes) as products, suppress(_Seen):
        functional_call(model, products, kwargs=_far_tokens(model))
    return found[0]


def _far_tokens(model: PreTrainedModel) -> dict[str, Any]:
    """The last positions a model knows: at the first ones its slowest pairs hardly turn."""
    given = {"input_ids": probe_tokens(model), "use_cache": False}
    last = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if last and "position_ids" in signature(model.forward).parameters:
        places = torch.arange(last - PROBE_TOKENS, last).clamp(min=0)
        given["position_ids"] = places[None].to(input_device(model))
    return given


def _is_rope(partner: Tensor) -> bool:
    """Whether channels are rotated in pairs, all as far apart as each other."""
    channels = torch.arange(len(partner))
    if bool((partner >= len(partner)).any()) or not torch.equal(partner[partner], channels):
        return False
    distances = (partner - channels).abs()
    return len(set(distances[distances > 0].tolist())) <= 1
