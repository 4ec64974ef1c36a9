"""A checkpoint as it was before it had KV-cache scales, or as near as can be known."""

import copy
import shutil
from pathlib import Path
from typing import Any

from calib.files.atomic import OnCopied
from calib.files.model_directory import ModelDirectory
from calib.files.names import CARD_FILE, CONFIG_FILE, INDEX_FILE, MODELOPT_FILE, SINGLE_FILE
from calib.files.strict_json import read_object
from calib.formats.compressed_tensors import find_quantization_config
from calib.formats.directory import (
    RENAMED_SINGLE,
    copy_small_files,
    place_weights,
    source_files,
    write_index,
    write_json,
)
from calib.models.quantized.detect import is_for_cache_only, targets_attention


def write_plain(
    checkpoint: ModelDirectory,
    out: Path,
    on_copied: OnCopied = lambda name, more, size: None,
) -> None:
    """Fill `out` with the checkpoint without scales: the source's own files, if it kept them."""
    source = source_files(checkpoint.path)
    copy_small_files(checkpoint, out)
    (out / CARD_FILE).unlink(missing_ok=True)
    remove_documents(checkpoint, out)
    if source is not None and (source / CARD_FILE).exists():
        shutil.copyfile(source / CARD_FILE, out / CARD_FILE)
    _write_config(checkpoint, source, out)
    _write_weights(checkpoint, source, out, on_copied)


def remove_documents(checkpoint: ModelDirectory, out: Path) -> None:
    """Remove ModelOpt's document, unless it speaks of weights: then only what it says of scales."""
    (out / MODELOPT_FILE).unlink(missing_ok=True)
    source = checkpoint.path / MODELOPT_FILE
    document = read_object(source) if source.exists() else {}
    says = document.get("quantization")
    if isinstance(says, dict):
        says.pop("kv_cache_quant_algo", None)
        if not is_for_cache_only({"quant_method": "modelopt", **says}):
            write_json(out / MODELOPT_FILE, document)


def _write_config(checkpoint: ModelDirectory, source: Path | None, out: Path) -> None:
    plain = config_without_scales(checkpoint.config)
    if source is not None:
        original = read_object(source / CONFIG_FILE)
        if not _announces_scales(original) and config_without_scales(original) == plain:
            shutil.copyfile(source / CONFIG_FILE, out / CONFIG_FILE)
            return
    write_json(out / CONFIG_FILE, plain)


def _write_weights(checkpoint: ModelDirectory, source: Path | None, out: Path, on_copied: OnCopied) -> None:
    index = (source or checkpoint.path) / INDEX_FILE
    original = read_object(index).get("weight_map") if index.exists() else None
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


def config_without_scales(config: dict[str, Any]) -> dict[str, Any]:
    """A config that says nothing of KV scales, and otherwise the same."""
    config = copy.deepcopy(config)
    config.pop("kv_cache_torch_dtype", None)
    quantization = find_quantization_config(config)
    if quantization is not None:
        quantization.pop("kv_cache_scheme", None)
        quantization.pop("kv_cache_quant_algo", None)
        groups = quantization.get("config_groups")
        if isinstance(groups, dict):
            kept = {name: group for name, group in groups.items() if not targets_attention(group)}
            quantization["config_groups"] = kept
        for holder in (config, config.get("text_config")):
            if isinstance(holder, dict) and is_for_cache_only(holder.get("quantization_config") or {}):
                del holder["quantization_config"]
    return config


def _announces_scales(config: dict[str, Any]) -> bool:
    quiet = copy.deepcopy(config)
    quantization = find_quantization_config(quiet) or {}
    if quantization.get("kv_cache_scheme", "") is None:
        del quantization["kv_cache_scheme"]
    return config_without_scales(quiet) != quiet
