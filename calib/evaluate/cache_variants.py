"""Variants of other cache types than static FP8, plain and on baked weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from calib.caches.rounding import CacheRounding, rounding
from calib.caches.types import ALL_CACHES, CACHES, LATENT_CACHES, CacheType, Shape, cache_type
from calib.choices import Purpose
from calib.errors import InputError, UnsupportedModelError
from calib.evaluate.variants import (
    Setup,
    Variant,
    all_ones,
    broadcast_scale,
    fp8_rounding,
)
from calib.files.fingerprint import baked_for
from calib.files.model_directory import ModelDirectory
from calib.models.load import served_dtype
from calib.rescale.bake import baked_factors
from calib.rescale.weight_changes import LayerFactors
from calib.scales.observers import AbsMax
from calib.scales.scales import KVScales
from calib.scales.stats import KVStats

# static FP8: the variants that `fp8` stands for
STATIC = ("none", "tensor", "attn_head")


def cache_names(names: Sequence[str]) -> list[str]:
    """Names of the variants that `names`, of types or `all`, can become, beside STATIC."""
    types = dict.fromkeys(ALL_CACHES if "all" in names else names)
    baked = [f"{name}, baked" for name in types if name == "fp8" or cache_type(name).integers]
    return [*(name for name in types if name != "fp8"), *baked]


def wanted_types(names: Sequence[str], shapes: Sequence[Shape]) -> tuple[list[CacheType], list[str]]:
    """The types in `names`, and warnings; `all` leaves out those that the head sizes do not allow.

    `all` are those for K and V of heads, or those for latents, whichever the model caches.
    InputError where a type was asked for by its name.
    """
    found, warnings = {}, []
    of_all: Sequence[str] = CACHES if "all" in names else ()
    if of_all and any(Shape(*shape).attention != "heads" for shape in shapes):
        of_all = LATENT_CACHES
        warnings.append("types for K and V of heads are left out: this model caches latents (MLA)")
    for name in dict.fromkeys([*names, *of_all]):
        try:
            if name not in ("all", "fp8"):
                cache_type(name).bytes_per_token(shapes)
                found[name] = cache_type(name)
        except InputError as error:
            if name in names:
                raise InputError(f"{error}; leave it out of --caches") from None
            warnings.append(f"{error}: left out")
    return list(found.values()), warnings


def cache_variants(
    setup: Setup,
    checkpoint: ModelDirectory,
    names: Sequence[str],
    types: Sequence[CacheType],
    stats: KVStats,
) -> tuple[list[Variant], list[str]]:
    """Variants of `types`, each also on baked weights where `bake` can matter; and warnings.

    Baked weights are not written: K and V are multiplied by their factors before rounding and
    divided after it. Factors are powers of two, so the numbers are those of the baked model, but
    for norms of 1 + weight, whose rounding is a warning.
    """
    dtype = served_dtype(checkpoint)
    plain = {each.name: _plain(each, dtype) for each in types}
    ones = all_ones(stats.scales(strategy="tensor", observer=AbsMax(), targets="kv"))
    to_bake: dict[Purpose, list[Variant]] = {
        "fp8": [as_cache(ones, "FP8 at scale 1.0")] if {"all", "fp8"} & set(names) else [],
        "int8": [plain[each.name] for each in types if each.integers],
    }
    if baked_for(checkpoint):
        return list(plain.values()), []
    made, warnings = [], []
    for purpose, variants in to_bake.items():
        try:
            if not variants:
                continue
            factors, said = baked_factors(setup.model, checkpoint, stats, purpose)
            warnings += said
            made += [_on_baked(each, factors) for each in variants]
        except (InputError, UnsupportedModelError) as error:
            warnings.append(f"no rows on weights baked for {purpose}: {error}")
    both = [*plain.values(), *made]
    order = ["fp8", *plain]
    return sorted(both, key=lambda variant: order.index(str(variant.cache))), warnings


def with_bytes(variants: Sequence[Variant], shapes: Sequence[Shape]) -> list[Variant]:
    """The variants, with bytes per token where they are a whole cache."""
    return [replace(each, bytes_per_token=_bytes(each, shapes)) for each in variants]


def _bytes(variant: Variant, shapes: Sequence[Shape]) -> int | None:
    if not variant.generates:
        return None
    return cache_type(variant.cache or "fp8").bytes_per_token(shapes)


def as_cache(scales: KVScales, what: str) -> Variant:
    """Static FP8 as one type among others, with rounding of its own."""
    of_all = fp8_rounding(scales, "kv")

    def rounded(layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        _, key, value = of_all(layer_idx, key, key, value)
        return key, value

    return Variant("fp8", what, "cache", cache="fp8", rounding=rounded)


def _plain(kind: CacheType, dtype: torch.dtype | None) -> Variant:
    rounded = rounding(kind.name, dtype=dtype)
    return Variant(kind.name, kind.description, "cache", cache=kind.name, rounding=rounded)


def _on_baked(variant: Variant, factors: Mapping[int, LayerFactors]) -> Variant:
    assert variant.rounding is not None
    return replace(
        variant,
        name=f"{variant.name}, baked",
        what=f"{variant.what}, on baked weights",
        rounding=_rescaled(variant.rounding, factors),
        is_baked=True,
    )


def _rescaled(rounded: CacheRounding, factors: Mapping[int, LayerFactors]) -> CacheRounding:
    """Round K and V times their factors, and divide again."""

    def around(layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        layer = factors.get(layer_idx)
        if layer is None:
            return rounded(layer_idx, key, value)
        k, v = (broadcast_scale(factor, x).to(x.dtype) for factor, x in ((layer.k, key), (layer.v, value)))
        key, value = rounded(layer_idx, key * k, value * v)
        return key / k, value / v

    return around
