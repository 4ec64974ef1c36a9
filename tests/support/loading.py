"""Checkpoints of any names, and what an engine is said to do with them."""

import json

import torch
from safetensors.torch import save_file
from scale_directories import COMPRESSED, CONFIG

from calib.engines.catalogue import find_engine
from calib.engines.simulate_loading import simulate
from calib.files.model_directory import open_model_directory
from calib.files.names import layer_of

MODULES = [f"model.layers.{i}.self_attn" for i in range(2)]
WEIGHTS = [f"{module}.k_proj.weight" for module in MODULES]
SCALES = [f"{module}.{x}_scale" for module in MODULES for x in "kv"]


def write(directory, weights, scales, config=COMPRESSED, **document):
    """A checkpoint with these weights, and one scale for each name."""
    tensors = {name: torch.ones(2) for name in weights}
    save_file(tensors | {name: torch.tensor([0.5]) for name in scales}, directory / "m.safetensors")
    layers = len({layer_of(name) for name in weights} - {None})
    document = CONFIG | {"quantization_config": config, "num_hidden_layers": layers} | document
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def said(directory, engine):
    """`loaded`, `loaded with a flag`, `not known`, `refused`, or `1.0` for any layer at 1.0."""
    found = simulate(open_model_directory(directory, weights=False), find_engine(engine))
    statuses = {outcome.status for outcome in found.outcomes if outcome.letter != "q"}
    if found.is_good:
        return "loaded with a flag" if found.flag else "loaded"
    return "refused" if found.refused else "not known" if "unknown" in statuses else "1.0"
