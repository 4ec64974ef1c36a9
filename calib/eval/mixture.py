"""`--search-bits`: a type of cache for each layer, within a mean of bits per value."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from calib.caches.types import Serving, cache_type
from calib.capture.attention import map_attention
from calib.errors import InputError
from calib.eval.advice import skip_argument
from calib.eval.found import Mixture
from calib.eval.reader import mean_kl
from calib.eval.variants import Setup, Variant
from calib.files.strict_json import json_text

LAYER_MAP_FILE = "modelopt_kv_cache_layers.json"
_16_BITS = "16 bits"
# as ModelOpt calls them
_ALGORITHMS = {"fp8": "FP8", "nvfp4": "NVFP4", _16_BITS: None}
# how vLLM serves the type of that name for the model, or why it does not
Fitting = Callable[[str], Sequence[Serving] | str]
_NOT_READ = "ModelOpt's layer map (#2272); not yet read by vLLM (0.32 and 0.33), see vllm #56116"


def mix(setup: Setup, variants: Sequence[Variant], documents: Sequence[Tensor], budget: float) -> Mixture:
    """The types of `variants` that cost least KL within a mean of `budget` bits, overhead included.

    Layers go from the smallest type upwards where that saves most KL for a bit, by the KL of each
    layer alone. The KL of the mixture itself is measured. InputError where nothing is that small,
    or where that KL is no number.
    """
    if not variants:
        raise InputError("--search-bits chooses among --caches: name some, or all")
    with torch.inference_mode():
        bits = _bits(setup, variants)
        alone: dict[str, dict[int, float]] = {}
        for each in variants:
            single = [mixed({layer: each}) for layer in bits]
            found = mean_kl(setup, f"search: layers alone in {each.name}", single, documents)
            alone[each.name] = dict(zip(bits, found, strict=True))
        chosen = choose({_16_BITS: dict.fromkeys(bits, 0.0), **alone}, bits, budget)
        by_name = {each.name: each for each in variants}
        together = mixed({i: by_name[name] for i, name in chosen.items() if name != _16_BITS})
        kl = mean_kl(setup, "search: the mixture", [together], documents)[0]
    if not math.isfinite(kl):
        raise InputError(
            f"--search-bits {budget:g}: the KL of the mixture is {kl}, though that of each layer "
            "alone is a number; give more bits or other --caches"
        )
    values = {i: bits[i][""] for i in bits}
    mean = sum(bits[i][name] * values[i] for i, name in chosen.items()) / sum(values.values())
    modules = {m.layer_idx: name for name, m in map_attention(setup.model).cached.items()}
    return Mixture(
        budget=budget, bits=mean, documents=len(documents), kl=kl, kl_alone=alone,
        layers=chosen, modules=modules,
    )  # fmt: skip


def mixed(by_layer: Mapping[int, Variant]) -> Variant:
    """A cache that holds each layer_idx as its variant does, and all others in 16 bits."""

    def rounded(layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        variant = by_layer.get(layer_idx)
        if variant is None or variant.rounding is None:
            return key, value
        return variant.rounding(layer_idx, key, value)

    name = f"mixture {[(i, each.name) for i, each in by_layer.items()]}"
    any_of = next(iter(by_layer.values()), Variant(name, name, "cache"))
    return replace(any_of, name=name, what=name, rounding=rounded)


def _bits(setup: Setup, variants: Sequence[Variant]) -> dict[int, dict[str, float]]:
    """Bits per value of each type, by layer_idx; the entry "" is the number of values."""
    found = {}
    for module in map_attention(setup.model).cached.values():
        shape = module.shape
        sizes = {v.name: cache_type(v.cache or "fp8").bytes_per_token([shape]) for v in variants}
        bits = {name: 8 * size / shape.values for name, size in sizes.items()}
        found[module.layer_idx] = {**bits, _16_BITS: 16.0, "": float(shape.values)}
    return found


def choose(
    alone: Mapping[str, Mapping[int, float]], bits: Mapping[int, Mapping[str, float]], budget: float
) -> dict[int, str]:
    """The type of each layer: KL saved per bit decides, from each layer's KL alone.

    A type is left out of the layers where that KL is no number.
    """
    usable = {i: [name for name in alone if math.isfinite(alone[name][i])] for i in bits}
    chosen = {i: min(usable[i], key=lambda n: (bits[i][n], alone[n][i])) for i in bits}
    values = {i: bits[i][""] for i in bits}
    room = budget * sum(values.values()) - sum(bits[i][n] * values[i] for i, n in chosen.items())
    if room < 0:
        least = budget - room / sum(values.values())
        lost = sum(map(len, usable.values())) < len(alone) * len(bits)
        without = " where the KL is a number" if lost else ""
        raise InputError(f"--search-bits {budget:g}: the smallest of these types has {least:g}{without}")
    while True:
        steps = []
        for i, now in chosen.items():
            for name in usable[i]:
                cost = (bits[i][name] - bits[i][now]) * values[i]
                saved = alone[now][i] - alone[name][i]
                if saved > 0 and cost <= room:
                    steps.append((saved / cost if cost > 0 else float("inf"), i, name, cost))
        if not steps:
            return chosen
        _, i, name, cost = max(steps)
        chosen[i], room = name, room - cost


def mixture_lines(found: Mixture, fitting: Fitting) -> list[str]:
    """The mixture in words, and how vLLM serves it: its type by `fitting`."""
    counts = {name: [*found.layers.values()].count(name) for name in found.layers.values()}
    parts = ", ".join(f"{count} layer{'s' * (count > 1)} in {name}" for name, count in sorted(counts.items()))
    line = f"{found.budget:g} bits a value are met ({found.bits:.3g}) with {parts}: KL {found.kl:.2g}"
    types = sorted(counts.keys() - {_16_BITS})
    if len(types) > 1:
        return [f"{line}; no released engine serves such a mixture"]
    return [f"{line}; {_served(types[0], found, fitting)}" if types else line]


def _served(name: str, found: Mixture, fitting: Fitting) -> str:
    """How vLLM serves one type beside layers in 16 bits, or why it does not."""
    servings = fitting(name)
    if isinstance(servings, str):
        return servings
    skipped = [i for i, each in found.layers.items() if each == _16_BITS]
    skip = f" {skip_argument(skipped)}" if skipped else ""
    loads = name == "fp8" and "heads" in servings[0].of
    scales = ", with calibrated scales (`fp8kv calibrate`)" if loads else ""
    flags = {serving.flag for serving in servings}
    return f"vLLM: {' or '.join(sorted(flags))}{skip}{scales}"


def layer_map(found: Mixture | None) -> str:
    """ModelOpt's layer map of a report; empty where it has no name for one of the types."""
    if found is None:
        return ""
    algorithms = {i: _ALGORITHMS.get(name, "") for i, name in found.layers.items()}
    if "" in algorithms.values():
        return ""
    layers = {found.modules[i]: {"quant_algo": each} for i, each in algorithms.items() if each}
    document: dict[str, Any] = {
        "note": _NOT_READ,
        "quantization": {
            "kv_cache_quant_algo": "MIXED_PRECISION",
            "kv_cache_schema_version": 1,
            "kv_cache_quantized_layers": layers,
        },
    }
    return json_text(document, indent=2) + "\n"
