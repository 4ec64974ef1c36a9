"""The scales of a checkpoint as data, and the checkpoint without them."""

import copy
import math
from pathlib import Path
from typing import Any

import torch

from calib.choices import FP8Name, Strategy
from calib.errors import InputError
from calib.export.compressed_tensors import find_quantization_config
from calib.model.quantized import is_of_attention, leaves_weights
from calib.scalefiles.folder import ScaleDirectory, open_scales
from calib.scalefiles.fp8_type import fp8_type
from calib.scalefiles.reading import LayerScalesFound, Values, layers_of
from calib.scales.scales import KVScales, LayerScales


def existing_layers(found: ScaleDirectory) -> dict[str, LayerScalesFound]:
    """What each attention module has, by its name in the checkpoint, whatever it is worth.

    Raises:
        InputError: there are no scales, or they are in a file that names no modules.
    """
    layers = layers_of(found)
    by_number = {_number(module): module for module in found.modules}
    named = {}
    for layer in layers:
        modules = {tensor.parsed.module.removesuffix(".attn") for tensor in layer.tensors}
        module = by_number.get(layer.layer) or next(iter(sorted(modules)), None)
        if module is None:
            raise InputError(
                f"'{found.path}' has scales for layer {layer.layer} and no attention module to "
                "hold them; put the file beside the model's weights"
            )
        named[module] = layer
    for number, module in by_number.items():
        if number is not None:
            named.setdefault(module, LayerScalesFound(number))  # none of its own
    return named


def existing_scales(directory: Path) -> KVScales:
    """The scales of a checkpoint, complete and usable.

    Raises:
        InputError: a layer lacks K or V, a scale is not finite and positive, or they are not FP8's.
    """
    layers = {}
    found = open_scales(directory)
    for module, layer in existing_layers(found).items():
        for letter in "kv":
            if not is_usable(getattr(layer, letter)):
                raise InputError(
                    f"'{directory}': the {letter.upper()} scale of {module} is missing, or not "
                    "finite and positive; see `fp8kv verify`, and `fp8kv repair`"
                )
        # a query scale is optional, and nobody can use one that is none
        layers[module] = as_scales(layer, q=layer.q if is_usable(layer.q) else None)
    return collect(layers, fp8_type(found))


def collect(layers: dict[str, LayerScales], fp8_dtype: FP8Name) -> KVScales:
    """Scales by module as one object; one number everywhere is strategy tensor."""
    several = any(scale.numel() > 1 for layer in layers.values() for _, scale in layer.items())
    ordered = dict(sorted(layers.items(), key=lambda item: item[1].layer_idx))
    strategy: Strategy = "attn_head" if several else "tensor"
    return KVScales(strategy, fp8_dtype, ordered)


def as_scales(layer: LayerScalesFound, q: Values | None) -> LayerScales:
    """One layer's scales as tensors."""
    k, v = torch.tensor(layer.k), torch.tensor(layer.v)
    return LayerScales(layer.layer, k, v, None if q is None else torch.tensor(q))


def is_usable(values: Values | None) -> bool:
    """Whether an engine can divide by them."""
    return bool(values) and all(math.isfinite(value) and value > 0 for value in values or ())


def config_without_scales(config: dict[str, Any]) -> dict[str, Any]:
    """A config that says nothing of KV scales, and otherwise the same."""
    config = copy.deepcopy(config)
    config.pop("kv_cache_torch_dtype", None)
    quantization = find_quantization_config(config)
    if quantization is not None:
        quantization.pop("kv_cache_scheme", None)
        groups = quantization.get("config_groups")
        if isinstance(groups, dict):
            kept = {name: group for name, group in groups.items() if not is_of_attention(group)}
            quantization["config_groups"] = kept
        for holder in (config, config.get("text_config")):
            if isinstance(holder, dict) and leaves_weights(holder.get("quantization_config") or {}):
                del holder["quantization_config"]
    return config


def _number(module: str) -> int | None:
    numbers = [int(part) for part in module.split(".") if part.isdecimal()]
    return numbers[0] if numbers else None
