"""Output directories: the source's files and one extra shard, elsewhere or in the model's own directory."""

import filecmp
import os
import re
import shutil
from pathlib import Path
from typing import Any

from calib.arguments import to_path
from calib.choices import FORMATS
from calib.errors import InputError
from calib.files.atomic import OnCopied, Placing, copy_access, place_shard, save_tensors
from calib.files.model_directory import ModelDirectory
from calib.files.names import (
    BAKE_FILE,
    CALIBRATION_FILE,
    CARD_FILE,
    CONFIG_FILE,
    EVALUATION_DIRECTORY,
    INDEX_FILE,
    JSON_FILE,
    SCALES_SHARD,
    SINGLE_FILE,
    SOURCE_DIRECTORY,
    STRESS_FILE,
    TEXT_FILE,
    is_misspelt,
    is_of_cache,
)
from calib.files.strict_json import exact_json_text, json_text, read_optional
from calib.files.text import plain
from calib.formats.base import Export
from calib.formats.card import prepend_card

# transformers ignores the index, and so our shard, where a file of the usual single name exists
RENAMED_SINGLE = "model-00001-of-00001.safetensors"
ADAPTER_FILE = "adapter_config.json"
# files of the source that an output replaces; it keeps them in a directory where no engine looks
_REPLACED = (CARD_FILE, CONFIG_FILE, INDEX_FILE)
_OUR_FILES = (CALIBRATION_FILE, STRESS_FILE, BAKE_FILE, TEXT_FILE, SOURCE_DIRECTORY)
_WEIGHTS = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"}
_FOR_TRANSFORMERS = (
    "\nBeside engines: transformers opens this directory only where `compressed-tensors` is installed.\n"
)


def check_output(out: Path, source: Path, *, overwrite: bool, kind: str = "model", flag: str = "-o") -> None:
    """Refuse a path, of `flag`, that would harm the source, a `kind` of directory, or others' files."""
    check_printable(out)
    # `resolve` fails on links that lead to themselves
    resolved, model = (Path(os.path.realpath(path)) for path in (out, source))
    if resolved == model or model in resolved.parents or resolved in model.parents:
        raise InputError(f"output '{out}' would mix with the {kind} in '{source}'; choose another {flag}")
    try:
        is_taken = out.exists() and not (out.is_dir() and not any(out.iterdir()))
        is_ours = is_taken and _is_output(out)
    except OSError as error:
        raise InputError(f"cannot write '{out}': {error.strerror}; choose another {flag}") from None
    if is_taken and not is_ours:
        raise InputError(f"output '{out}' bears no mark of fp8kv, and is left alone; choose another {flag}")
    if is_taken and not overwrite:
        raise InputError(f"output '{out}' exists; add --overwrite, or choose another {flag}")


def check_printable(path: Path) -> None:
    """Refuse a path that the commands that we print could not hold."""
    if plain(str(path)) != str(path):
        raise InputError(
            f"'{plain(str(path))}' has a control character, which no printed command can hold; "
            "give the directory another name"
        )


def _is_output(directory: Path) -> bool:
    """Return whether fp8kv wrote `directory`: an output, or one for each of several formats and no more."""
    if any((directory / name).exists() for name in _OUR_FILES):
        return True
    parts = {path.name: path for path in directory.iterdir()} if directory.is_dir() else {}
    parts = {name: path for name, path in parts.items() if name not in (EVALUATION_DIRECTORY, ".DS_Store")}
    if parts.keys() == {CARD_FILE, JSON_FILE}:  # converted from another tool's scales
        return "by fp8kv" in parts[CARD_FILE].read_text(errors="replace")
    return bool(parts) and all(
        name in FORMATS and (path / CALIBRATION_FILE).exists() for name, path in parts.items()
    )


def write_checkpoint(
    export: Export,
    checkpoint: ModelDirectory,
    out: Path,
    *,
    weights: Placing | None,
    readme: str,
    on_copied: OnCopied = lambda *_: None,
) -> None:
    """Fill `out` with what `export` adds, and the source's files unless `weights` is None."""
    if weights is None:
        write_documents(export, out)
        (out / CARD_FILE).write_text(readme)
        return
    copy_small_files(checkpoint, out)
    source = source_files(checkpoint.path)
    if source:
        (out / SOURCE_DIRECTORY).mkdir()
        for name in _REPLACED:
            if (source / name).is_file():
                shutil.copyfile(source / name, out / SOURCE_DIRECTORY / name)
    write_documents(export, out)
    config = export.config or checkpoint.config
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") == "compressed-tensors":
        readme += _FOR_TRANSFORMERS
    prepend_card(source, readme, out)
    write_json(out / CONFIG_FILE, config)
    names = {shard: shard for shard in checkpoint.shards}
    if SINGLE_FILE in names and weights != "none":
        names[SINGLE_FILE] = RENAMED_SINGLE
    weight_map = place_weights(checkpoint, out, names, weights, on_copied)
    if export.tensors:
        save_tensors(export.tensors, out / SCALES_SHARD, {"format": "pt"})
    weight_map |= dict.fromkeys(export.tensors, SCALES_SHARD)
    write_index(checkpoint, out, weight_map, sum(tensor.nbytes for tensor in export.tensors.values()))


def source_files(path: Path) -> Path | None:
    """Return the directory of the source's own files; None in an output that has lost them."""
    own = path / SOURCE_DIRECTORY
    if own.is_dir():
        return own
    return None if (path / SCALES_SHARD).exists() else path


def place_weights(
    checkpoint: ModelDirectory, out: Path, names: dict[str, str], weights: Placing, on_copied: OnCopied
) -> dict[str, str]:
    """Put weight files, without scales, into `out` under new `names`; return each tensor's file."""
    files = checkpoint.weight_map.items()
    stale = {
        name for name, file in files if is_of_cache(name) or (file == SCALES_SHARD and is_misspelt(name))
    }
    for shard in checkpoint.shards if weights != "none" else ():
        tensors = {name for name, file in checkpoint.weight_map.items() if file == shard}
        if tensors - stale:
            place_shard(checkpoint.path / shard, out / names[shard], tensors & stale, weights, on_copied)
    return {name: names[shard] for name, shard in checkpoint.weight_map.items() if name not in stale}


def copy_small_files(checkpoint: ModelDirectory, out: Path) -> None:
    """Copy all files except weights and scales, their index, and those of an earlier run."""
    for file in sorted(checkpoint.path.rglob("*")):
        relative = file.relative_to(checkpoint.path)
        is_hidden = any(part.startswith((".", "fp8kv_")) for part in relative.parts)
        is_hidden = is_hidden and relative.name != BAKE_FILE  # which is true of the same weights
        is_weight = file.suffix in _WEIGHTS or file.name in (INDEX_FILE, JSON_FILE)
        if file.is_file() and not (is_hidden or is_weight):
            (out / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, out / relative)


def other_weights(checkpoint: ModelDirectory) -> list[str]:
    """Return weight files that are not the checkpoint's, and an adapter's config."""
    files = (file for file in sorted(checkpoint.path.rglob("*")) if file.is_file())
    names = {file.relative_to(checkpoint.path).as_posix(): file.suffix for file in files}
    weights = {name for name, suffix in names.items() if suffix in _WEIGHTS or name == ADAPTER_FILE}
    return sorted(weights - {*checkpoint.shards})


def write_documents(export: Export, out: Path) -> None:
    """Write the JSON documents of `export`."""
    for name, document in export.documents.items():
        (out / name).write_text(exact_json_text(document, f"'{name}'", indent=2, ensure_ascii=False) + "\n")


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write `document` as indented JSON, null where a number is not finite."""
    path.write_text(json_text(document, indent=2, ensure_ascii=False) + "\n")


def write_index(checkpoint: ModelDirectory, out: Path, weight_map: dict[str, str], added: int) -> None:
    """Write the index of an output with the tensors of `weight_map`; scales `added` these bytes."""
    metadata = (read_optional(checkpoint.path / INDEX_FILE) or {}).get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    sizes = {name: entry.end - entry.begin for name, entry in checkpoint.entries.items()}
    weights = (name for name in sizes if name in weight_map and not is_of_cache(name))
    metadata["total_size"] = added + sum(sizes[name] for name in weights)
    write_json(out / INDEX_FILE, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def check_places(output: Path | None, *, in_place: bool, overwrite: bool) -> None:
    """Refuse `in_place` together with another place, or with leave to replace what is there."""
    if in_place and (output or overwrite):
        raise InputError("--in-place writes into the model's directory; leave -o, --overwrite away")


def local_directory(model_name: str) -> Path:
    """Return the directory of `model_name`; an InputError unless it is one."""
    path = to_path(model_name)
    if not path.is_dir():
        raise InputError(f"--in-place writes into a local directory, which '{model_name}' is not; use -o")
    check_printable(path)
    return path.resolve()


def complete(scratch: Path, model: Path) -> None:
    """Link all of `model` that stays as it is into `scratch`, which will replace it."""
    folders = [path for path in sorted(model.rglob("*")) if path.is_dir() and not path.is_symlink()]
    for path in sorted(model.rglob("*")):
        target = scratch / path.relative_to(model)
        if path in folders:
            target.mkdir(exist_ok=True)
            continue
        # the weights have another name now, the document holds scales that are not the model's any more
        if path.name in (SINGLE_FILE, JSON_FILE) and path.parent == model:
            continue
        if target.exists() and _is_same(path, target):
            target.unlink()  # a copy has another owner, and is not a symbolic link
        if not (target.exists() or target.is_symlink()):
            _link(path, target)
    for folder in reversed(folders):  # one that nobody may write is full by now
        copy_access(folder, scratch / folder.relative_to(model))


def back_up(model: Path, scratch: Path) -> Path | None:
    """Link what `scratch` changes or drops in a directory beside `model`; None if nothing does."""
    files = (path for path in sorted(model.rglob("*")) if path.is_symlink() or not path.is_dir())
    changed = [file for file in files if not _is_same(file, scratch / file.relative_to(model))]
    if not changed:
        return None
    name = f"{model.name}.before-fp8kv"
    matches = (re.fullmatch(rf"{re.escape(name)}(?:-(\d+))?", path.name) for path in model.parent.iterdir())
    last = max((int(match[1] or 1) for match in matches if match), default=0)
    backup = model.with_name(f"{name}-{last + 1}" if last else name)
    partial = scratch.with_suffix(".backup")
    try:
        for file in changed:
            _link(file, partial / file.relative_to(model))
        copy_access(model, partial)
        partial.rename(backup)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return backup


def _is_same(file: Path, new: Path) -> bool:
    if file.is_symlink() and new.is_symlink():
        return os.readlink(file) == os.readlink(new)
    if not (file.exists() and new.exists()):
        return False
    return file.samefile(new) or filecmp.cmp(file, new, shallow=False)


def _link(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # a symbolic link stays one; both directories lie side by side, so a relative one still leads
    os.link(file, target, follow_symlinks=False)
