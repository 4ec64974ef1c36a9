"""Changes of weights that multiply K and V, and leave the outputs of a model as they are.

Projections are found by their usual names, norms behind them by how they compute. All of it is a guess until
`proof.py` has proved it on the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from calib.capture.attention import CachedAttention, map_attention
from calib.errors import UnsupportedModelError

_SEPARATE = ("q_proj", "k_proj", "v_proj")
_STACKED = ("qkv_proj", "c_attn")  # rows of all queries, then of all keys, then of all values
_GROUPED = "query_key_value"  # rows of one KV head after the other: its queries, its key, its value
_OUT = ("o_proj", "dense", "out_proj", "c_proj")
_LATENT_NORM = "kv_a_layernorm"
_K_PE_NORM = "k_rope_only_layernorm"  # of dots3_note
_LATENT_QUERIES = ("q_b_proj", "q_gate_proj", "q_proj")  # rows of one head after the other
_NORMS = {
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "q"),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), "k"),
    "qk_norm": "qk",
}


@dataclass(frozen=True)
class LayerFactors:
    """Factors of K and V in one layer, or of its latent and k_pe; their readers are divided by these."""

    k: Tensor  # [K, D] float32, positive
    v: Tensor  # [K, D] float32, positive


Factors = Mapping[str, LayerFactors]  # by attention module


@dataclass(frozen=True)
class WeightChange:
    """A parameter of an attention module that is multiplied by a factor."""

    module: str
    child: str  # name of the parameter below the module
    # float32 [rows, 1], [1, columns], their product, [1, 1], or the shape of another parameter
    factor: Tensor
    adds_one: bool = False  # the module multiplies by 1 + parameter

    @property
    def name(self) -> str:
        """Name that transformers gives the parameter."""
        return f"{self.module}.{self.child}"

    def multiplier(self, parameter: Tensor) -> Tensor:
        """Return the parameter, of any shape, or 1 + it, as the module computes it."""
        wide = parameter if parameter.dtype == torch.float64 else parameter.float()
        return wide + int(self.adds_one)

    def product(self, parameter: Tensor) -> Tensor:
        """Return the parameter, of any shape, whose multiplier is `factor` times as large, in its dtype."""
        product = self.multiplier(parameter) * self.factor.to(parameter.device) - int(self.adds_one)
        return product.to(parameter.dtype)

    def is_exact(self, parameter: Tensor) -> bool:
        """Return whether `product` loses nothing of a parameter of any shape."""
        product, multiplier = self.product(parameter), self.multiplier(parameter)
        exact = multiplier * self.factor
        # values that underflow do not come back
        is_reversible = self.adds_one or torch.equal(exact / self.factor, multiplier)
        is_whole = torch.equal(self.multiplier(product), exact)
        return is_reversible and is_whole and bool(product.isfinite().all())


Norms = Sequence[tuple[WeightChange, Tensor]]  # the change of a weight [D], and the weight


def is_held(norms: Norms) -> Tensor:
    """Return whether each channel holds the factors of `norms` of 1 + weight: [D] bool, [] without norms.

    (1 + w) * f - 1 often has no exact value in the weights' dtype. Attention scores depend on the product
    of both norms' multipliers. A channel holds a factor if rounding its weights changes this product by no
    more than one rounding to the narrowest dtype that holds the source's weights: a rounding of the product
    itself, or of the root mean square of all channels' products if that is larger. If the norms' inputs are
    about equally large in all channels, scores then change no more, in root mean square, than by rounding
    both Q and K to that dtype. If inputs are largest in channels with small multipliers, scores may change
    more: `bake` reports the KL.
    """
    holds = torch.ones((), dtype=torch.bool)
    # a norm of queries and one of keys are judged together, unless they are of different sizes
    for shape in dict.fromkeys(weight.shape for _, weight in norms):
        group = [(change, weight) for change, weight in norms if weight.shape == shape]
        size, error = torch.ones(()).double(), torch.zeros(()).double()
        for change, weight in group:
            size = size * change.multiplier(weight).double().abs()
            exact = change.multiplier(weight).double() * change.factor
            loss = (change.multiplier(change.product(weight)).double() - exact).abs()
            error = error + torch.where(loss > 0, loss / exact.abs(), 0.0).nan_to_num(nan=torch.inf)
        allowed = size.maximum(size.square().mean().sqrt()) * max(_roundoff(weight) for _, weight in group)
        holds = holds & (torch.where(error > 0, error * size, 0.0) <= allowed)
    return holds


def _roundoff(weight: Tensor) -> float:
    """Return half of the step after 1 of the narrowest dtype that holds the weights."""
    dtypes = (torch.bfloat16, torch.float16, weight.dtype)
    exact = (dtype for dtype in dtypes if torch.equal(weight.to(dtype).to(weight.dtype), weight))
    return torch.finfo(next(exact, weight.dtype)).eps / 2


@dataclass(frozen=True)
class AttentionWeights:
    """The norms and linear layers of an attention module."""

    cached: CachedAttention
    module: nn.Module

    @property
    def name(self) -> str:
        """Name of the module."""
        return self.cached.name

    @property
    def shares_k(self) -> bool:
        """Return whether a norm of one head's size makes all KV heads need the same factors for K."""
        sizes = [norm.get_parameter("weight").numel() for part, _, norm in self.norms() if part == "k"]
        return any(size < self.cached.num_kv_heads * self.cached.head_dim for size in sizes)

    def normalises(self, part: str) -> bool:
        """Return whether a norm of V (Gemma 4), or of K without a weight (Llama 4), undoes what is before."""
        if part == "v":
            return hasattr(self.module, "v_norm")
        norms = (norm for child, norm in self.module.named_children() if _NORMS.get(child) in ("k", "qk"))
        return any(not [*norm.parameters()] for norm in norms)

    def norms(self) -> Iterator[tuple[str, str, nn.Module]]:
        """Yield the norms of Q and K that have weights: q or k, name and module; refuse a norm of both."""
        for child, norm in self.module.named_children():
            if (part := _NORMS.get(child)) and not self.normalises("k"):
                _norm_parameters(f"{self.name}.{child}", norm)
                if part == "qk":
                    raise UnsupportedModelError(f"{self.name}.{child} has one weight for Q and K")
                yield part, child, norm

    def change_norm(self, child: str, heads: Tensor) -> Iterator[WeightChange]:
        """Multiply a norm's outputs by `heads` [H, D]; refuse a weight that would need several factors."""
        name, norm = f"{self.name}.{child}", self.module.get_submodule(child)
        parameters = _norm_parameters(name, norm)
        adds_one = _adds_one(name, norm, parameters)
        for key, parameter in parameters.items():
            factor = heads[0] if parameter.numel() < heads.numel() else heads
            if not torch.equal(factor.expand_as(heads), heads):
                raise UnsupportedModelError(f"{name} has one weight for all heads")
            self.check_size(child, "weights", parameter.numel(), factor.numel())
            factor = factor.reshape(parameter.shape)
            yield WeightChange(self.name, f"{child}.{key}", factor, adds_one and key == "weight")

    def change_linear(
        self, child: str, rows: Tensor | None = None, columns: Tensor | None = None
    ) -> Iterator[WeightChange]:
        """Multiply outputs of a linear layer by `rows` [out], and weights of its inputs by `columns` [in]."""
        linear, factor = self.module.get_submodule(child), torch.ones(1, 1)
        if rows is not None and bool((rows == 1).all()):
            rows = None  # the layer may hold more than heads, such as gates
        if rows is not None:
            self.check_size(child, "rows", linear.get_parameter("weight").shape[0], len(rows))
            factor = rows[:, None]
        if columns is not None:
            self.check_size(child, "columns", linear.get_parameter("weight").shape[1], len(columns))
            factor = factor * columns
        yield WeightChange(self.name, f"{child}.weight", factor)
        if rows is not None and linear.bias is not None:
            yield WeightChange(self.name, f"{child}.bias", rows)

    def find_linear(self, *names: str) -> tuple[str, nn.Linear]:
        """Return the first of `names` that is a linear layer, and that layer; refuse a module without."""
        for child in names:
            linear = getattr(self.module, child, None)
            if isinstance(linear, nn.Linear):
                return child, linear
        children = ((name, getattr(self.module, name, None)) for name in names)
        kinds = ", ".join(f"{name} is a {type(child).__name__}" for name, child in children if child)
        missing = f"linear layer named {' or '.join(names)}" + (f" ({kinds})" if kinds else "")
        raise self.refusal(missing, "which weights make or read its cache")

    def refusal(self, missing: str, reason: str) -> UnsupportedModelError:
        """Return the error of a module without what is `missing`."""
        module = f"{self.name} ({type(self.module).__name__})"
        return UnsupportedModelError(f"{module} has no {missing}, so fp8kv does not know {reason}")

    def check_size(self, child: str, unit: str, size: int, expected: int) -> None:
        """Refuse a parameter whose `size` is not what its heads make up."""
        if size != expected:
            raise UnsupportedModelError(
                f"{self.name}.{child} has {size} {unit}, where its heads make up {expected}: fp8kv does not "
                "know what the rest is"
            )


def cached_attention(model: PreTrainedModel) -> dict[str, CachedAttention]:
    """Return the attention modules of `model`; refuse models in which no factor can be moved."""
    attention = map_attention(model)
    clip = getattr(model.config.get_text_config(decoder=True), "clip_qkv", None)
    if clip is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} clips Q, K and V at {clip}, so they do not follow a factor in front of "
            "them"
        )
    if attention.shared and any(module.latent for module in attention.cached.values()):
        raise UnsupportedModelError(
            f"{next(iter(attention.shared))} attends to another layer's K and V, which no factor of its own "
            "can undo"
        )
    return attention.cached


def list_changes(
    model: PreTrainedModel, modules: Mapping[str, CachedAttention], factors: Factors
) -> list[WeightChange]:
    """List the parameters to multiply, so that K and V get `factors`; refuse a tensor that would be twice."""
    changes: dict[int, WeightChange] = {}  # by parameter
    for name, layer in factors.items():
        weights = AttentionWeights(modules[name], model.get_submodule(name))
        list_layer = latent_changes if weights.cached.latent else head_changes
        layer_changes = [*list_layer(weights, layer)]
        for reader in weights.cached.readers:  # its queries and its output, not its K and V
            cached = replace(weights.cached, name=reader)
            layer_changes += head_changes(AttentionWeights(cached, model.get_submodule(reader)), layer, "q")
        for change in layer_changes:
            if bool((change.factor == 1).all()):
                continue
            first = changes.setdefault(id(model.get_parameter(change.name)), change)
            if first is not change:
                raise UnsupportedModelError(
                    f"'{change.name}' and '{first.name}' are the same tensor: it would be multiplied twice"
                )
    return [*changes.values()]


def head_changes(
    weights: AttentionWeights, factors: LayerFactors, makes: str = "qkv"
) -> Iterator[WeightChange]:
    """Yield the changes that give K and V `factors`, of a module that `makes` these, or Q alone.

    Raises an UnsupportedModelError where weights cannot hold them.
    """
    for x in "kv":
        if weights.normalises(x) and bool((getattr(factors, x) != 1).any()):
            undoes = f"normalises {x.upper()}, which undoes a factor in front of it"
            raise UnsupportedModelError(f"{weights.name} {undoes}; {x.upper()}'s can be 1 alone")
    queries = weights.cached.num_heads // weights.cached.num_kv_heads
    heads = {"q": (1 / factors.k).repeat_interleave(queries, 0), "k": factors.k, "v": factors.v}
    heads |= {part: torch.ones_like(heads[part]) for part in "kv" if part not in makes}
    for part, child, _ in weights.norms():
        yield from weights.change_norm(child, heads[part])
        heads[part] = torch.ones_like(heads[part])  # the norm undoes what is in front of it
    first, _ = weights.find_linear(_SEPARATE[0], *_STACKED, _GROUPED)
    if first in _SEPARATE:
        for part, child in zip("qkv", _SEPARATE, strict=True):
            if bool((heads[part] != 1).any()):  # Gemma 4's V may have no layer of its own
                yield from weights.change_linear(weights.find_linear(child)[0], heads[part].flatten())
    elif first in _STACKED:
        yield from weights.change_linear(first, torch.cat([heads[part].flatten() for part in "qkv"]))
    else:
        groups = [heads[part].reshape(weights.cached.num_kv_heads, -1) for part in "qkv"]
        yield from weights.change_linear(first, torch.cat(groups, dim=1).flatten())
    out, _ = weights.find_linear(*_OUT)
    yield from weights.change_linear(out, columns=(1 / factors.v).repeat_interleave(queries, 0).flatten())


def latent_changes(weights: AttentionWeights, factors: LayerFactors) -> Iterator[WeightChange]:
    """Yield the changes of an attention module that give its latent and k_pe `factors` (MLA).

    Keys and values are made of the latent, so what reads it is divided by its factor. Every head's query
    meets k_pe, so queries are divided by the factor of k_pe, and the keys that are made of the latent are
    multiplied by it. Dividing whole queries suits weights that are quantised in blocks: in DeepSeek-V3 a
    block of 128 rows holds parts of a query with RoPE and without, but keys or values. Refuse other modules.
    """
    cached, children, k_pe = weights.cached, dict(weights.module.named_children()), factors.v[0]
    if _LATENT_NORM not in children:
        raise weights.refusal(_LATENT_NORM, "which weights make its latent")
    yield from weights.change_norm(_LATENT_NORM, factors.k)
    if _K_PE_NORM in children:
        yield from weights.change_norm(_K_PE_NORM, factors.v)
    else:
        child, _ = weights.find_linear("kv_a_proj_with_mqa")
        yield from weights.change_linear(child, torch.cat([torch.ones(cached.head_dim), k_pe]))
    without_rope = getattr(weights.module, "qk_nope_head_dim", None)  # values of a query and of a key
    if not isinstance(without_rope, int):
        raise weights.refusal("qk_nope_head_dim", "which part of its queries meets k_pe")
    key = k_pe[:1].expand(without_rope)
    child, linear = weights.find_linear(*_LATENT_QUERIES)
    query = torch.cat([key, k_pe])
    gates = len(linear.weight) // cached.num_heads - len(query)  # of axk2, behind each query
    rows = torch.cat([1 / query, torch.ones(max(0, gates))]).repeat(cached.num_heads)
    yield from weights.change_linear(child, rows)
    # keys and values are made of the latent by columns, of one head after the other by rows
    child, linear = weights.find_linear("kv_b_proj")
    values = torch.ones(max(0, len(linear.weight) // cached.num_heads - without_rope))
    rows = torch.cat([key, values]).repeat(cached.num_heads)
    yield from weights.change_linear(child, rows, 1 / factors.k[0])


def _norm_parameters(name: str, norm: nn.Module) -> dict[str, Tensor]:
    """Return the weight of a norm, and its bias if it has one; refuse norms with other parameters."""
    parameters: dict[str, Tensor] = dict(norm.named_parameters())
    if "weight" not in parameters or parameters.keys() - {"weight", "bias"}:
        raise UnsupportedModelError(
            f"{name} has no single weight that a factor could be put into (it has "
            f"{', '.join(parameters) or 'none'})"
        )
    return parameters


def _adds_one(name: str, norm: nn.Module, parameters: Mapping[str, Tensor]) -> bool:
    """Return whether a norm multiplies by 1 + its weight, by trying which weight silences it."""
    weight = parameters["weight"]
    x = torch.linspace(-1, 2, weight.numel()).to(weight).view(1, 1, *weight.shape)
    zeros = {key: torch.zeros_like(parameter) for key, parameter in parameters.items()}
    for adds_one, neutral in ((False, 0.0), (True, -1.0)):
        silent = {**zeros, "weight": torch.full_like(weight, neutral)}
        if not functional_call(norm, silent, (x,)).any():
            return adds_one
    raise UnsupportedModelError(f"{name} multiplies neither by its weight nor by 1 + its weight")
