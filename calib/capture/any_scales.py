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
from calib.files.cache_type import fp8_type
from calib.files.model_directory import open_model_directory
from calib.files.names import CALIBRATION_FILE, PACK_FILE
from calib.files.stored_scales import StoredLayer, StoredScales, is_usable, read_scales
from calib.same_model.check import LayerFacts, ModelFacts, check_same_model, model_facts, scales_facts
from calib.scales.derive import load_scales
from calib.scales.scales import KVScales, LayerScales, SharedAttention
from calib.scales.stats_file import load_stats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from calib.capture.attention import CachedAttention
    from calib.files.model_directory import ModelDirectory

# what a directory holds, still to be checked against a model
Opened = Callable[["PreTrainedModel"], KVScales]


def open_any_scales(directory: Path, checkpoint: ModelDirectory | None = None) -> Opened:
    """Read the scales in `directory`; call what is returned with the model they are for.

    Scales that are missing or damaged are an InputError here, and so are those whose config is not
    that of `checkpoint`. Layers and heads are compared in the call.
    """
    if checkpoint and directory.is_dir():
        check_same_model(scales_facts(directory), model_facts(checkpoint))
    measured = None
    if (directory / CALIBRATION_FILE).exists():
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
                check_same_model(
                    scales_facts(directory), model_facts(checkpoint, load_stats(directory).layers)
                )
            except InputError as error:
                warnings.append(str(error))
    return warnings


def attention_facts(
    name: str, cached: Mapping[str, CachedAttention], shared: Mapping[str, SharedAttention]
) -> ModelFacts:
    """Collect the shapes of K, V and Q that the model `name` computes."""
    layers = {
        module.layer_idx: LayerFacts(
            module.name,
            module.latent,
            {"k": {module.num_kv_heads}, "v": {module.num_kv_heads}, "q": {module.num_heads}},
            {"k": module.num_kv_heads * module.head_dim, "v": module.num_kv_heads * module.v_head_dim},
        )
        for module in cached.values()
    }
    layers |= {each.layer_idx: LayerFacts(module, is_shared=True) for module, each in shared.items()}
    return ModelFacts(name, layers=layers)


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

    attention = map_attention(model)
    facts = attention_facts(type(model).__name__, attention.cached, attention.shared)
    check_same_model(ModelFacts(str(directory), layers=_derived_layers(scales)), facts)
    return scales


def _derived_layers(scales: KVScales) -> dict[int, LayerFacts]:
    return {layer.layer_idx: LayerFacts(name, layer.latent) for name, layer in scales.layers.items()}


def _of_files(found: StoredScales, measured: KVScales | None, model: PreTrainedModel) -> KVScales:
    """What is served, which somebody may have changed since it was `measured`."""
    from calib.capture.attention import map_attention

    attention, path = map_attention(model), found.directory.path
    facts = attention_facts(type(model).__name__, attention.cached, attention.shared)
    if measured:
        check_same_model(ModelFacts(str(path), layers=_derived_layers(measured)), facts)
    by_layer = {layer.layer: layer for layer in found.layers}
    check_same_model(
        ModelFacts(str(path), layers={index: _stored_facts(layer) for index, layer in by_layer.items()}),
        facts,
    )
    layers = {name: by_layer[module.layer_idx] for name, module in attention.cached.items()}
    scales = to_scales(found, layers, found.fp8_dtype)
    made = {}
    for name, module in attention.cached.items():
        layer = scales.layers[name]
        if module.latent and not torch.equal(layer.k, layer.v):
            raise InputError(
                f"'{path}': layer {module.layer_idx} has {layer.k.item():g} for K and "
                f"{layer.v.item():g} for V; this model caches latents, which have one scale"
            )
        made[name] = replace(layer, latent=module.latent)
    return KVScales(scales.strategy, scales.fp8_dtype, made, attention.shared)


def _stored_facts(layer: StoredLayer) -> LayerFacts:
    """Return what the scales of a layer say of its heads; one scale is for all heads."""
    scales = {letter: getattr(layer, letter) or () for letter in "kvq"}
    return LayerFacts(heads={letter: {len(values)} for letter, values in scales.items() if len(values) > 1})
