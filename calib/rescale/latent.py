"""Which weights to multiply where attention caches a latent (MLA): there K is the latent, V k_pe.

Keys and values are made of the latent, so what reads it is divided by its factor. Every head's
query meets k_pe, so queries are divided by the factor of k_pe, and the keys that are made of the
latent are multiplied by it. Dividing whole queries suits weights that are quantised in blocks: in
DeepSeek-V3 a block of 128 rows holds parts of a query with RoPE and without, but keys or values.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from calib.capture.attention import CachedAttention
from calib.errors import UnsupportedModelError
from calib.rescale.products import (
    LayerFactors,
    Rescaled,
    check_size,
    linear_child,
    of_linear,
    of_norm,
)

_NORM = "kv_a_layernorm"
_NORM_OF_K_PE = "k_rope_only_layernorm"  # of dots3_note
_QUERIES = ("q_b_proj", "q_gate_proj", "q_proj")  # rows of one head after the other


def of_latent(module: nn.Module, cached: CachedAttention, factors: LayerFactors) -> Iterator[Rescaled]:
    """The parameters of a module to multiply, so that its latent and k_pe get `factors`."""
    norms = dict(module.named_children())
    if _NORM not in norms:
        raise UnsupportedModelError(
            f"{cached.name} ({type(module).__name__}) has no {_NORM}, so fp8kv does not know which "
            "weights make its latent"
        )
    yield from of_norm(cached.name, _NORM, norms[_NORM], factors.k)
    if _NORM_OF_K_PE in norms:
        yield from of_norm(cached.name, _NORM_OF_K_PE, norms[_NORM_OF_K_PE], factors.v)
    else:
        made, linear = linear_child(module, cached.name, ("kv_a_proj_with_mqa",))
        rows = torch.cat([torch.ones(cached.head_dim), factors.v[0]])
        yield from of_linear(cached.name, made, linear, rows)
    yield from _of_queries(module, cached, factors.v[0])
    yield from _of_keys_and_values(module, cached, factors)


def _of_queries(module: nn.Module, cached: CachedAttention, k_pe: Tensor) -> Iterator[Rescaled]:
    child, linear = linear_child(module, cached.name, _QUERIES)
    head = torch.cat([k_pe[:1].expand(_without_rope(module, cached)), k_pe])
    gates = len(linear.weight) // cached.num_heads - len(head)  # of axk2, behind each query
    rows = torch.cat([1 / head, torch.ones(max(0, gates))]).repeat(cached.num_heads)
    yield from of_linear(cached.name, child, linear, rows)


def _of_keys_and_values(
    module: nn.Module, cached: CachedAttention, factors: LayerFactors
) -> Iterator[Rescaled]:
    child, linear = linear_child(module, cached.name, ("kv_b_proj",))
    keys = factors.v[0, :1].expand(_without_rope(module, cached))
    values = torch.ones(max(0, len(linear.weight) // cached.num_heads - len(keys)))
    rows = torch.cat([keys, values]).repeat(cached.num_heads)[:, None]
    columns = 1 / factors.k
    name = f"{cached.name}.{child}"
    check_size(name, "rows", linear.weight.shape[0], rows.shape[0])
    check_size(name, "columns", linear.weight.shape[1], columns.shape[1])
    yield Rescaled(cached.name, f"{child}.weight", rows * columns if bool((rows != 1).any()) else columns)
    if linear.bias is not None:
        yield Rescaled(cached.name, f"{child}.bias", rows[:, 0])


def _without_rope(module: nn.Module, cached: CachedAttention) -> int:
    """How many values of a query, and of a key, are before those that RoPE turns."""
    size = getattr(module, "qk_nope_head_dim", None)
    if not isinstance(size, int):
        raise UnsupportedModelError(
            f"{cached.name} ({type(module).__name__}) has no qk_nope_head_dim, so fp8kv does not "
            "know which part of its queries meets k_pe"
        )
    return size
