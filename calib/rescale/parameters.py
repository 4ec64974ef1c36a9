"""Which weights to multiply so that K and V grow or shrink and a model's outputs stay the same.

Projections are found by their usual names, norms behind them by how they compute. All of it is a
guess until `proof.py` has proved it on the model.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.capture.attention import CachedAttention, map_attention
from calib.errors import UnsupportedModelError
from calib.rescale.latent import of_latent
from calib.rescale.products import (
    Factors,
    LayerFactors,
    Rescaled,
    check_size,
    linear_child,
    norm_parameters,
    of_linear,
    of_norm,
)

_SEPARATE = ("q_proj", "k_proj", "v_proj")
_STACKED = "qkv_proj"  # rows of all queries, then of all keys, then of all values
_GROUPED = "query_key_value"  # rows of one KV head after the other: its queries, its key, its value
_OUT = ("o_proj", "dense", "out_proj")
_NORMS = {
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "q"),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), "k"),
}


def cached_attention(model: PreTrainedModel) -> dict[str, CachedAttention]:
    """The attention modules of `model`; UnsupportedModelError where no factor can be moved."""
    attention = map_attention(model)
    clip = getattr(model.config.get_text_config(decoder=True), "clip_qkv", None)
    if clip is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} clips Q, K and V at {clip}, so they do not follow a factor in "
            "front of them"
        )
    if attention.shared:
        raise UnsupportedModelError(
            f"{next(iter(attention.shared))} attends to another layer's K and V, which no factor "
            "of its own can undo"
        )
    return attention.cached


def shares_k(model: PreTrainedModel, cached: CachedAttention) -> bool:
    """Whether all KV heads must have the same factors for K: a norm behind it is of one head."""
    sizes = [norm.get_parameter("weight").numel() for which, _, norm in _norms(model, cached) if which == "k"]
    return any(size < cached.num_kv_heads * cached.head_dim for size in sizes)


def normalises_v(model: PreTrainedModel, cached: CachedAttention) -> bool:
    """Whether no factor in front of V reaches it, as in Gemma 4."""
    return hasattr(model.get_submodule(cached.name), "v_norm")


def rescaled_parameters(
    model: PreTrainedModel, modules: Mapping[str, CachedAttention], factors: Factors
) -> list[Rescaled]:
    """The parameters to multiply; those whose factors are all 1 are left out."""
    found = [each for name in modules for each in _of_layer(model, modules[name], factors[name])]
    found = [each for each in found if bool((each.factor != 1).any())]
    names: dict[int, str] = {}
    for each in found:
        parameter = model.get_parameter(each.name)
        if id(parameter) in names:
            raise UnsupportedModelError(
                f"'{each.name}' and '{names[id(parameter)]}' are the same tensor: it would be "
                "multiplied twice"
            )
        names[id(parameter)] = each.name
    return found


def _of_layer(model: PreTrainedModel, cached: CachedAttention, factors: LayerFactors) -> Iterator[Rescaled]:
    module = model.get_submodule(cached.name)
    if cached.latent:
        yield from of_latent(module, cached, factors)
        return
    if normalises_v(model, cached) and bool((factors.v != 1).any()):
        raise UnsupportedModelError(
            f"{cached.name} normalises V, which undoes a factor in front of it; V's can be 1 alone"
        )
    queries = cached.num_heads // cached.num_kv_heads
    heads = {
        "q": (1 / factors.k).repeat_interleave(queries, 0),
        "k": factors.k,
        "v": factors.v,
    }
    for which, name, norm in _norms(model, cached):
        yield from of_norm(cached.name, name, norm, heads[which])
        heads[which] = torch.ones_like(heads[which])  # the norm undoes what is in front of it
    yield from _of_projections(module, cached, heads)
    columns = (1 / factors.v).repeat_interleave(queries, 0).flatten()
    out, linear = linear_child(module, cached.name, _OUT)
    check_size(f"{cached.name}.{out}", "columns", linear.weight.shape[1], len(columns))
    yield Rescaled(cached.name, f"{out}.weight", columns[None])


def _norms(model: PreTrainedModel, cached: CachedAttention) -> Iterator[tuple[str, str, nn.Module]]:
    """The norms of Q and K: which, name, module; UnsupportedModelError for one without a weight."""
    for name, norm in model.get_submodule(cached.name).named_children():
        if which := _NORMS.get(name):
            norm_parameters(f"{cached.name}.{name}", norm)
            yield which, name, norm


def _of_projections(
    module: nn.Module, cached: CachedAttention, heads: Mapping[str, Tensor]
) -> Iterator[Rescaled]:
    first, linear = linear_child(module, cached.name, (_SEPARATE[0], _STACKED, _GROUPED))
    if first in _SEPARATE:
        for which, child in zip("qkv", _SEPARATE, strict=True):
            if bool((heads[which] != 1).any()):  # Gemma 4's V may have no layer of its own
                _, linear = linear_child(module, cached.name, (child,))
                yield from of_linear(cached.name, child, linear, heads[which].flatten())
        return
    if first == _STACKED:
        rows = torch.cat([heads[which].flatten() for which in "qkv"])
    else:
        groups = [heads[which].reshape(cached.num_kv_heads, -1) for which in "qkv"]
        rows = torch.cat(groups, dim=1).flatten()
    yield from of_linear(cached.name, first, linear, rows)
