"""`fp8kv convert`, `strip` and `repair`: a checkpoint written again with other scales, or none."""

from dataclasses import dataclass, replace
from pathlib import Path

from calib.atomic import atomic_directory
from calib.checkpoint import Checkpoint, open_checkpoint
from calib.choices import FormatName, FP8Name, Reduce, Strategy
from calib.errors import InputError, UnsupportedExportError
from calib.export import FORMATS, Export, export
from calib.files.directory import open_scales
from calib.files.fp8_type import fp8_type
from calib.files.layers import LayerScalesFound
from calib.observers import AbsMax
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
from calib.stats import KVStats
from calib.stats_file import load_stats

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
    scales = existing_scales(directory)
    if scales.has_q and (without_q or not FORMATS[to].reads_q):
        if not without_q:
            raise UnsupportedExportError(
                f"--to {to} holds no query scales, and '{directory}' has some; add --without-q, or "
                "convert to vllm"
            )
        layers = {name: replace(layer, q=None) for name, layer in scales.layers.items()}
        scales = replace(scales, layers=layers)
    _write(scales, checkpoint, to, output, overwrite, reduce=reduce, tp_size=tp_size)
    return scales


def strip(directory: Path, output: Path, *, overwrite: bool = False) -> None:
    """Write the checkpoint `directory` to `output` without scales and without their config.

    Raises:
        InputError: it is no checkpoint, or the output is in the way.
    """
    checkpoint = open_checkpoint(directory)
    check_output(output, directory, overwrite=overwrite)
    plain = without_scales(checkpoint)
    _place(Export(config=plain.config), plain, output, overwrite)


def repair(
    directory: Path, statistics: Path, to: FormatName, output: Path, *, overwrite: bool = False
) -> Repaired:
    """Write the checkpoint with what is missing or of no use derived from measured absmax.

    Raises:
        InputError: the statistics are of another model.
        CalibrationError: they hold only zeros, or NaN/Inf, for a layer that needs them.
    """
    checkpoint = open_checkpoint(directory)
    check_output(output, directory, overwrite=overwrite)
    opened, stats = open_scales(directory), load_stats(statistics)
    found = existing_layers(opened)
    derived = _derive(found, stats, directory, statistics, fp8_type(opened))
    replaced: list[str] = []
    repaired: dict[str, LayerScales] = {}
    for module, layer in found.items():
        for letter in "kv":
            if not is_usable(getattr(layer, letter)):
                replaced.append(f"{module} {letter}")
                setattr(layer, letter, tuple(getattr(derived.layers[module], letter).tolist()))
        repaired[module] = as_scales(layer, q=layer.q if is_usable(layer.q) else None)
    scales = collect(repaired, derived.fp8_dtype)
    _write(scales, checkpoint, to, output, overwrite, reduce="none", tp_size=1)
    return Repaired(output, replaced)


def _derive(
    found: dict[str, LayerScalesFound],
    stats: KVStats,
    directory: Path,
    statistics: Path,
    fp8_dtype: FP8Name,
) -> KVScales:
    """Scales of the modules that lack a usable one, in the granularity of the others."""
    measured = {layer.layer_idx: layer for layer in stats.layers.values()}
    measured |= {s.layer_idx: stats.layers[s.owner] for s in stats.shared.values()}
    sizes = {len(x) for layer in found.values() for x in (layer.k, layer.v) if x} - {1}
    heads = {layer.k.amax.shape[0] for layer in measured.values()}
    if measured.keys() != {layer.layer for layer in found.values()} or not sizes <= heads:
        raise InputError(
            f"'{statistics}' is of another model: it has {len(measured)} layers of "
            f"{_listed(heads)} KV heads, '{directory}' has {len(found)} layers with "
            f"{_listed(sizes or {1})} scales each"
        )
    broken = {
        module: measured[layer.layer]
        for module, layer in found.items()
        if not (is_usable(layer.k) and is_usable(layer.v))
    }
    strategy: Strategy = "attn_head" if sizes else "tensor"
    return KVStats(broken).scales(strategy=strategy, observer=AbsMax(), fp8_dtype=fp8_dtype)


def _listed(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def _write(
    scales: KVScales,
    checkpoint: Checkpoint,
    to: FormatName,
    output: Path,
    overwrite: bool,
    *,
    reduce: Reduce,
    tp_size: int,
) -> None:
    plain = without_scales(checkpoint)
    made = export(scales, plain, to, reduce=reduce, tp_size=tp_size)
    if not (made.tensors or made.documents):
        raise UnsupportedExportError(
            f"--to {to} holds the statistics of a calibration, which scales alone do not tell; "
            f"use fp8kv calibrate --format {to}"
        )
    _place(made, plain, output, overwrite, with_weights=FORMATS[to].with_weights)


def _place(
    made: Export, plain: Checkpoint, output: Path, overwrite: bool, *, with_weights: bool = True
) -> None:
    with atomic_directory(output, overwrite=overwrite) as scratch:
        if with_weights:
            write_checkpoint(made, plain, scratch, weights="link", readme="")
            for name in set(_DOCUMENTS) - set(made.documents):
                (scratch / name).unlink(missing_ok=True)
        else:
            write_documents(made, scratch)
        plain.check_unchanged()
