"""Scales as they lie in a directory: by layer index, from tensors or from JSON, unchecked.

Reads the names of compressed-tensors, auto-round, ModelOpt, Quark, TGI and TensorRT-LLM, and
`kv_cache_scales.json`. Of safetensors files only the scales are read, never weights.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from calib.errors import InputError

# (layer_idx, "k" | "v" | "q") -> scale
Found = dict[tuple[int, str], Tensor]

JSON_FILE = "kv_cache_scales.json"
_LAYER = re.compile(r"\.(\d+)\.")
# how a tensor's name ends -> which scales it holds; what holds both K's and V's comes first,
# so that a scale of one alone replaces it
_ENDINGS = [
    (r"\.kv_scale|\.kv_cache_scaling_factor", "kv"),
    (r"\.k_scale|\.k_proj\.output_scale|\.k_cache\.scale|\.k_cache_scaling_factor", "k"),
    (r"\.v_scale|\.v_proj\.output_scale|\.v_cache\.scale|\.v_cache_scaling_factor", "v"),
    (r"\.q_scale|\.q_proj\.output_scale", "q"),
]


class _Json(BaseModel):
    """`kv_cache_scales.json`: rank -> layer index -> scale of K and V."""

    class KVCache(BaseModel):
        """What it says of the cache."""

        scaling_factor: dict[int, dict[int, float]]

    kv_cache: KVCache


def find_scales(directory: Path) -> Found:
    """The scales in `directory`, shapes and values as they are there.

    Raises:
        InputError: there are none, or a file cannot be read.
    """
    found = _from_tensors(directory)
    if not found and (directory / JSON_FILE).exists():
        found = _from_json(directory / JSON_FILE)
    if not found:
        raise InputError(
            f"'{directory}' holds no KV-cache scales: no tensor such as "
            f"'model.layers.0.self_attn.k_scale', no {JSON_FILE}; give the output of a calibration"
        )
    return found


def _from_tensors(directory: Path) -> Found:
    tensors = {
        name: tensor
        for path in sorted(directory.glob("*.safetensors"))
        for name, tensor in _scale_tensors(path)
    }
    found: Found = {}
    for ending, letters in _ENDINGS:
        for name, tensor in tensors.items():
            layer = _LAYER.search(name)
            if layer and re.search(f"(?:{ending})$", name):
                found |= {(int(layer[1]), letter): tensor for letter in letters}
    return found


def _scale_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    ending = re.compile(f"(?:{'|'.join(ending for ending, _ in _ENDINGS)})$")
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no iterator)
                if ending.search(name):
                    yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read '{path}': {error}") from None


def _from_json(path: Path) -> Found:
    try:
        ranks = _Json.model_validate_json(path.read_bytes()).kv_cache.scaling_factor.values()
    except (OSError, ValidationError) as error:
        raise InputError(f"cannot read '{path}': {' '.join(str(error).split())}") from None
    found: Found = {}
    for rank in ranks:
        for layer_idx, factor in rank.items():
            # ranks hold different heads: one scale for all of them is the largest
            scale = max(factor, *found.get((layer_idx, "k"), torch.zeros(1)).tolist())
            found |= {(layer_idx, letter): torch.tensor([scale]) for letter in "kv"}
    return found
