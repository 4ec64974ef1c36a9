"""Output directories: the source's files and one extra shard."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.files.atomic import OnCopied, Placing, place_shard, save_tensors
from calib.files.model_directory import ModelDirectory
from calib.files.names import (
    BAKE_FILE,
    CALIBRATION_FILE,
    CARD_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    JSON_FILE,
    SCALES_SHARD,
    SINGLE_FILE,
    SOURCE_DIRECTORY,
    STRESS_FILE,
    is_of_cache,
)
from calib.files.strict_json import exact_json_text, json_text, read_object
from calib.formats.base import Export

# transformers ignores the index, and so our shard, where a file of the usual single name exists
RENAMED_SINGLE = "model-00001-of-00001.safetensors"
# files of the source that an output replaces; it keeps them in a directory where no engine looks
_REPLACED = (CARD_FILE, CONFIG_FILE, INDEX_FILE)
ADAPTER_FILE = "adapter_config.json"
_WEIGHTS = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"}


def check_output(out: Path, source: Path, *, overwrite: bool, what: str = "model") -> None:
    """Refuse an output path that would harm the source, which is `what`, or what is not ours."""
    # `resolve` fails on links that lead to themselves
    resolved, model = (Path(os.path.realpath(path)) for path in (out, source))
    if resolved == model or model in resolved.parents or resolved in model.parents:
        raise InputError(f"output '{out}' would mix with the {what} in '{source}'; choose another -o")
    ours = (
        *(CALIBRATION_FILE, f"*/{CALIBRATION_FILE}", STRESS_FILE, BAKE_FILE),
        SOURCE_DIRECTORY,
    )
    try:
        is_taken = out.exists() and not (out.is_dir() and not any(out.iterdir()))
        is_ours = any(any(out.glob(pattern)) for pattern in ours)
    except OSError as error:
        raise InputError(f"cannot write '{out}': {error.strerror}; choose another -o") from None
    if is_taken and not overwrite:
        raise InputError(f"output '{out}' exists; add --overwrite, or choose another -o")
    if is_taken and not is_ours:
        raise InputError(f"output '{out}' was not written by fp8kv, so --overwrite leaves it alone")


def write_checkpoint(
    export: Export,
    checkpoint: ModelDirectory,
    out: Path,
    *,
    weights: Placing | None,
    readme: str,
    on_copied: OnCopied = lambda name, more, size: None,
) -> None:
    """Fill the directory `out` with the source's files and what `export` adds.

    `weights` is None for a format that lies beside the model: documents and `readme` are all.
    """
    if weights is None:
        write_documents(export, out)
        (out / CARD_FILE).write_text(readme)
        return
    copy_small_files(checkpoint, out)
    keep_source_files(checkpoint.path, out)
    write_documents(export, out)
    config = export.config or checkpoint.config
    prepend_card(source_files(checkpoint.path), readme + _for_transformers(config), out)
    write_json(out / CONFIG_FILE, config)
    names = {shard: shard for shard in checkpoint.shards}
    if SINGLE_FILE in names and weights != "none":
        names[SINGLE_FILE] = RENAMED_SINGLE
    weight_map = place_weights(checkpoint, out, names, weights, on_copied)
    if export.tensors:
        save_tensors(export.tensors, out / SCALES_SHARD, {"format": "pt"})
    weight_map |= dict.fromkeys(export.tensors, SCALES_SHARD)
    added = sum(tensor.nbytes for tensor in export.tensors.values())
    write_index(checkpoint, out, weight_map, added)


def _for_transformers(config: dict[str, Any]) -> str:
    """What the card says of a config that transformers reads with another library."""
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") != "compressed-tensors":
        return ""
    return (
        "\nBeside engines: transformers opens this directory only where `compressed-tensors` is installed.\n"
    )


def source_files(path: Path) -> Path | None:
    """Where the source's own files are; None in an output of an older version, which kept none."""
    kept = path / SOURCE_DIRECTORY
    if kept.is_dir():
        return kept
    return None if (path / SCALES_SHARD).exists() else path


def keep_source_files(path: Path, out: Path) -> None:
    """Keep in `out` the source's files that it replaces, or the ones `path` has kept already."""
    if source := source_files(path):
        kept = out / SOURCE_DIRECTORY
        kept.mkdir()
        for name in _REPLACED:
            if (source / name).is_file():
                shutil.copyfile(source / name, kept / name)


def place_weights(
    checkpoint: ModelDirectory, out: Path, names: dict[str, str], weights: Placing, on_copied: OnCopied
) -> dict[str, str]:
    """Put weight files, without scales, into `out` under new `names`; return each tensor's file."""
    stale = {name for name in checkpoint.weight_map if is_of_cache(name)}
    for shard in checkpoint.shards if weights != "none" else ():
        held = {name for name, file in checkpoint.weight_map.items() if file == shard}
        if held - stale:  # more than scales
            target = out / names[shard]
            place_shard(checkpoint.path / shard, target, held & stale, weights, on_copied)
    return {n: names[s] for n, s in checkpoint.weight_map.items() if n not in stale}


def copy_small_files(checkpoint: ModelDirectory, out: Path) -> None:
    """Copy all files except weights and scales, their index, and those of an earlier run."""
    for file in sorted(checkpoint.path.rglob("*")):
        relative = file.relative_to(checkpoint.path)
        hidden = any(part.startswith((".", "fp8kv_")) for part in relative.parts)
        hidden = hidden and relative.name != BAKE_FILE  # which is true of the same weights
        is_weight = file.suffix in _WEIGHTS or file.name in (INDEX_FILE, JSON_FILE)
        if hidden or is_weight or not file.is_file():
            continue
        (out / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, out / relative)


def other_weights(checkpoint: ModelDirectory) -> list[str]:
    """Weight files in a model's directory that are not the checkpoint's; an adapter's config."""
    files = (file for file in sorted(checkpoint.path.rglob("*")) if file.is_file())
    names = {file.relative_to(checkpoint.path).as_posix(): file.suffix for file in files}
    weights = {name for name, suffix in names.items() if suffix in _WEIGHTS or name == ADAPTER_FILE}
    return sorted(weights - {*checkpoint.shards})


def write_documents(export: Export, out: Path) -> None:
    """Write the JSON documents of `export`."""
    for name, document in export.documents.items():
        text = exact_json_text(document, f"'{name}'", indent=2, ensure_ascii=False)
        (out / name).write_text(text + "\n")


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write `document` as indented JSON, null where a number is not finite."""
    path.write_text(json_text(document, indent=2, ensure_ascii=False) + "\n")


def write_index(checkpoint: ModelDirectory, out: Path, weight_map: dict[str, str], added: int) -> None:
    """Write the index of an output with the tensors of `weight_map`; scales `added` these bytes."""
    index = checkpoint.path / INDEX_FILE
    metadata = read_object(index).get("metadata") if index.exists() else None
    metadata = metadata if isinstance(metadata, dict) else {}
    sizes = {name: entry.end - entry.begin for name, entry in checkpoint.entries.items()}
    size = metadata.get("total_size")
    size = size if isinstance(size, int) else sum(sizes.values())
    size -= sum(sizes[name] for name in sizes if is_of_cache(name))
    metadata["total_size"] = size + added
    written = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    write_json(out / INDEX_FILE, written)


def front_matter(card: str) -> str:
    """The head of a card, in YAML between two lines of dashes; empty without one."""
    found = re.match(r"---\n.*?\n---\n", card, re.DOTALL)
    return found.group() if found else ""


def prepend_card(source: Path | None, ours: str, out: Path) -> None:
    """Write the README of `out`: the front matter of the one in `source`, `ours`, and the rest.

    Without a source the front matter is that of `out`'s own.
    """
    # what an output of an older version says of itself is no longer true; its head is the source's
    card = (source or out) / CARD_FILE
    text = card.read_text(errors="replace") if card.exists() else ""
    matter = front_matter(text)
    rest = text[len(matter) :] if source else ""
    (out / CARD_FILE).write_text("\n".join(filter(None, [matter, ours, rest])))
