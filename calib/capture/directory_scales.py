"""Scales in a directory, written by any tool, as `KVScales` that were checked against their model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from calib.files.skipped_layers import skipped_layers
from calib.files.stored_scales import StoredLayer, StoredScales, is_usable, read_scales
from calib.same_model.check import LayerFacts, ModelFacts, check_same_model, model_facts, scales_facts
from calib.scales.scales import KVScales, LayerScales, SharedAttention
from calib.scales.stats_file import open_calibration

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from calib.capture.attention import CachedAttention
    from calib.files.model_directory import ModelDirectory

# checks the scales of a directory against the model they are for, and returns them
ScalesForModel = Callable[["PreTrainedModel"], KVScales]


def open_scales(directory: Path, checkpoint: ModelDirectory | None = None) -> ScalesForModel:
    """Read the scales in `directory`; call what is returned with the model they are for.

    Scales that are missing or damaged are an InputError here, and so are those whose config is not that of
    `checkpoint`. Layers and heads are compared in the call.
    """
    if checkpoint and directory.is_dir():
        check_same_model(scales_facts(directory), model_facts(checkpoint))
    calibration = None
    if (directory / CALIBRATION_FILE).exists():
        calibration = open_calibration(directory, needs_report=False).scales()
        is_pack = (directory / PACK_FILE).exists()  # whose JSON has one scale for K and V
        files = open_model_directory(directory, weights=False, or_statistics=True)
        if is_pack or not (files.config or files.json):  # format fp8kv
            if files.tensors:
                raise InputError(
                    f"'{directory}' holds statistics to make scales of, and others in "
                    f"{files.tensors[0].file}; take away the ones that are not the model's"
                )
            return partial(_fit, directory, calibration, None)
    stored = read_scales(directory)
    fp8_type(stored.directory)  # an unknown type is refused before a model is loaded
    if checkpoint:
        check_same_model(_stored_facts(directory, stored), model_facts(checkpoint))
    return partial(_fit, stored.directory.path, calibration, stored)


def attention_facts(
    name: str, cached: Mapping[str, CachedAttention], shared: Mapping[str, SharedAttention]
) -> ModelFacts:
    """Collect the shapes of K, V and Q that the model `name` computes."""
    layers: dict[int, LayerFacts] = {
        module.layer_idx: {
            "the name": {module.name},
            "a cache of": {"latents" if module.latent else "K and V"},
            "K heads": {module.num_kv_heads},
            "V heads": {module.num_kv_heads},
            "Q heads": {module.num_heads},
            "K channels": {module.num_kv_heads * module.head_dim},
            "V channels": {module.num_kv_heads * module.v_head_dim},
        }
        for module in cached.values()
    }
    return ModelFacts(name, layers=layers, shared_layers={layer.layer_idx for layer in shared.values()})


def to_scales(stored: StoredScales, layers: Mapping[str, StoredLayer], fp8_dtype: FP8Name) -> KVScales:
    """Make tensors of the scales of `layers`, by module; an InputError where one is of no use."""
    path = stored.directory.path
    if stored.misread:
        raise InputError(f"'{path}': {stored.misread[0]}; calibrate the model again")
    scales = {}
    for module, layer in sorted(layers.items(), key=lambda item: item[1].layer):
        for letter in "kvq":
            values = getattr(layer, letter)
            if not is_usable(values) and not (letter == "q" and values is None):
                problem = f"{[*values[:8]]}, which no K, V or Q needs" if values else "missing"
                raise InputError(
                    f"'{path}': the {letter}_scale of layer {layer.layer} is {problem}; "
                    "mend it with fp8kv repair, or calibrate the model again"
                )
        q = None if layer.q is None else torch.tensor(layer.q)
        scales[module] = LayerScales(layer.layer, torch.tensor(layer.k), torch.tensor(layer.v), q)
    per_head = any(scale.numel() > 1 for layer in scales.values() for _, scale in layer.items())
    return KVScales("attn_head" if per_head else "tensor", fp8_dtype, scales)


def _fit(
    path: Path, calibration: KVScales | None, stored: StoredScales | None, model: PreTrainedModel
) -> KVScales:
    """Return the scales that are served, which somebody may have changed since the `calibration`.

    Layers that the config leaves in 16 bits have none.
    """
    from calib.capture.attention import map_attention

    attention = map_attention(model)
    facts = attention_facts(type(model).__name__, attention.cached, attention.shared)
    if calibration:
        calibrated_layers: dict[int, LayerFacts] = {
            layer.layer_idx: {"the name": {name}, "a cache of": {"latents" if layer.latent else "K and V"}}
            for name, layer in calibration.layers.items()
        }
        check_same_model(ModelFacts(str(path), layers=calibrated_layers), facts)
        if stored is None:
            return calibration
    assert stored is not None
    check_same_model(_stored_facts(path, stored), facts)
    by_layer = {layer.layer: layer for layer in stored.layers}
    layers = {name: by_layer[module.layer_idx] for name, module in attention.cached.items()}
    scales = to_scales(stored, layers, stored.fp8_dtype)
    fitted, skipped = {}, skipped_layers(stored.directory)
    for name, module in attention.cached.items():
        layer = scales.layers[name]
        if module.latent and not torch.equal(layer.k, layer.v):
            raise InputError(
                f"'{path}': layer {layer.layer_idx} has {layer.k.item():g} for K and {layer.v.item():g} "
                "for V; this model caches latents, which have one scale"
            )
        if module.layer_idx not in skipped:
            fitted[name] = replace(layer, latent=module.latent)
    return replace(scales, layers=fitted, shared=attention.shared)


def _stored_facts(path: Path, stored: StoredScales) -> ModelFacts:
    """Collect the layers of `stored`, and what several scales say of heads; one is for all heads."""
    layers: dict[int, LayerFacts] = {
        layer.layer: {f"{x.upper()} heads": {len(layer.values(x))} for x in "kvq" if len(layer.values(x)) > 1}
        for layer in stored.layers
    }
    return ModelFacts(str(path), layers=layers)
