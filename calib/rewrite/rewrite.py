"""`fp8kv convert`, `strip` and `repair`: a checkpoint written again with other scales, or none."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from calib.atomic import atomic_directory
from calib.checkpoint import Checkpoint, open_checkpoint
from calib.choices import FormatName, Reduce
from calib.errors import InputError, UnsupportedExportError
from calib.export import FORMATS, Export, export
from calib.files.layers import LayerScalesFound
from calib.files.measured import Amax, read_amax
from calib.output import check_output, write_checkpoint, write_documents
from calib.rewrite.existing import (
    as_scales,
    collect,
    existing_layers,
    existing_scales,
    is_usable,
    without_scales,
)
from calib.scales import KVScales, LayerScales

_FP8_MAX = 448.0
# documents that hold scales, or say that there are some
_DOCUMENTS = ("hf_quant_config.json", "kv_cache_scales.json")


@dataclass(frozen=True)
class Repaired:
    """Which scales were replaced."""

    output: Path
    replaced: list[str]  # such as "model.layers.3.self_attn k"


def convert(
    directory: Path,
    to: FormatName,
    output: Path,
    *,
    reduce: Reduce = "none",
    without_q: bool = False,
    tp_size: int = 1,
    overwrite: bool = False,
) -> KVScales:
    """Write the checkpoint `directory` to `output` with its scales in the format `to`.

    Raises:
        InputError: there are no scales, or some are of no use.
        UnsupportedExportError: the format cannot hold them as they are.
    """
    checkpoint = open_checkpoint(directory)
    check_output(output, directory, overwrite=overwrite)
    scales = existing_scales(directory, checkpoint)
    if scales.has_q and (without_q or not FORMATS[to].reads_q):
        if not without_q:
            raise UnsupportedExportError(
                f"--to {to} holds no query scales, and '{directory}' has some; add --without-q, or "
                "convert to vllm"
            )
        layers = {name: replace(layer, q=None) for name, layer in scales.layers.items()}
        scales = replace(scales, layers=layers)
    _write(scales, checkpoint, to, output, reduce=reduce, tp_size=tp_size)
    return scales


def strip(directory: Path, output: Path, *, overwrite: bool = False) -> None:
    """Write the checkpoint `directory` to `output` without scales and without their config.

    Raises:
        InputError: it is no checkpoint, or the output is in the way.
    """
    checkpoint = open_checkpoint(directory)
    check_output(output, directory, overwrite=overwrite)
    plain = without_scales(checkpoint)
    with atomic_directory(output) as scratch:
        made = Export(config=plain.config)
        write_checkpoint(made, plain, scratch, weights="link", readme="")
        _remove_documents(scratch, keep=())


def repair(
    directory: Path, statistics: Path, to: FormatName, output: Path, *, overwrite: bool = False
) -> Repaired:
    """Write the checkpoint with what is missing or of no use replaced by absmax / 448.

    Raises:
        InputError: the statistics are of another model, or lack a layer that needs one.
    """
    checkpoint = open_checkpoint(directory)
    check_output(output, directory, overwrite=overwrite)
    found, amax = existing_layers(directory), read_amax(statistics)
    if {layer for layer, _ in amax} != {layer.layer for layer in found.values()}:
        raise InputError(
            f"'{statistics}' is of another model: it has {len({n for n, _ in amax})} layers, "
            f"'{directory}' has {len(found)}"
        )
    heads = max(len(v) for each in found.values() for v in (each.k, each.v) if v)
    repaired: dict[str, LayerScales] = {}
    replaced: list[str] = []
    for module, layer in found.items():
        for letter in "kv":
            if not is_usable(getattr(layer, letter)):
                replaced.append(f"{module} {letter}")
                setattr(layer, letter, _from_amax(amax, layer, letter, per_head=heads > 1))
        repaired[module] = as_scales(layer, q=layer.q if is_usable(layer.q) else None)
    _write(collect(repaired, checkpoint), checkpoint, to, output, reduce="none", tp_size=1)
    return Repaired(output, replaced)


def _from_amax(
    amax: Amax, layer: LayerScalesFound, letter: str, *, per_head: bool
) -> tuple[float, ...]:
    measured = amax[layer.layer, letter]
    return tuple(a / _FP8_MAX for a in (measured if per_head else (max(measured),)))


def _write(
    scales: KVScales,
    checkpoint: Checkpoint,
    to: FormatName,
    output: Path,
    *,
    reduce: Reduce,
    tp_size: int,
) -> None:
    plain = without_scales(checkpoint)
    made = export(scales, plain, to, reduce=reduce, tp_size=tp_size)
    with atomic_directory(output) as scratch:
        if FORMATS[to].with_weights:
            write_checkpoint(made, plain, scratch, weights="link", readme="")
            _remove_documents(scratch, keep=made.documents)
        else:
            write_documents(made, scratch)


def _remove_documents(scratch: Path, keep: Mapping[str, object] | tuple[()]) -> None:
    for name in _DOCUMENTS:
        if name not in keep:
            (scratch / name).unlink(missing_ok=True)
