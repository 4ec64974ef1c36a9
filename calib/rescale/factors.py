"""Factors of K and V: for FP8 at scale 1.0, for integers, and for a stress twin."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from calib.capture.attention import CachedAttention
from calib.choices import FP8Name, Purpose
from calib.errors import InputError
from calib.recipe import Recipe
from calib.rescale.rope_pairs import find_pairs, fold_pairs
from calib.rescale.stored_weights import StoredModel
from calib.rescale.weight_changes import Factors, LayerFactors, Norms, is_held
from calib.scales.observers import AbsMax
from calib.scales.stats import KVStats

# a channel is enlarged by no more than this: its amax on other text may be larger
_LARGEST = 2.0**10
# the best of 0.5, 0.7 and 1 on five documents for SmolLM2; other models were not tried
_POWER = 0.5
_POWERS = torch.arange(-16, 17)  # exponents of the factors that norms of 1 + weight are tried with

Fallback = Callable[[Tensor], Tensor]  # factors [K, D] of a layer -> factors that more weights hold


class FactorChoice(NamedTuple):
    """Factors of a model, and fallbacks for weights that cannot hold them."""

    ideal: Factors
    nearest: Factors | None = None  # the nearest that norms of 1 + weight hold; None: the ideal ones
    fallbacks: Sequence[Fallback] = ()


def choose_baked_factors(
    stats: KVStats, purpose: Purpose, recipe: Recipe, source: StoredModel
) -> FactorChoice:
    """Choose factors for an FP8 cache at scale 1.0, or for integers, from `stats` of a run with `recipe`."""
    ideal = int8_factors(stats, source) if purpose == "int8" else fp8_factors(stats, recipe, source)
    return FactorChoice(ideal, _hold_in_norms(ideal, stats, purpose, source), _FALLBACKS[purpose])


def check_purpose(stats: KVStats, purpose: Purpose) -> None:
    """Refuse integers for a model that caches latents."""
    if stats.latent and purpose == "int8":
        raise InputError(
            "--for int8: this model caches latents (MLA), which no engine holds as integers; use --for fp8"
        )


def uniform_factors(modules: Mapping[str, CachedAttention], k: float, v: float) -> Factors:
    """Return the same factors for all heads and channels."""
    return {
        name: LayerFactors(
            torch.full((module.num_kv_heads, module.head_dim), k),
            torch.full((module.num_kv_heads, module.v_head_dim), v),
        )
        for name, module in modules.items()
    }


def fp8_factors(stats: KVStats, recipe: Recipe, source: StoredModel) -> Factors:
    """Return powers of two, per KV head where the weights allow it, that bring scales into (1/2, 1]."""
    # treat latents and k_pe as K and V of one head, so that each gets its own scale
    parts = {name: replace(layer, latent=False) for name, layer in stats.layers.items()}
    # absmax and a headroom of at least 1, so that no measured value saturates
    scales = replace(stats, layers=parts).scales(
        strategy="attn_head",
        observer=AbsMax(),
        fp8_dtype=baked_fp8_type(recipe),
        headroom=recipe.headroom if recipe.headroom == "auto" else max(1.0, recipe.headroom),
    )
    factors = {}
    for name, module in source.modules.items():
        layer, weights = scales.layers[name], source.attention(name)
        k, v = octave_factor(layer.k), octave_factor(layer.v)
        k = k.amin().expand_as(k) if weights.shares_k else k
        # normalised values fit FP8 at 1.0
        k, v = (torch.ones_like(x) if weights.normalises(part) else x for part, x in (("k", k), ("v", v)))
        k, v = k[:, None].expand(-1, module.head_dim), v[:, None].expand(-1, module.v_head_dim)
        factors[name] = LayerFactors(k, v)
    return factors


def baked_fp8_type(recipe: Recipe) -> FP8Name:
    """Return MI300's E4M3, or that of other devices, which also stands for E5M2: its range is larger."""
    return "e4m3fnuz" if recipe.fp8_dtype == "e4m3fnuz" else "e4m3fn"


def octave_factor(scale: Tensor) -> Tensor:
    """Return the powers of two that bring scales, of any shape, into (1/2, 1]."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), -exponent + (mantissa == 0.5).int())


def int8_factors(stats: KVStats, source: StoredModel) -> Factors:
    """Return powers of two that bring channels (of K: RoPE pairs) half of the way to their head's largest."""
    movable = {n: module for n, module in source.modules.items() if not source.attention(n).normalises("k")}
    pairs = find_pairs(source.model, movable)
    factors = {}
    for name in source.modules:
        k, weights = stats.layers[name].k.amax, source.attention(name)
        k = fold_pairs(k, pairs[name]) if name in pairs else torch.ones_like(k)
        rows = k.amax(0, keepdim=True) if weights.shares_k else k
        # computed once for all heads: a power of the same number may differ with its place in memory
        k_factors, v_factors = (_even_channels(amax) for amax in (rows, stats.layers[name].v.amax))
        v_factors = torch.ones_like(v_factors) if weights.normalises("v") else v_factors
        factors[name] = LayerFactors(k_factors.expand_as(k), v_factors)
    return factors


def _even_channels(amax: Tensor) -> Tensor:
    """Return factors [H, D] for channels of `amax` [H, D]."""
    largest = amax.amax(-1, keepdim=True)
    ratio = torch.where(amax > 0, largest / amax, 1.0).clamp(max=_LARGEST)
    return torch.exp2((ratio**_POWER).log2().round())


def _hold_in_norms(ideal: Factors, stats: KVStats, purpose: Purpose, source: StoredModel) -> Factors:
    """Replace factors of K by the nearest ones that norms of 1 + weight hold, channel pair by channel pair.

    For integers only the differences between channels matter, so all may shift together. For FP8 no
    channel may exceed the amax that the ideal factors give the largest channel.
    """
    keys = (name for name in source.modules if not source.attention(name).normalises("k"))
    heads = {name: source.modules[name] for name in keys if not source.modules[name].latent}
    doubled = uniform_factors(heads, 2.0, 1.0)
    norms = {name: source.one_plus_norms(source.list_changes({name: doubled[name]})) for name in heads}
    pairs = find_pairs(source.model, {name: heads[name] for name in heads if norms[name]})
    factors = dict(ideal)
    for name, pair in pairs.items():
        table, powers = _try_powers(norms[name]), ideal[name].k[0].log2().round().long()
        table, shifts = table & table[:, pair], [0]
        if purpose == "int8":
            shifts = sorted(range(-16, 17), key=abs)
        else:
            amax = fold_pairs(stats.layers[name].k.amax.amax(0), pair).double()
            products = amax * _POWERS.double().exp2()[:, None]
            is_below = products <= (amax * powers.double().exp2()).amax()
            table = table & (is_below | (_POWERS[:, None] <= powers))
        choices = [nearest_powers(table, powers + shift) for shift in shifts]
        distance, k = min(choices, key=lambda choice: choice[0])
        if distance < float("inf"):
            factors[name] = LayerFactors(k.float().exp2().expand_as(ideal[name].k), ideal[name].v)
    return factors


def _try_powers(norms: Norms) -> Tensor:
    """Return whether each channel holds each of the powers of its factors [powers, D]."""
    rows = []
    for power in _POWERS:
        tried = [(replace(x, factor=(x.factor.log2() * power).exp2()), weight) for x, weight in norms]
        rows.append(is_held(tried))
    return torch.stack(rows)


def nearest_powers(table: Tensor, powers: Tensor) -> tuple[float, Tensor]:
    """Return the distance (inf: none) to the nearest of `powers` [D] in `table` [powers, D], and these."""
    least, index = (_POWERS[:, None] - powers).abs().double().masked_fill(~table, torch.inf).min(0)
    return least.sum().item(), _POWERS[index]


def _smallest_of_layer(factors: Tensor, octaves: int = 0) -> Tensor:
    """Return one factor for all heads, the smallest, so that no head becomes larger than it should be.

    A factor above 1 is reduced by `octaves`, at most to 1, for scales that cannot hold a larger one. One
    below 1 stays: without it values would saturate.
    """
    smallest = factors.amin().expand_as(factors)
    return torch.where(smallest > 1, (smallest / 2**octaves).clamp(min=1), smallest)


# for FP8 a factor that is too small is better than none; for integers a layer may stay unchanged
_FALLBACKS: Mapping[Purpose, Sequence[Fallback]] = {
    "fp8": [partial(_smallest_of_layer, octaves=octaves) for octaves in range(16)],
    "int8": [torch.ones_like],
}
