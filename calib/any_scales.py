"""Scales from a directory that this tool or another wrote, checked against a model in memory."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.attention import CachedAttention, map_attention
from calib.derive import check_fits, load_scales
from calib.errors import InputError
from calib.found_scales import Found, find_scales
from calib.output import CALIBRATION_FILE
from calib.scales import KVScales, LayerScales


def load_any_scales(directory: Path, model: PreTrainedModel) -> KVScales:
    """The scales in `directory`, complete and of this model.

    Raises:
        InputError: there are none, they are damaged, or they are of another model.
    """
    attention = map_attention(model)
    if (directory / CALIBRATION_FILE).exists():
        scales = load_scales(directory)
        _check_layers(directory, {s.layer_idx for s in scales.layers.values()}, attention.cached)
        return check_fits(model, scales)
    by_layer = find_scales(directory)
    _check_layers(directory, {layer_idx for layer_idx, _ in by_layer}, attention.cached)
    layers = {name: _layer(directory, by_layer, m) for name, m in attention.cached.items()}
    per_head = any(layer.k.numel() > 1 or layer.v.numel() > 1 for layer in layers.values())
    return KVScales("attn_head" if per_head else "tensor", "e4m3fn", layers, attention.shared)


def _check_layers(directory: Path, found: set[int], cached: dict[str, CachedAttention]) -> None:
    expected = {module.layer_idx for module in cached.values()}
    if found - expected:
        raise InputError(
            f"'{directory}': the scales are of another model: they name layer "
            f"{min(found - expected)}, the model caches K and V in {len(expected)} layers"
        )
    if expected - found:
        missing = ", ".join(map(str, sorted(expected - found)))
        raise InputError(
            f"'{directory}' has no scales for layers {missing}; calibrate the model again"
        )


def _layer(directory: Path, found: Found, module: CachedAttention) -> LayerScales:
    def scale(which: str, heads: int) -> Tensor:
        where = f"'{directory}': the {which}_scale of layer {module.layer_idx}"
        value = found.get((module.layer_idx, which))
        if value is None:
            raise InputError(f"{where} is missing; calibrate the model again")
        value = value.float().flatten()
        if len(value) not in (1, heads):
            raise InputError(f"{where} has {len(value)} values; the model has {heads} such heads")
        if not (torch.isfinite(value) & (value > 0)).all():
            raise InputError(f"{where} is {value.tolist()}; a scale is finite and positive")
        return value

    has_q = (module.layer_idx, "q") in found
    return LayerScales(
        module.layer_idx,
        k=scale("k", module.num_kv_heads),
        v=scale("v", module.num_kv_heads),
        q=scale("q", module.num_heads) if has_q else None,
    )
