"""Which weights to multiply so that K and V grow or shrink and a model's outputs stay the same.

Projections are found by their usual names, norms behind them by how they compute. All of it is a
guess until `twin.py` has proved it on the model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from calib.errors import InputError, UnsupportedModelError
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
class Factors:
    """Powers of two that K and V are multiplied by; Q and the output projection are divided."""

    k: float
    v: float


@dataclass(frozen=True)
class _Rescaled:
    name: str
    parameter: Tensor
    factor: Tensor  # broadcasts to the parameter
    adds_one: bool = False  # the module multiplies by 1 + parameter


@torch.no_grad()
def rescale(model: PreTrainedModel, factors: Factors) -> list[str]:
    """Multiply the weights of `model` in place; return the names of those that changed."""
    found = [*_find(model, factors)]
    names: dict[int, str] = {}
    for each in found:
        if id(each.parameter) in names:
            raise UnsupportedModelError(
                f"'{each.name}' and '{names[id(each.parameter)]}' are the same tensor: it would be "
                "multiplied twice"
            )
        names[id(each.parameter)] = each.name
    for each in found:
        each.parameter.copy_(_product(each))
    return [*names.values()]


def _find(model: PreTrainedModel, factors: Factors) -> Iterator[_Rescaled]:
    attention = map_attention(model)
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "clip_qkv", None) is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} clips Q, K and V at {config.clip_qkv}, so they do not follow "
            "a factor in front of them"
        )
    if attention.shared:
        raise UnsupportedModelError(
            f"{next(iter(attention.shared))} attends to another layer's K and V, which no factor "
            "of its own can undo"
        )
    for cached in attention.cached.values():
        module = model.get_submodule(cached.name)
        if hasattr(module, "v_norm"):
            why = "normalises V, which undoes a factor in front of it"
            raise UnsupportedModelError(f"{cached.name} {why}")
        rows = {"q": 1 / factors.k, "k": factors.k, "v": factors.v}
        for norm, child in module.named_children():
            if which := _NORMS.get(norm):
                yield from _of_norm(f"{cached.name}.{norm}", child, rows[which])
                rows[which] = 1.0  # the norm undoes what is in front of it
        yield from _of_projections(module, cached, rows)
        out, linear = _child(module, cached.name, _OUT)
        if factors.v != 1:
            name = f"{cached.name}.{out}.weight"
            yield _Rescaled(name, linear.weight, torch.tensor(1 / factors.v))


def _of_norm(name: str, norm: nn.Module, factor: float) -> Iterator[_Rescaled]:
    parameters = dict(norm.named_parameters())
    if "weight" not in parameters or parameters.keys() - {"weight", "bias"}:
        raise UnsupportedModelError(
            f"{name} has no single weight that a factor could be put into (it has "
            f"{', '.join(parameters) or 'none'})"
        )
    adds_one = _adds_one(name, norm, parameters)
    for key, parameter in parameters.items():
        is_shifted = adds_one and key == "weight"
        yield _Rescaled(f"{name}.{key}", parameter, torch.tensor(factor), is_shifted)


def _adds_one(name: str, norm: nn.Module, parameters: Mapping[str, Tensor]) -> bool:
    weight = parameters["weight"]
    x = torch.linspace(-1, 2, weight.numel(), dtype=weight.dtype).view(1, 1, *weight.shape)
    zeros = {key: torch.zeros_like(parameter) for key, parameter in parameters.items()}
    for adds_one, neutral in ((False, 0.0), (True, -1.0)):
        silent = {**zeros, "weight": torch.full_like(weight, neutral)}
        if not functional_call(norm, silent, (x,)).any():
            return adds_one
    raise UnsupportedModelError(f"{name} multiplies neither by its weight nor by 1 + its weight")


def _of_projections(
    module: nn.Module, cached: CachedAttention, rows: dict[str, float]
) -> Iterator[_Rescaled]:
    first, linear = _child(module, cached.name, (_SEPARATE[0], _STACKED, _GROUPED))
    if first in _SEPARATE:
        for which, child in zip("qkv", _SEPARATE, strict=True):
            _, linear = _child(module, cached.name, (child,))
            yield from _of_linear(f"{cached.name}.{child}", linear, torch.tensor([rows[which]]))
        return
    heads, kv_heads, (q, k, v) = cached.num_heads, cached.num_kv_heads, rows.values()
    if first == _STACKED:
        of_heads = [q] * heads + [k] * kv_heads + [v] * kv_heads
    else:
        of_heads = [*[q] * (heads // kv_heads), k, v] * kv_heads
    num_rows, count = linear.weight.shape[0], len(of_heads)
    if num_rows % count:
        raise UnsupportedModelError(
            f"{cached.name}.{first} has {num_rows} rows, which {count} heads of Q, K and V do not "
            "divide"
        )
    factor = torch.tensor(of_heads).repeat_interleave(num_rows // count)
    yield from _of_linear(f"{cached.name}.{first}", linear, factor)


def _of_linear(name: str, linear: nn.Linear, factor: Tensor) -> Iterator[_Rescaled]:
    """`factor` is [rows] or [1]."""
    if bool((factor == 1).all()):
        return
    yield _Rescaled(f"{name}.weight", linear.weight, factor[:, None])
    if linear.bias is not None:
        yield _Rescaled(f"{name}.bias", linear.bias, factor)


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


def _product(each: _Rescaled) -> Tensor:
    weight, dtype = each.parameter, each.parameter.dtype
    if each.adds_one:
        wanted = (1 + weight.float()) * each.factor
        product = (wanted - 1).to(dtype)
        is_exact = torch.equal(1 + product.float(), wanted)
    else:
        factor = each.factor.to(dtype)
        product = weight * factor
        is_exact = torch.equal(product / factor, weight)
    if not (is_exact and product.isfinite().all()):
        given = "its factor" if each.factor.numel() > 1 else f"{each.factor.item():g}"
        what = f"1 + '{each.name}'" if each.adds_one else f"'{each.name}'"
        wider = "" if dtype == torch.float32 else "add --dtype float32, or "
        raise InputError(
            f"{what} times {given} is not exact in {str(dtype).removeprefix('torch.')}; "
            f"{wider}use a --k-factor and --v-factor nearer to 1"
        )
    return product
