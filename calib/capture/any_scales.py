"""Scales in a directory of any tool as `KVScales`, checked against the model they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from calib.choices import FP8Name
from calib.errors import InputError
from calib.files.baked import baked_for
from calib.files.cache_type import fp8_type
from calib.files.calibration import read_report
from calib.files.fingerprint import fingerprint
from calib.files.model_directory import open_model_directory
from calib.files.names import CALIBRATION_FILE, PACK_FILE
from calib.files.stored_scales import StoredLayer, StoredScales, is_usable, read_scales
from calib.same_model.identity import check_same_model, identity
from calib.same_model.saved import check_measured_on
from calib.scales.derive import check_fits, load_scales
from calib.scales.scales import KVScales, LayerScales
from calib.scales.stats_file import load_stats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from calib.capture.attention import AttentionMap, CachedAttention
    from calib.files.model_directory import ModelDirectory

# what a directory holds, still to be checked against a model
Opened = Callable[["PreTrainedModel"], KVScales]


def open_any_scales(directory: Path, checkpoint: ModelDirectory | None = None) -> Opened:
    """Read the scales in `directory`; call what is returned with the model they are for.

    Scales that are missing or damaged are an InputError here, and so are those whose config is not
    that of `checkpoint`. Layers and heads are compared in the call.
    """
    if checkpoint and directory.is_dir():
        check_same_model(directory, identity(directory), checkpoint.path, checkpoint.config)
    measured = None
    if (directory / CALIBRATION_FILE).exists():
        _check_baked(directory, checkpoint)
        measured = load_scales(directory)
        is_pack = (directory / PACK_FILE).exists()  # whose JSON has one scale for K and V
        files = open_model_directory(directory, weights=False, or_statistics=True)
        if is_pack or not (files.config or files.json):  # format fp8kv
            if files.tensors:
                raise InputError(
                    f"'{directory}' holds statistics to make scales of, and others in "
                    f"{files.tensors[0].file}; take away the ones that are not the model's"
                )
            return partial(_of_calibration, directory, measured)
    found = read_scales(directory)
    fp8_type(found.directory)  # what is not known is refused before a model is loaded
    return partial(_of_files, found, measured)


def weight_warnings(directories: Iterable[Path], checkpoint: ModelDirectory) -> list[str]:
    """Say which calibrations in `directories` are of other weights than those of `checkpoint`."""
    warnings = []
    for directory in directories:
        if (directory / CALIBRATION_FILE).exists():
            try:
                check_measured_on(directory, load_stats(directory).layers, checkpoint)
            except InputError as error:
                warnings.append(str(error))
    return warnings


def _check_baked(directory: Path, checkpoint: ModelDirectory | None) -> None:
    """Refuse scales of the model that a baked one was made from."""
    if checkpoint is None or not baked_for(checkpoint.path):
        return
    if read_report(directory)["checkpoint"] != fingerprint(checkpoint):
        raise InputError(
            f"'{checkpoint.path}' is baked, and the scales in '{directory}' were not measured on "
            "it; calibrate the baked model"
        )


def to_scales(found: StoredScales, layers: Mapping[str, StoredLayer], fp8_dtype: FP8Name) -> KVScales:
    """Tensors of the scales of `layers`, by module; an InputError where one is of no use."""
    if found.misread:
        raise InputError(f"'{found.directory.path}': {found.misread[0]}; calibrate the model again")
    made = {}
    for module, layer in sorted(layers.items(), key=lambda item: item[1].layer):
        for letter in "kvq":
            values = getattr(layer, letter)
            if not is_usable(values) and not (letter == "q" and values is None):
                problem = "missing" if not values else f"{[*values][:8]}"
                raise InputError(
                    f"'{found.directory.path}': the {letter}_scale of layer {layer.layer} is "
                    f"{problem}; a scale is finite and positive: mend it with fp8kv repair, or "
                    "calibrate the model again"
                )
        k, v = torch.tensor(layer.k), torch.tensor(layer.v)
        q = None if layer.q is None else torch.tensor(layer.q)
        made[module] = LayerScales(layer.layer, k, v, q)
    several = any(scale.numel() > 1 for layer in made.values() for _, scale in layer.items())
    return KVScales("attn_head" if several else "tensor", fp8_dtype, made)


def _of_calibration(directory: Path, scales: KVScales, model: PreTrainedModel) -> KVScales:
    from calib.capture.attention import map_attention

    found = {layer.layer_idx for layer in scales.layers.values()}
    _check_layers(directory, found, map_attention(model))
    return check_fits(model, scales)


def _of_files(found: StoredScales, measured: KVScales | None, model: PreTrainedModel) -> KVScales:
    """What is served, which somebody may have changed since it was `measured`."""
    from calib.capture.attention import map_attention

    if measured:
        check_fits(model, measured)
    attention, path = map_attention(model), found.directory.path
    by_layer = {layer.layer: layer for layer in found.layers}
    _check_layers(path, {*by_layer}, attention)
    layers = {name: by_layer[module.layer_idx] for name, module in attention.cached.items()}
    scales = to_scales(found, layers, found.fp8_dtype)
    made = {}
    for name, module in attention.cached.items():
        _check_heads(path, scales.layers[name], module)
        made[name] = replace(scales.layers[name], latent=module.latent)
    return KVScales(scales.strategy, scales.fp8_dtype, made, attention.shared)


def _check_layers(directory: Path, found: set[int], attention: AttentionMap) -> None:
    expected = {module.layer_idx for module in attention.cached.values()}
    # engines want scales for these as well; their owners' serve
    unknown = found - expected - {module.layer_idx for module in attention.shared.values()}
    if unknown:
        raise InputError(
            f"'{directory}': the scales are of another model: they name layer {min(unknown)}, "
            f"the model caches K and V in {len(expected)} layers"
        )
    if expected - found:
        missing = ", ".join(map(str, sorted(expected - found)))
        raise InputError(f"'{directory}' has no scales for layers {missing}; calibrate again")


def _check_heads(directory: Path, layer: LayerScales, module: CachedAttention) -> None:
    for letter, scale in layer.items():
        heads = module.num_heads if letter == "q" else module.num_kv_heads
        if len(scale) not in (1, heads):
            raise InputError(
                f"'{directory}': the {letter}_scale of layer {module.layer_idx} has {len(scale)} "
                f"values; the model has {heads} such heads"
            )
    if module.latent and not torch.equal(layer.k, layer.v):
        raise InputError(
            f"'{directory}': layer {module.layer_idx} has {layer.k.item():g} for K and "
            f"{layer.v.item():g} for V; this model caches latents, which have one scale"
        )
