"""Which weights to multiply so that K and V grow or shrink and a model's outputs stay the same.

Projections are found by their usual names, norms behind them by how they compute. All of it is a
guess until `proof.py` has proved it on the model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from calib.errors import UnsupportedModelError
from calib.measure.attention import CachedAttention, map_attention

_SEPARATE = ("q_proj", "k_proj", "v_proj")
_STACKED = "qkv_proj"  # rows of all queries, then of all keys, then of all values
_GROUPED = "query_key_value"  # rows of one KV head after the other: its queries, its key, its value
_OUT = ("o_proj", "dense", "out_proj")
_NORMS = {
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "q"),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), "k"),
}


@dataclass(frozen=True)
class LayerFactors:
    """What K and V are multiplied by; Q and the output projection are divided by the same."""

    k: Tensor  # [K, D] float32, positive
    v: Tensor  # [K, D] float32, positive


Factors = Mapping[str, LayerFactors]  # by attention module


@dataclass(frozen=True)
class Rescaled:
    """A parameter that is multiplied: `module` is of attention, `inner` the name below it."""

    module: str
    inner: str
    factor: Tensor  # broadcasts to the parameter: [rows, 1], [1, columns], or its own shape
    adds_one: bool = False  # the module multiplies by 1 + parameter

    @property
    def name(self) -> str:
        """The name that transformers gives the parameter."""
        return f"{self.module}.{self.inner}"

    def product(self, parameter: Tensor) -> Tensor:
        """The parameter, or 1 + it, times the factor, in its own dtype; exact or not."""
        factor = self.factor.to(parameter.device)
        return ((_wide(parameter) + self._one) * factor - self._one).to(parameter.dtype)

    def is_exact(self, parameter: Tensor) -> bool:
        """Whether nothing is lost in `product`."""
        wide, product = _wide(parameter), self.product(parameter)
        wanted = (wide + self._one) * self.factor
        # what underflows does not come back
        is_whole = self.adds_one or torch.equal(wanted / self.factor, wide)
        same = torch.equal(_wide(product) + self._one, wanted)
        return is_whole and same and bool(product.isfinite().all())

    @property
    def _one(self) -> float:
        return 1.0 if self.adds_one else 0.0


def _wide(parameter: Tensor) -> Tensor:
    """As modules compute 1 + it."""
    return parameter if parameter.dtype == torch.float64 else parameter.float()


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
    sizes = [
        norm.get_parameter("weight").numel()
        for which, _, norm in _norms(model, cached)
        if which == "k"
    ]
    return any(size < cached.num_kv_heads * cached.head_dim for size in sizes)


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


def _of_layer(
    model: PreTrainedModel, cached: CachedAttention, factors: LayerFactors
) -> Iterator[Rescaled]:
    module = model.get_submodule(cached.name)
    if hasattr(module, "v_norm"):
        why = "normalises V, which undoes a factor in front of it"
        raise UnsupportedModelError(f"{cached.name} {why}")
    queries = cached.num_heads // cached.num_kv_heads
    heads = {
        "q": (1 / factors.k).repeat_interleave(queries, 0),
        "k": factors.k,
        "v": factors.v,
    }
    for which, name, norm in _norms(model, cached):
        yield from _of_norm(cached.name, name, norm, heads[which])
        heads[which] = torch.ones_like(heads[which])  # the norm undoes what is in front of it
    yield from _of_projections(module, cached, heads)
    columns = (1 / factors.v).repeat_interleave(queries, 0).flatten()
    out, linear = _child(module, cached.name, _OUT)
    _check_size(f"{cached.name}.{out}", "columns", linear.weight.shape[1], len(columns))
    yield Rescaled(cached.name, f"{out}.weight", columns[None])


def _norms(model: PreTrainedModel, cached: CachedAttention) -> Iterator[tuple[str, str, nn.Module]]:
    """The norms of Q and K: which, name, module; UnsupportedModelError for one without a weight."""
    for name, norm in model.get_submodule(cached.name).named_children():
        if which := _NORMS.get(name):
            parameters = dict(norm.named_parameters())
            if "weight" not in parameters or parameters.keys() - {"weight", "bias"}:
                raise UnsupportedModelError(
                    f"{cached.name}.{name} has no single weight that a factor could be put into "
                    f"(it has {', '.join(parameters) or 'none'})"
                )
            yield which, name, norm


def _of_norm(module: str, name: str, norm: nn.Module, heads: Tensor) -> Iterator[Rescaled]:
    """`heads` are the factors [H, D] of what is normalised, head by head or over all of them."""
    parameters = dict(norm.named_parameters())
    adds_one = _adds_one(f"{module}.{name}", norm, parameters)
    for key, parameter in parameters.items():
        of_one = parameter.numel() < heads.numel()
        factor = heads[0] if of_one else heads
        if not torch.equal(factor.expand_as(heads), heads):
            raise UnsupportedModelError(f"{module}.{name} has one weight for all heads")
        _check_size(f"{module}.{name}", "weights", parameter.numel(), factor.numel())
        factor = factor.reshape(parameter.shape)
        yield Rescaled(module, f"{name}.{key}", factor, adds_one and key == "weight")


def _adds_one(name: str, norm: nn.Module, parameters: Mapping[str, Tensor]) -> bool:
    weight = parameters["weight"]
    x = torch.linspace(-1, 2, weight.numel()).to(weight).view(1, 1, *weight.shape)
    zeros = {key: torch.zeros_like(parameter) for key, parameter in parameters.items()}
    for adds_one, neutral in ((False, 0.0), (True, -1.0)):
        silent = {**zeros, "weight": torch.full_like(weight, neutral)}
        if not functional_call(norm, silent, (x,)).any():
            return adds_one
    raise UnsupportedModelError(f"{name} multiplies neither by its weight nor by 1 + its weight")


def _of_projections(
    module: nn.Module, cached: CachedAttention, heads: Mapping[str, Tensor]
) -> Iterator[Rescaled]:
    first, linear = _child(module, cached.name, (_SEPARATE[0], _STACKED, _GROUPED))
    if first in _SEPARATE:
        for which, child in zip("qkv", _SEPARATE, strict=True):
            _, linear = _child(module, cached.name, (child,))
            yield from _of_linear(cached.name, child, linear, heads[which].flatten())
        return
    if first == _STACKED:
        rows = torch.cat([heads[which].flatten() for which in "qkv"])
    else:
        groups = [heads[which].reshape(cached.num_kv_heads, -1) for which in "qkv"]
        rows = torch.cat(groups, dim=1).flatten()
    yield from _of_linear(cached.name, first, linear, rows)


def _of_linear(module: str, name: str, linear: nn.Linear, rows: Tensor) -> Iterator[Rescaled]:
    if bool((rows == 1).all()):
        return  # it may hold more than heads, such as gates
    _check_size(f"{module}.{name}", "rows", linear.weight.shape[0], len(rows))
    yield Rescaled(module, f"{name}.weight", rows[:, None])
    if linear.bias is not None:
        yield Rescaled(module, f"{name}.bias", rows)


def _child(module: nn.Module, name: str, names: tuple[str, ...]) -> tuple[str, nn.Linear]:
    """The one of `names` that is a linear layer of `module`."""
    for child in names:
        linear = getattr(module, child, None)
        if isinstance(linear, nn.Linear):
            return child, linear
    raise UnsupportedModelError(
        f"{name} ({type(module).__name__}) has no linear layer named {' or '.join(names)}, so "
        "fp8kv does not know which weights make its K and V"
    )


def _check_size(name: str, what: str, size: int, wanted: int) -> None:
    if size != wanted:
        raise UnsupportedModelError(
            f"{name} has {size} {what}, where its heads make up {wanted}: fp8kv does not know what "
            "the rest is"
        )
