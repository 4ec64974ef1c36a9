"""Changes of weights that multiply K and V, and leave the outputs of a model as they are.

Projections are found by their usual names, norms behind them by how they compute. All of it is a guess until
`proof.py` has proved it on the model.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.capture.attention import CachedAttention, map_attention
from calib.errors import UnsupportedModelError
from calib.rescale.changes import AttentionWeights, Factors, LayerFactors, WeightChange, norm_parameters
from calib.rescale.latent import latent_changes

_SEPARATE = ("q_proj", "k_proj", "v_proj")
_STACKED = "qkv_proj"  # rows of all queries, then of all keys, then of all values
_GROUPED = "query_key_value"  # rows of one KV head after the other: its queries, its key, its value
_OUT = ("o_proj", "dense", "out_proj")
_NORMS = {
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "q"),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), "k"),
}


def cached_attention(model: PreTrainedModel) -> dict[str, CachedAttention]:
    """Return the attention modules of `model`; refuse models in which no factor can be moved."""
    attention = map_attention(model)
    clip = getattr(model.config.get_text_config(decoder=True), "clip_qkv", None)
    if clip is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} clips Q, K and V at {clip}, so they do not follow a factor in front of "
            "them"
        )
    if attention.shared:
        raise UnsupportedModelError(
            f"{next(iter(attention.shared))} attends to another layer's K and V, which no factor of its own "
            "can undo"
        )
    return attention.cached


def shares_k(model: PreTrainedModel, cached: CachedAttention) -> bool:
    """Return whether all KV heads need the same factors for K, as a norm of one head's size does."""
    sizes = [norm.get_parameter("weight").numel() for part, _, norm in _norms(model, cached) if part == "k"]
    return any(size < cached.num_kv_heads * cached.head_dim for size in sizes)


def normalises_v(model: PreTrainedModel, cached: CachedAttention) -> bool:
    """Return whether V is normalised, which undoes a factor in front of it, as in Gemma 4."""
    return hasattr(model.get_submodule(cached.name), "v_norm")


def list_changes(
    model: PreTrainedModel, modules: Mapping[str, CachedAttention], factors: Factors
) -> list[WeightChange]:
    """List the parameters to multiply, so that K and V of some modules get `factors` other than 1."""
    changes = [change for name in factors for change in _layer_changes(model, modules[name], factors[name])]
    changes = [change for change in changes if bool((change.factor != 1).any())]
    names: dict[int, str] = {}
    for change in changes:
        name = names.setdefault(id(model.get_parameter(change.name)), change.name)
        if name != change.name:
            raise UnsupportedModelError(
                f"'{change.name}' and '{name}' are the same tensor: it would be multiplied twice"
            )
    return changes


def _layer_changes(
    model: PreTrainedModel, cached: CachedAttention, factors: LayerFactors
) -> Iterator[WeightChange]:
    weights = AttentionWeights(cached.name, model.get_submodule(cached.name))
    if cached.latent:
        yield from latent_changes(weights, cached, factors)
        return
    if normalises_v(model, cached) and bool((factors.v != 1).any()):
        raise UnsupportedModelError(
            f"{cached.name} normalises V, which undoes a factor in front of it; V's can be 1 alone"
        )
    queries = cached.num_heads // cached.num_kv_heads
    heads = {"q": (1 / factors.k).repeat_interleave(queries, 0), "k": factors.k, "v": factors.v}
    for part, child, _ in _norms(model, cached):
        yield from weights.change_norm(child, heads[part])
        heads[part] = torch.ones_like(heads[part])  # the norm undoes what is in front of it
    yield from _projection_changes(weights, cached.num_kv_heads, heads)
    out, _ = weights.find_linear(*_OUT)
    yield from weights.change_linear(out, columns=(1 / factors.v).repeat_interleave(queries, 0).flatten())


def _norms(model: PreTrainedModel, cached: CachedAttention) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield the norms of Q and K: q or k, name and module; refuse one without a weight."""
    for name, norm in model.get_submodule(cached.name).named_children():
        if part := _NORMS.get(name):
            norm_parameters(f"{cached.name}.{name}", norm)
            yield part, name, norm


def _projection_changes(
    weights: AttentionWeights, num_kv_heads: int, heads: Mapping[str, Tensor]
) -> Iterator[WeightChange]:
    first, _ = weights.find_linear(_SEPARATE[0], _STACKED, _GROUPED)
    if first in _SEPARATE:
        for part, child in zip("qkv", _SEPARATE, strict=True):
            if bool((heads[part] != 1).any()):  # Gemma 4's V may have no layer of its own
                yield from weights.change_linear(weights.find_linear(child)[0], heads[part].flatten())
    elif first == _STACKED:
        yield from weights.change_linear(first, torch.cat([heads[part].flatten() for part in "qkv"]))
    else:
        groups = [heads[part].reshape(num_kv_heads, -1) for part in "qkv"]
        yield from weights.change_linear(first, torch.cat(groups, dim=1).flatten())
