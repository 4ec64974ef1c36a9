"""Digests that tell models, revisions and weights apart without reading all of their files.

By them a bake is known again, after which scale 1.0 is right.
"""

import hashlib
import re
from typing import Any

from calib.files.model_directory import ModelDirectory
from calib.files.names import BAKE_FILE, BAKE_KEY, SINGLE_FILE, is_of_cache
from calib.files.safetensors_header import Entry
from calib.files.strict_json import json_text, read_bytes, read_optional

_SETTINGS = {".json", ".py", ".txt", ".model", ".tiktoken", ".jinja"}
_SAMPLED_BLOCKS = 16
_BLOCK_BYTES = 4096
_SAMPLE_BYTES = 256
_ATTENTION = re.compile("attn|attention")
_NO_EXPERT = re.compile(r"^(?!.*\bexperts\.)")  # of which there can be tens of thousands


def fingerprint(checkpoint: ModelDirectory) -> str:
    """Return the sha256 of the config, of every weight file's name, size, header and a few blocks,
    and of a few bytes of every tensor of attention.

    It tells models and revisions apart without reading hundreds of gigabytes; it does not prove
    that two checkpoints are the same. Files that have changed since they were opened are refused.
    """
    checkpoint.check_unchanged()
    digest = hashlib.sha256(json_text(checkpoint.config, sort_keys=True).encode())
    for shard in checkpoint.shards:
        size = (checkpoint.path / shard).stat().st_size
        digest.update(f"{shard} {size} ".encode())
        with (checkpoint.path / shard).open("rb") as file:
            digest.update(file.read(8 + int.from_bytes(file.read(8), "little")))
            for i in range(_SAMPLED_BLOCKS):
                file.seek(i * size // _SAMPLED_BLOCKS)
                digest.update(file.read(_BLOCK_BYTES))
    digest.update(weights_digest(checkpoint).encode())
    return digest.hexdigest()


def fingerprints(checkpoint: ModelDirectory) -> dict[str, str]:
    """Return the two digests that a calibration notes: `checkpoint`, the fingerprint, and `weights`,
    the sha256 of a few bytes of every tensor but those of experts."""
    # the first refuses files that have changed
    return {
        "checkpoint": fingerprint(checkpoint),
        "weights": weights_digest(checkpoint, beyond_attention=True),
    }


def settings_digest(directory: ModelDirectory) -> str:
    """Return the sha256 of names and bytes of all files beside the weights that a run may read.

    These are settings, tokenizers, templates, and code that comes with the model.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.path.iterdir()):
        if path.suffix in _SETTINGS and path.is_file():
            digest.update(f"{path.name} {hashlib.sha256(read_bytes(path)).hexdigest()} ".encode())
    return digest.hexdigest()


def weights_digest(directory: ModelDirectory, *, beyond_attention: bool = False) -> str:
    """Return the sha256 of a few bytes of every tensor of attention; KV-cache scales are left out.

    With `beyond_attention`, of all tensors but those of experts. It stays the same where files are
    renamed, or scales put beside the weights.
    """
    pattern = _NO_EXPERT if beyond_attention else _ATTENTION
    shards = directory.indexed_shards if directory.index else [SINGLE_FILE]
    tensors: dict[str, tuple[str, Entry]] = {}
    for shard in shards:
        header = directory.headers.get(shard, {})
        tensors |= {name: (shard, entry) for name, entry in header.items() if pattern.search(name)}
    digest = hashlib.sha256()
    for name in sorted(name for name in tensors if not is_of_cache(name)):
        shard, entry = tensors[name]
        digest.update(f"{name} {entry.dtype} {entry.shape} ".encode())
        for place in (entry.begin, (entry.begin + entry.end) // 2):
            digest.update(read_bytes(directory.path / shard, place, min(_SAMPLE_BYTES, entry.end - place)))
    return digest.hexdigest()


def read_bake(directory: ModelDirectory) -> dict[str, Any]:
    """Read the report of a bake in a directory; it is empty unless the weights are those that were baked.

    Without its file, which a copy may lack, it is what config.json says of it.
    """
    report = read_optional(directory.path / BAKE_FILE) or directory.config.get(BAKE_KEY)
    report = report if isinstance(report, dict) else {}
    is_own = report.get("for") is not None and report.get("weights") == weights_digest(directory)
    return report if is_own else {}


def baked_for(directory: ModelDirectory) -> str | None:
    """Return the cache that a directory's weights were baked for, fp8 or int8; None if they were not."""
    report = read_bake(directory)
    return str(report["for"]) if report else None
