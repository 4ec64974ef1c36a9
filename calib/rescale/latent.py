"""Changes of weights where attention caches a latent (MLA): there K is the latent, V k_pe.

Keys and values are made of the latent, so what reads it is divided by its factor. Every head's query meets
k_pe, so queries are divided by the factor of k_pe, and the keys that are made of the latent are multiplied by
it. Dividing whole queries suits weights that are quantised in blocks: in DeepSeek-V3 a block of 128 rows
holds parts of a query with RoPE and without, but keys or values.
"""

from collections.abc import Iterator

import torch

from calib.errors import UnsupportedModelError
from calib.rescale.weight_changes import AttentionWeights, LayerFactors, WeightChange

_NORM = "kv_a_layernorm"
_NORM_OF_K_PE = "k_rope_only_layernorm"  # of dots3_note
_QUERIES = ("q_b_proj", "q_gate_proj", "q_proj")  # rows of one head after the other


def latent_changes(weights: AttentionWeights, factors: LayerFactors) -> Iterator[WeightChange]:
    """Yield the changes of an attention module that give its latent and k_pe `factors`."""
    cached, children, k_pe = weights.cached, dict(weights.module.named_children()), factors.v[0]
    if _NORM not in children:
        raise _unknown_module(weights, _NORM, "which weights make its latent")
    yield from weights.change_norm(_NORM, factors.k)
    if _NORM_OF_K_PE in children:
        yield from weights.change_norm(_NORM_OF_K_PE, factors.v)
    else:
        child, _ = weights.find_linear("kv_a_proj_with_mqa")
        yield from weights.change_linear(child, torch.cat([torch.ones(cached.head_dim), k_pe]))
    without_rope = getattr(weights.module, "qk_nope_head_dim", None)  # values of a query and of a key
    if not isinstance(without_rope, int):
        raise _unknown_module(weights, "qk_nope_head_dim", "which part of its queries meets k_pe")
    key = k_pe[:1].expand(without_rope)
    child, linear = weights.find_linear(*_QUERIES)
    query = torch.cat([key, k_pe])
    gates = len(linear.weight) // cached.num_heads - len(query)  # of axk2, behind each query
    rows = torch.cat([1 / query, torch.ones(max(0, gates))]).repeat(cached.num_heads)
    yield from weights.change_linear(child, rows)
    # keys and values are made of the latent by columns, of one head after the other by rows
    child, linear = weights.find_linear("kv_b_proj")
    values = torch.ones(max(0, len(linear.weight) // cached.num_heads - without_rope))
    rows = torch.cat([key, values]).repeat(cached.num_heads)
    yield from weights.change_linear(child, rows, 1 / factors.k[0])


def _unknown_module(weights: AttentionWeights, missing: str, unknown: str) -> UnsupportedModelError:
    module = f"{weights.name} ({type(weights.module).__name__})"
    return UnsupportedModelError(f"{module} has no {missing}, so fp8kv does not know {unknown}")
