"""Scales from a directory that this tool or another wrote, checked against a model in memory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.choices import FP8Name
from calib.errors import InputError
from calib.measure.attention import CachedAttention, map_attention
from calib.scalefiles.file_names import CALIBRATION_FILE
from calib.scalefiles.folder import open_scales
from calib.scalefiles.fp8_type import fp8_type
from calib.scalefiles.reading import LayerScalesFound, layers_of
from calib.scales.derive import check_fits, load_scales
from calib.scales.scales import KVScales, LayerScales

# what a directory holds, still to be checked against a model
Opened = Callable[[PreTrainedModel], KVScales]


def load_any_scales(directory: Path, model: PreTrainedModel) -> KVScales:
    """The scales in `directory`, complete and of this model.

    Raises:
        InputError: there are none, they are damaged, or they are of another model.
    """
    return open_any_scales(directory)(model)


def open_any_scales(directory: Path) -> Opened:
    """Read the scales in `directory`; call what is returned with the model they are for.

    Raises:
        InputError: there are none, or they are damaged; from the call, they are of another model.
    """
    if (directory / CALIBRATION_FILE).exists():
        return partial(_of_calibration, directory, load_scales(directory))
    opened = open_scales(directory)
    return partial(_of_files, directory, layers_of(opened), fp8_type(opened))


def _of_calibration(directory: Path, scales: KVScales, model: PreTrainedModel) -> KVScales:
    attention = map_attention(model)
    _check_layers(directory, {s.layer_idx for s in scales.layers.values()}, attention.cached)
    return check_fits(model, scales)


def _of_files(
    directory: Path, found: list[LayerScalesFound], fp8_dtype: FP8Name, model: PreTrainedModel
) -> KVScales:
    attention = map_attention(model)
    by_layer = {layer.layer: layer for layer in found}
    _check_layers(directory, {*by_layer}, attention.cached)
    layers = {
        name: _layer(directory, by_layer[module.layer_idx], module)
        for name, module in attention.cached.items()
    }
    per_head = any(layer.k.numel() > 1 or layer.v.numel() > 1 for layer in layers.values())
    return KVScales("attn_head" if per_head else "tensor", fp8_dtype, layers, attention.shared)


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


def _layer(directory: Path, found: LayerScalesFound, module: CachedAttention) -> LayerScales:
    def scale(which: str, heads: int) -> Tensor:
        where = f"'{directory}': the {which}_scale of layer {module.layer_idx}"
        values = getattr(found, which)
        if values is None:
            raise InputError(f"{where} is missing; calibrate the model again")
        value = torch.tensor(values)
        if len(value) not in (1, heads):
            raise InputError(f"{where} has {len(value)} values; the model has {heads} such heads")
        if not (torch.isfinite(value) & (value > 0)).all():
            raise InputError(f"{where} is {value.tolist()}; a scale is finite and positive")
        return value

    return LayerScales(
        module.layer_idx,
        k=scale("k", module.num_kv_heads),
        v=scale("v", module.num_kv_heads),
        q=scale("q", module.num_heads) if found.q is not None else None,
    )
