"""A model directory in Hugging Face layout, opened for reading and checked before anything runs."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.errors import InputError, UnsupportedExportError
from calib.files.baked import add_files, weights_digest
from calib.files.calibrations import no_model
from calib.files.file_names import (
    CALIBRATION_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    SCALES_SHARD,
    SINGLE_FILE,
)
from calib.files.folder import LAYER_KEYS, read_index
from calib.files.headers import Entry, read_header
from calib.files.json_text import json_text
from calib.files.names import is_of_senses
from calib.files.stacks import check_layers
from calib.files.strict_json import read_object

_PICKLES = {".bin", ".pt", ".pth", ".ckpt"}

FileState = tuple[int, int, int]  # inode, bytes, nanoseconds of the last change


# layers, index and the attention module itself must agree
_TAIL = 3


@dataclass(frozen=True)
class ModelDirectory:
    """A local directory with `config.json` and safetensors weights."""

    path: Path
    config: dict[str, Any]
    weight_map: dict[str, str]  # tensor name -> file name
    entries: dict[str, Entry]  # tensor name -> what its file's header says of it
    states: dict[str, FileState]  # file name -> what it was when it was opened

    @property
    def shards(self) -> list[str]:
        """Names of the weight files, sorted."""
        return [*self.states]

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the config: all of it, unless the model is multimodal."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def caches_latents(self) -> bool:
        """Whether its layers cache a latent instead of K and V per head (MLA), by its config."""
        return bool(self.text_config.get("kv_lora_rank"))

    @property
    def num_layers(self) -> int | None:
        """Layers of the language model, where its config says so."""
        found = (self.text_config.get(key) for key in LAYER_KEYS)
        return next((number for number in found if type(number) is int), None)

    def sizes_and_times(self) -> dict[str, list[int]]:
        """Bytes and nanoseconds of the last change of each weight file, by name."""
        return {shard: [size, changed] for shard, (_, size, changed) in self.states.items()}

    def check_unchanged(self) -> None:
        """Check that the weight files are those that were opened: scales fit no others."""
        for shard, state in self.states.items():
            if not (self.path / shard).exists() or _state(self.path / shard) != state:
                raise InputError(
                    f"'{self.path / shard}' has changed since it was opened, so nothing was "
                    "written; run again once the model is complete"
                )


def fingerprint(checkpoint: ModelDirectory) -> str:
    """The sha256 of the config, of every weight file's name, size, header and a few blocks, and of
    a few bytes of every tensor of attention.

    It tells models and revisions apart without reading hundreds of gigabytes; it is no proof that
    two checkpoints are the same. Files that have changed since they were opened are refused.
    """
    checkpoint.check_unchanged()
    digest = hashlib.sha256(json_text(checkpoint.config, sort_keys=True).encode())
    add_files(digest, checkpoint.path, checkpoint.shards)
    digest.update(weights_digest(checkpoint.path).encode())
    return digest.hexdigest()


def fingerprints(checkpoint: ModelDirectory) -> dict[str, str]:
    """What a calibration says of its model: its fingerprint as `checkpoint`, and as `weights` the
    sha256 of a few bytes of every tensor but those of experts."""
    weights = weights_digest(checkpoint.path, beyond_attention=True)
    return {"checkpoint": fingerprint(checkpoint), "weights": weights}


def open_model_directory(path: Path) -> ModelDirectory:
    """Open a model directory and check that its weight files are whole and where the index says.

    Refused are pickles, files outside the directory, two models in one, a tensor twice, and a
    config of another number of layers.
    """
    file = path / CONFIG_FILE
    if not file.exists():
        raise no_model(path, f"'{path}' has no {CONFIG_FILE}: it is not a model directory")
    config = read_object(file)
    for place, says in quantization_configs(config):
        if not isinstance(says, dict):
            raise InputError(f"'{file}' must hold a JSON object as {place}, got {type(says).__name__}")
    weight_map, entries = _weights(path)
    check_layers(path, config, weight_map)
    states = {shard: _state(path / shard) for shard in sorted(set(weight_map.values()))}
    return ModelDirectory(path, config, weight_map, entries, states)


def quantization_configs(config: dict[str, Any]) -> list[tuple[str, Any]]:
    """The quantization configs of a config.json, each with the key that it is under."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    found = {
        "quantization_config": config.get("quantization_config"),
        "text_config.quantization_config": text.get("quantization_config"),
        "compression_config": config.get("compression_config"),
    }
    return [(place, says) for place, says in found.items() if says is not None]


def _weights(path: Path) -> tuple[dict[str, str], dict[str, Entry]]:
    listed = _listed(path)
    shards = sorted(set(listed.values())) or [SINGLE_FILE]
    is_single = (path / SINGLE_FILE).exists()
    if not (listed or is_single):
        pickles = sorted(f.name for f in path.iterdir() if f.suffix in _PICKLES)
        raise InputError(
            f"'{path}' holds pickled weights ({pickles[0]}), which can run code when opened; "
            "convert them to safetensors first"
            if pickles
            else f"'{path}' holds no {SINGLE_FILE} and no {INDEX_FILE}"
        )
    if is_single and {*shards} - {SCALES_SHARD} != {SINGLE_FILE}:
        # transformers reads the one, engines the others
        raise InputError(
            f"'{path}' holds {SINGLE_FILE} and {INDEX_FILE}, which names other files; "
            "take away whichever is not the model"
        )
    found: dict[str, str] = {}
    entries: dict[str, Entry] = {}
    for shard in shards:
        header = read_header(path / shard)
        entries |= header
        for name in sorted(header):
            if found.setdefault(name, shard) != shard:
                raise InputError(
                    f"'{path}' holds '{name}' in {found[name]} and in {shard}; "
                    "remove the one that is not the model's"
                )
    for name, shard in listed.items():
        if found.get(name) != shard:
            raise InputError(
                f"{path / INDEX_FILE} says '{name}' is in '{shard}', but it is not; download the model again"
            )
    return found, entries


def _listed(path: Path) -> dict[str, str]:
    listed = read_index(path)
    if listed == {}:
        raise InputError(f"'{path / INDEX_FILE}' has no weight_map; download the model again")
    missing = sorted(shard for shard in {*(listed or {}).values()} if not (path / shard).exists())
    if missing:
        advice = "download it again"
        if (path / CALIBRATION_FILE).exists():
            advice = (
                "put the source's weight files beside these, as --weights none has left them out, "
                "or give the source"
            )
        raise InputError(f"'{path / INDEX_FILE}' names '{missing[0]}', which is missing; {advice}")
    return listed or {}


def _state(file: Path) -> FileState:
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def checkpoint_prefix(module: str, checkpoint: ModelDirectory) -> str:
    """Find the prefix of an attention module's tensors in the checkpoint.

    The two differ where transformers renames on load: `model.language_model.layers.0.self_attn`
    for `language_model.model.layers.0.self_attn`. The prefix must end as the module does and share
    the most name parts with it. Towers for images and sound, whose layers may end so too, are out.
    """
    prefixes = _prefixes(checkpoint)
    if module in prefixes:
        return module
    found = {p: _likeness(module, p) for p in sorted(prefixes) if not is_of_senses(p)}
    best = max(found.values(), default=(0, 0))
    names = [prefix for prefix, likeness in found.items() if likeness == best]
    if best[0] < _TAIL or len(names) > 1:
        why = f"{names[0]} and {names[1]} both may" if best[0] >= _TAIL else "no names end so"
        raise UnsupportedExportError(
            f"cannot tell which tensors of '{checkpoint.path}' belong to {module}: {why}"
        )
    return names[0]


def _prefixes(checkpoint: ModelDirectory) -> set[str]:
    # k_proj.weight and the like: the attention module is two levels above the tensor
    return {name.rsplit(".", 2)[0] for name in checkpoint.weight_map if name.count(".") >= _TAIL}


def _likeness(module: str, prefix: str) -> tuple[int, int]:
    parts, others = module.split("."), prefix.split(".")
    tail = 0
    while tail < min(len(parts), len(others)) and parts[-1 - tail] == others[-1 - tail]:
        tail += 1
    return tail, len(set(parts) & set(others))
