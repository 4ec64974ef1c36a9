"""A model directory in Hugging Face layout, opened for reading and checked before anything runs."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from calib.errors import InputError
from calib.files.calibrations import no_model
from calib.files.json_file import read_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_SAMPLED_BLOCKS = 16
_BLOCK_BYTES = 4096
_PICKLES = {".bin", ".pt", ".pth", ".ckpt"}


@dataclass(frozen=True)
class Checkpoint:
    """A local directory with `config.json` and safetensors weights."""

    path: Path
    config: dict[str, Any]
    weight_map: dict[str, str]  # tensor name -> file name

    @property
    def shards(self) -> list[str]:
        """Names of the weight files, sorted."""
        return sorted(set(self.weight_map.values()))

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the config: all of it, unless the model is multimodal."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config


def fingerprint(checkpoint: Checkpoint) -> str:
    """The sha256 of the config, and of every weight file's name, size, header and a few blocks.

    It tells models and revisions apart without reading hundreds of gigabytes; it is no proof that
    two checkpoints are the same.
    """
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    for shard in checkpoint.shards:
        path = checkpoint.path / shard
        size = path.stat().st_size
        digest.update(f"{shard} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(8 + int.from_bytes(file.read(8), "little")))
            for i in range(_SAMPLED_BLOCKS):
                file.seek(i * size // _SAMPLED_BLOCKS)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model directory and check that its weight files are whole and where the index says.

    Raises:
        InputError: a file is missing, unreadable, truncated, outside the directory, or a pickle.
    """
    if not (path / "config.json").exists():
        raise no_model(path, f"'{path}' has no config.json: it is not a model directory")
    config = read_json(path / "config.json")
    weight_map = _weight_map(path)
    held = {shard: _tensor_names(path / shard) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in held[shard]:
            raise InputError(
                f"{path / INDEX_FILE} says '{name}' is in '{shard}', but it is not; "
                "download the model again"
            )
    return Checkpoint(path, config, weight_map)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model directory.

    Raises:
        InputError: the file is missing, or not what `read_object` takes.
    """
    if not path.exists():
        raise InputError(f"'{path.parent}' has no {path.name}: it is not a model directory")
    return read_object(path)


def _weight_map(path: Path) -> dict[str, str]:
    if (path / INDEX_FILE).exists():
        weight_map = read_json(path / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"'{path / INDEX_FILE}' has no weight_map; download the model again")
        weight_map = {name: str(shard) for name, shard in weight_map.items()}
        for shard in sorted(set(weight_map.values())):
            _check_shard(path, shard)
        return weight_map
    if (path / SINGLE_FILE).exists():
        return dict.fromkeys(_tensor_names(path / SINGLE_FILE), SINGLE_FILE)
    raise InputError(_no_weights(path))


def _check_shard(path: Path, shard: str) -> None:
    if Path(shard).name != shard or shard in {"", ".", ".."}:
        raise InputError(f"'{path / INDEX_FILE}' names '{shard}', a file outside the directory")
    if not (path / shard).exists():
        raise InputError(
            f"'{path / INDEX_FILE}' names '{shard}', which is missing; download it again"
        )


def _tensor_names(shard: Path) -> set[str]:
    try:
        with safe_open(
            shard, framework="pt"
        ) as file:  # checks offsets and length against the header
            return set(file.keys())
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"'{shard}' is not a whole safetensors file ({error}); download it again"
        ) from None


def _no_weights(path: Path) -> str:
    pickles = sorted(f.name for f in path.iterdir() if f.suffix in _PICKLES)
    if pickles:
        return (
            f"'{path}' holds pickled weights ({pickles[0]}), which can run code when opened; "
            "convert them to safetensors first"
        )
    return f"'{path}' holds no {SINGLE_FILE} and no {INDEX_FILE}"
