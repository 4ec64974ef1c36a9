"""Output directories: the source's files and one extra shard."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from calib.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, read_json
from calib.errors import InputError
from calib.export.base import Export
from calib.files.calibrations import CALIBRATION_FILE as CALIBRATION_FILE
from calib.files.names import is_of_cache
from calib.place import OnCopied, Placing, place_shard
from calib.tensor_file import save_tensors

STRESS_FILE = "fp8kv_stress.json"
SCALES_SHARD = "model-fp8kv-scales.safetensors"

# transformers ignores the index, and so our shard, where a file of the usual single name exists
_RENAMED_SINGLE = "model-00001-of-00001.safetensors"
_WEIGHT_SUFFIXES = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
}


def check_output(out: Path, source: Path, *, overwrite: bool) -> None:
    """Refuse an output path that would harm the source or something that is not ours.

    Raises:
        InputError: the path is the source, lies around or inside it, exists, or cannot be read.
    """
    # `resolve` fails on links that lead to themselves
    resolved, model = (Path(os.path.realpath(path)) for path in (out, source))
    if resolved == model or model in resolved.parents or resolved in model.parents:
        raise InputError(
            f"output '{out}' would mix with the model in '{source}'; choose another -o"
        )
    ours = (CALIBRATION_FILE, f"*/{CALIBRATION_FILE}", STRESS_FILE)
    try:
        is_free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
        is_ours = any(any(out.glob(pattern)) for pattern in ours)
    except OSError as error:
        raise InputError(f"cannot write '{out}': {error.strerror}; choose another -o") from None
    if is_free:
        return
    if not overwrite:
        raise InputError(f"output '{out}' exists; add --overwrite, or choose another -o")
    if not is_ours:
        raise InputError(f"output '{out}' was not written by fp8kv, so --overwrite leaves it alone")


def write_checkpoint(
    export: Export,
    checkpoint: Checkpoint,
    out: Path,
    *,
    weights: Placing,
    readme: str,
    on_copied: OnCopied = lambda name, copied, size: None,
) -> None:
    """Fill the directory `out` with the source's files and what `export` adds."""
    copy_small_files(checkpoint, out)
    write_documents(export, out)
    _write_readme(checkpoint.path / "README.md", readme, out)
    write_json(out / "config.json", export.config or checkpoint.config)
    stale = {name for name in checkpoint.weight_map if is_of_cache(name)}
    names = _output_names(checkpoint, weights)
    if weights != "none":
        for shard in checkpoint.shards:
            held = {name for name, file in checkpoint.weight_map.items() if file == shard}
            drop = stale & held
            if drop == held:
                continue  # nothing but scales
            target = out / names[shard]
            place_shard(checkpoint.path / shard, target, drop, weights, on_copied)
    if export.tensors:
        save_tensors(export.tensors, out / SCALES_SHARD, {"format": "pt"})
    weight_map = {n: names[s] for n, s in checkpoint.weight_map.items() if n not in stale}
    weight_map |= dict.fromkeys(export.tensors, SCALES_SHARD)
    _write_index(checkpoint, out, weight_map, export.tensors)


def copy_small_files(checkpoint: Checkpoint, out: Path) -> None:
    """Copy what is neither a weight, nor an index of weights, nor of an earlier run of ours."""
    for file in sorted(checkpoint.path.rglob("*")):
        relative = file.relative_to(checkpoint.path)
        hidden = any(part.startswith((".", "fp8kv_")) for part in relative.parts)
        is_weight = file.suffix in _WEIGHT_SUFFIXES or file.name == INDEX_FILE
        if hidden or is_weight or not file.is_file():
            continue
        (out / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, out / relative)


def write_documents(export: Export, out: Path) -> None:
    """Write the JSON documents of `export`."""
    for name, document in export.documents.items():
        write_json(out / name, document)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write `document` as indented JSON."""
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _output_names(checkpoint: Checkpoint, weights: Placing) -> dict[str, str]:
    names = {shard: shard for shard in checkpoint.shards}
    if SINGLE_FILE in names and weights != "none":
        names[SINGLE_FILE] = _RENAMED_SINGLE
    return names


def _write_index(
    checkpoint: Checkpoint, out: Path, weight_map: dict[str, str], added: dict[str, Tensor]
) -> None:
    source_index = checkpoint.path / INDEX_FILE
    metadata = read_json(source_index).get("metadata", {}) if source_index.exists() else {}
    size = metadata.get("total_size") or sum(
        _data_bytes(checkpoint.path / s) for s in checkpoint.shards
    )
    metadata["total_size"] = size + sum(tensor.nbytes for tensor in added.values())
    write_json(
        out / INDEX_FILE, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    )


def _data_bytes(shard: Path) -> int:
    # a safetensors file is 8 bytes of header length, the header, the data
    with shard.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return shard.stat().st_size - 8 - header


def _write_readme(source: Path, ours: str, out: Path) -> None:
    card = source.read_text(errors="replace") if source.exists() else ""
    front = re.match(r"---\n.*?\n---\n", card, re.DOTALL)
    matter = front.group() if front else ""
    (out / "README.md").write_text("\n".join(filter(None, [matter, ours, card[len(matter) :]])))
