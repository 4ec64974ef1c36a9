"""Variants of other cache types than static FP8, plain and on baked weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from calib.caches.rounding import CacheRounding, rounding
from calib.caches.types import ALL_CACHES, CACHES, LATENT_CACHES, CacheType, Layers, cache_type
from calib.choices import Purpose
from calib.errors import InputError, UnsupportedModelError
from calib.evaluate.variants import Setup, Variant, broadcast_scale
from calib.files.fingerprint import baked_for
from calib.files.model_directory import ModelDirectory
from calib.files.text import show_layers
from calib.models.load import served_dtype
from calib.rescale.bake import baked_factors
from calib.rescale.weight_changes import LayerFactors
from calib.scales.stats import KVStats

_EDGES = "vLLM leaves the first and the last two layers in 16 bits"
# static FP8: the variants that `fp8` stands for
STATIC = ("none", "tensor", "attn_head")


def cache_names(names: Sequence[str]) -> list[str]:
    """Return names of the variants that `names`, of types or `all`, can become, beside STATIC."""
    types = dict.fromkeys(ALL_CACHES if "all" in names else names)
    baked = [f"{name}, baked" for name in types if name == "fp8" or cache_type(name).integers]
    return [*(name for name in types if name != "fp8"), *baked]


def check_types(names: Sequence[str], *, is_latent: bool) -> None:
    """Refuse types in `names` that cannot hold the latents, or K and V of heads, of a model."""
    for name in names:
        try:
            if name != "all":
                cache_type(name).check_attention(is_latent=is_latent)
        except InputError as error:
            raise InputError(f"{error}; leave it out of --caches") from None


def select_types(names: Sequence[str], layers: Layers) -> tuple[list[CacheType], list[str]]:
    """Return the types in `names`, and warnings; `all` leaves out those that `layers` do not allow.

    `all` are those for K and V of heads, or those for latents, whichever the model caches.
    InputError where a type was asked for by its name.
    """
    types, warnings = [], []
    candidates: Sequence[str] = CACHES if "all" in names else ()
    if candidates and any(x.attention != "heads" for x in layers.shapes.values()):
        candidates = LATENT_CACHES
        warnings.append("types for K and V of heads are left out: this model caches latents (MLA)")
    for name in dict.fromkeys([*names, *candidates]):
        if name in ("all", "fp8"):
            continue
        try:
            cache_type(name).model_bytes(layers)
            types.append(cache_type(name))
            if cache_type(name).edges(layers) == layers.shapes.keys():
                warnings.append(f"{name} quantises nothing here: {_EDGES}, which are all that this model has")
        except InputError as error:
            if name in names:
                raise InputError(f"{error}; leave it out of --caches") from None
            warnings.append(f"{error}: left out")
    return types, warnings


def cache_variants(
    setup: Setup,
    checkpoint: ModelDirectory,
    names: Sequence[str],
    types: Sequence[CacheType],
    layers: Layers,
    stats: KVStats,
) -> tuple[list[Variant], list[str]]:
    """Make variants of `types`, each also on baked weights where `bake` can matter; and warnings.

    Baked weights are not written: K and V are multiplied by their factors before rounding and
    divided after it. Factors are powers of two, so the numbers are those of the baked model, but
    for norms of 1 + weight, whose rounding is a warning.
    """
    dtype = served_dtype(checkpoint)
    plain = {kind.name: _make_variant(kind.name, kind.description, layers, dtype) for kind in types}
    if baked_for(checkpoint):
        return list(plain.values()), []
    to_bake: dict[Purpose, list[Variant]] = {
        "fp8": [_make_variant("fp8", "FP8 at scale 1.0", layers)] if {"all", "fp8"} & set(names) else [],
        "int8": [plain[kind.name] for kind in types if kind.integers],
    }
    baked, warnings = [], []
    for purpose, variants in to_bake.items():
        try:
            if variants:
                factors, doubts = baked_factors(setup.model, checkpoint, stats, purpose)
                warnings += doubts
                baked += [_bake_variant(variant, factors) for variant in variants]
        except (InputError, UnsupportedModelError) as error:
            warnings.append(f"no rows on weights baked for {purpose}: {error}")
    order = ["fp8", *plain]
    return sorted([*plain.values(), *baked], key=lambda variant: order.index(str(variant.cache))), warnings


def _make_variant(name: str, description: str, layers: Layers, dtype: torch.dtype | None = None) -> Variant:
    if edges := cache_type(name).edges(layers):
        description = f"{description}; {show_layers(sorted(edges))} in 16 bits"
    return Variant(name, description, "cache", cache=name, rounding=rounding(name, layers, dtype))


def _bake_variant(variant: Variant, factors: Mapping[int, LayerFactors]) -> Variant:
    """Round K and V times their factors, and divide again."""
    assert variant.rounding is not None
    plain: CacheRounding = variant.rounding

    def round_layer(layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        layer = factors.get(layer_idx)
        if layer is None:
            return plain(layer_idx, key, value)
        k, v = (broadcast_scale(factor, x).to(x.dtype) for factor, x in ((layer.k, key), (layer.v, value)))
        key, value = plain(layer_idx, key * k, value * v)
        return key.div_(k), value.div_(v)

    return replace(
        variant,
        name=f"{variant.name}, baked",
        description=f"{variant.description}, on baked weights",
        rounding=round_layer,
        is_baked=True,
    )


def count_bytes(variants: Sequence[Variant], layers: Layers) -> list[Variant]:
    """Return the variants, those that are whole caches with their bytes per token."""
    counted, shapes = [], layers.shapes
    for variant in variants:
        if variant.is_whole_cache:
            in_16_bits = variant.layers_in_16_bits(layers)
            quantised = {index: shape for index, shape in shapes.items() if index not in in_16_bits}
            size = cache_type(variant.cache or "fp8").model_bytes(layers._replace(shapes=quantised))
            size += sum(2 * shapes[index].values for index in in_16_bits)
            variant = replace(variant, bytes_per_token=size)
        counted.append(variant)
    return counted
