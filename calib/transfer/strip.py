"""`fp8kv strip`: a checkpoint as it was before it had KV-cache scales, or as near as can be known."""

import copy
import shutil
from pathlib import Path
from typing import Any

from calib.files.atomic import OnCopied, atomic_directory
from calib.files.config import find_quantization_config
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.names import (
    CARD_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    JSON_FILE,
    MODELOPT_FILE,
    SCALES_SHARD,
    SINGLE_FILE,
    STATS_FILE,
    is_of_cache,
)
from calib.files.skipped_layers import MODELOPT_KEYS, SKIP_KEY
from calib.files.strict_json import read_object, read_optional
from calib.formats.directory import (
    RENAMED_SINGLE,
    check_output,
    copy_small_files,
    other_weights,
    place_weights,
    source_files,
    write_index,
    write_json,
)
from calib.models.quantized.detect import is_for_cache_only, targets_attention
from calib.progress import SILENT, Progress


def strip(directory: Path, output: Path, *, overwrite: bool = False, progress: Progress = SILENT) -> bool:
    """Write `directory` to `output` without scales; return whether there was anything to take out."""
    checkpoint = open_model_directory(directory)
    check_output(output, directory, overwrite=overwrite)
    source = source_files(directory)
    with atomic_directory(output, overwrite=overwrite) as scratch:
        progress.stage("write")
        copy_small_files(checkpoint, scratch)
        (scratch / CARD_FILE).unlink(missing_ok=True)
        if source is not None and (source / CARD_FILE).exists():
            shutil.copyfile(source / CARD_FILE, scratch / CARD_FILE)
        remove_documents(checkpoint, scratch)
        _write_config(checkpoint, source, scratch)
        _write_weights(checkpoint, source, scratch, progress.copied)
        checkpoint.check_unchanged()
        is_same = read_optional(scratch / MODELOPT_FILE) == checkpoint.modelopt
    files = {*other_weights(checkpoint)} & {SCALES_SHARD, STATS_FILE}
    has_scales = any(map(is_of_cache, checkpoint.entries)) or files or (directory / JSON_FILE).exists()
    return bool(has_scales) or not is_same or _announces_scales(checkpoint.config)


def remove_documents(checkpoint: ModelDirectory, out: Path) -> None:
    """Remove ModelOpt's document; where it is also of weights, only what it says of scales."""
    (out / MODELOPT_FILE).unlink(missing_ok=True)
    document = copy.deepcopy(checkpoint.modelopt or {})
    quantization = document.get("quantization")
    if isinstance(quantization, dict):
        for key in MODELOPT_KEYS:
            quantization.pop(key, None)
        if not is_for_cache_only({"quant_method": "modelopt", **quantization}):
            write_json(out / MODELOPT_FILE, document)


def strip_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without a word on KV scales, and otherwise the same."""
    config = copy.deepcopy(config)
    for key in ("kv_cache_torch_dtype", SKIP_KEY):
        config.pop(key, None)
    quantization = find_quantization_config(config)
    if quantization is not None:
        quantization.pop("kv_cache_scheme", None)
        for key in MODELOPT_KEYS:
            quantization.pop(key, None)
        groups = quantization.get("config_groups")
        if isinstance(groups, dict):
            weights = {name: group for name, group in groups.items() if not targets_attention(group)}
            quantization["config_groups"] = weights
        for part in (config, config.get("text_config")):
            if isinstance(part, dict) and is_for_cache_only(part.get("quantization_config") or {}):
                del part["quantization_config"]
    return config


def _write_config(checkpoint: ModelDirectory, source: Path | None, out: Path) -> None:
    """Write the config without scales, as the source has it where that says the same."""
    plain = strip_config(checkpoint.config)
    original = read_object(source / CONFIG_FILE) if source else None
    if source and original and strip_config(original) == plain and not _announces_scales(original):
        shutil.copyfile(source / CONFIG_FILE, out / CONFIG_FILE)
    else:
        write_json(out / CONFIG_FILE, plain)


def _announces_scales(config: dict[str, Any]) -> bool:
    quiet = copy.deepcopy(config)
    quantization = find_quantization_config(quiet) or {}
    if quantization.get("kv_cache_scheme", "") is None:  # null announces nothing
        del quantization["kv_cache_scheme"]
    return strip_config(quiet) != quiet


def _write_weights(checkpoint: ModelDirectory, source: Path | None, out: Path, on_copied: OnCopied) -> None:
    """Link the weights under the names that they had in `source`, with its index where that fits."""
    index = (source or checkpoint.path) / INDEX_FILE
    original = (read_optional(index) or {}).get("weight_map")
    files = {*original.values()} if isinstance(original, dict) else {SINGLE_FILE}
    names = {shard: shard for shard in checkpoint.shards}
    if source is not None and SINGLE_FILE in files and RENAMED_SINGLE not in files:
        names |= {RENAMED_SINGLE: SINGLE_FILE}
    weight_map = place_weights(checkpoint, out, names, "link", on_copied)
    # a tensor that the source's index left out is in its file all the same
    if original is not None and original.items() <= weight_map.items():
        shutil.copyfile(index, out / INDEX_FILE)
    elif original is not None or {*weight_map.values()} != {SINGLE_FILE}:
        write_index(checkpoint, out, weight_map, added=0)
