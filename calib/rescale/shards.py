"""A checkpoint with some tensors multiplied: other weight files are linked, other bytes stay."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from calib.errors import InputError
from calib.files.atomic import place_shard, save_tensors
from calib.files.model_directory import ModelDirectory
from calib.files.names import CONFIG_FILE, INDEX_FILE
from calib.formats.directory import copy_small_files, write_index, write_json
from calib.progress import SILENT, Progress
from calib.rescale.products import Rescaled

Edit = Callable[[Tensor], Tensor]


def write_rescaled(
    checkpoint: ModelDirectory,
    edits: Mapping[str, Edit],
    out: Path,
    dtype: torch.dtype | None,
    progress: Progress = SILENT,
) -> None:
    """Fill `out` with the checkpoint, the tensors that `edits` names changed.

    All floats become `dtype`, where it is given, before they are edited.
    """
    copy_small_files(checkpoint, out)
    weight_map, grown = checkpoint.weight_map, 0
    progress.stage("write", sum(size for _, size, _ in checkpoint.states.values()), "bytes")
    for shard, (_, size, _) in checkpoint.states.items():
        held = {name for name, file in weight_map.items() if file == shard}
        if dtype is None and held.isdisjoint(edits):
            place_shard(checkpoint.path / shard, out / shard, set(), "link", lambda *_: None)
        else:
            grown += _rewrite(checkpoint.path / shard, out / shard, edits, dtype)
        progress.advance(size)
    if dtype is not None:
        write_json(out / CONFIG_FILE, _config(checkpoint.config, dtype))
    if (checkpoint.path / INDEX_FILE).exists():
        if grown:
            write_index(checkpoint, out, weight_map, grown)
        else:
            shutil.copyfile(checkpoint.path / INDEX_FILE, out / INDEX_FILE)


def exact_product(change: Rescaled, advice: str) -> Edit:
    """Multiplies a tensor by the factor of `change`; InputError, with `advice`, if it rounds."""

    def multiply(weight: Tensor) -> Tensor:
        if change.is_exact(weight):
            return change.product(weight)
        dtype = str(weight.dtype).removeprefix("torch.")
        low, high = change.factor.aminmax()
        given = f"{low.item():g}" if low == high else "its factors"
        wider = "" if weight.dtype == torch.float32 else "add --dtype float32"
        ways = " or ".join(filter(None, (wider, advice))) or "nothing wider is known"
        raise InputError(f"'{change.name}' times {given} is not exact in {dtype}; {ways}")

    return multiply


def _rewrite(source: Path, target: Path, edits: Mapping[str, Edit], dtype: torch.dtype | None) -> int:
    """Write `target`; return by how many bytes its tensors grew."""
    with safe_open(source, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        metadata = file.metadata()
    before = sum(int(tensor.nbytes) for tensor in tensors.values())
    for name, tensor in tensors.items():
        cast = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
        tensors[name] = edits[name](cast) if name in edits else cast
    save_tensors(tensors, target, metadata or {})
    return sum(int(tensor.nbytes) for tensor in tensors.values()) - before


def _config(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """`config` with the dtype of the weights, under the names that it uses."""
    name = str(dtype).removeprefix("torch.")
    nested = {k: _config(v, dtype) for k, v in config.items() if isinstance(v, dict)}
    return {**config, **nested, **dict.fromkeys(config.keys() & {"dtype", "torch_dtype"}, name)}
