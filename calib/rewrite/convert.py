"""`fp8kv convert`, `strip` and `repair`: a checkpoint written again with other scales, or none."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from calib import __version__
from calib.any_scales import to_scales
from calib.atomic import atomic_directory
from calib.choices import FormatName, FP8Name, Reduce
from calib.errors import InputError, UnsupportedExportError
from calib.export import FORMATS, export
from calib.model.checkpoint import Checkpoint, open_checkpoint
from calib.output.card import format_card, strategy_held
from calib.output.checkpoint_directory import check_output, write_checkpoint, write_documents
from calib.progress import NOBODY, Progress
from calib.rewrite.absmax import Read, for_nvfp4, from_nvfp4
from calib.rewrite.plain import config_without_scales, remove_documents, write_plain
from calib.scalefiles.calibrations import read_amax, statistics_file
from calib.scalefiles.identity import check_same_model, identity
from calib.scalefiles.reading import FoundLayer, FoundScales, is_usable, read_scales
from calib.scales.observers import AbsMax
from calib.scales.scales import KVScales
from calib.scales.stats import KVStats, LayerStats
from calib.scales.stats_file import load_stats
from calib.verify.fit import contradictions

# weights with a row per channel
_UNPACKED = ("F32", "F16", "BF16", "F8_E4M3")


@dataclass(frozen=True)
class Rewritten:
    """What was written."""

    scales: KVScales
    replaced: list[str]  # such as "model.layers.3.self_attn k"
    warnings: tuple[str, ...]  # of what the engine does with them


def convert(
    directory: Path,
    to: FormatName,
    output: Path,
    *,
    reduce: Reduce = "none",
    without_q: bool = False,
    tp_size: int = 1,
    overwrite: bool = False,
    progress: Progress = NOBODY,
) -> Rewritten:
    """Write the checkpoint `directory` to `output` with its scales in the format `to`."""
    checkpoint = open_checkpoint(directory)
    check_output(output, directory, overwrite=overwrite)
    scales, notes = existing_scales(directory, to)
    if scales.has_q and (without_q or not FORMATS[to].reads_q):
        if not without_q:
            raise UnsupportedExportError(
                f"--to {to} holds no query scales, and '{directory}' has some; add --without-q, or "
                "convert to vllm"
            )
        layers = {name: replace(layer, q=None) for name, layer in scales.layers.items()}
        scales = replace(scales, layers=layers)
    where = (output, overwrite, progress)
    notes += _write(scales, checkpoint, to, *where, reduce=reduce, tp_size=tp_size)
    return Rewritten(scales, [], notes)


def strip(
    directory: Path, output: Path, *, overwrite: bool = False, progress: Progress = NOBODY
) -> None:
    """Write `directory` to `output` without scales, with the source's files if it kept them."""
    checkpoint = open_checkpoint(directory)
    check_output(output, directory, overwrite=overwrite)
    with atomic_directory(output, overwrite=overwrite) as scratch:
        progress.stage("write")
        write_plain(checkpoint, scratch, progress.copied)
        checkpoint.check_unchanged()


def repair(
    directory: Path,
    statistics: Path,
    to: FormatName,
    output: Path,
    *,
    overwrite: bool = False,
    progress: Progress = NOBODY,
) -> Rewritten:
    """Write the checkpoint with missing or useless scales derived from measured absmax."""
    if FORMATS[to].nvfp4:
        raise UnsupportedExportError(
            f"--to {to}: repair mends FP8 scales, which need not be absmax / 448; calibrate the "
            f"model again with --format {to}"
        )
    checkpoint = open_checkpoint(directory)
    check_output(output, directory, overwrite=overwrite)
    measured = statistics_file(statistics).parent
    check_same_model(statistics, identity(measured), directory, checkpoint.config)
    found = read_scales(directory)
    layers, stats = found.by_module(), load_stats(statistics)
    derived = _derive(found, layers, stats, statistics, checkpoint).layers
    replaced = []
    for module, layer in layers.items():
        for letter in "kv":
            if not is_usable(getattr(layer, letter)):
                replaced.append(f"{module} {letter}")
                setattr(layer, letter, tuple(getattr(derived[module], letter).tolist()))
    scales = to_scales(found, layers, found.fp8_dtype)
    kept = _contradictions(layers, statistics, found.fp8_dtype)
    where = (output, overwrite, progress)
    notes = _write(scales, checkpoint, to, *where, reduce=None, tp_size=1)
    return Rewritten(scales, replaced, notes + tuple(kept))


def existing_scales(directory: Path, to: FormatName) -> Read:
    """The scales of a checkpoint for the format `to`, and notes on how they were read.

    An InputError where K or V is missing or of no use.
    """
    found = read_scales(directory)
    read = from_nvfp4(found) or (for_nvfp4(found) if FORMATS[to].nvfp4 else None)
    return read or (to_scales(found, found.by_module(), found.fp8_dtype), ())


def _contradictions(
    layers: dict[str, FoundLayer], statistics: Path, fp8_dtype: FP8Name
) -> list[str]:
    """What the statistics say against scales that repair keeps."""
    try:
        amax = read_amax(statistics)
    except InputError as error:  # of a layer that needs no repair
        return [f"scales that were kept were not compared: {error}"]
    return contradictions([*layers.values()], amax, fp8_dtype)


def _derive(
    found: FoundScales,
    layers: dict[str, FoundLayer],
    stats: KVStats,
    shown: Path,
    source: Checkpoint,
) -> KVScales:
    """Scales of the modules that lack a usable one, in the granularity of the others."""
    measured = {layer.layer_idx: layer for layer in stats.layers.values()}
    measured |= {s.layer_idx: stats.layers[s.owner] for s in stats.shared.values()}
    _check_shapes(measured, layers, shown, source)
    broken = {
        module: measured[layer.layer]
        for module, layer in layers.items()
        if not (is_usable(layer.k) and is_usable(layer.v))
    }
    per_head = any(len(x) > 1 for layer in layers.values() for x in (layer.k, layer.v) if x)
    return KVStats(broken).scales(
        strategy="attn_head" if per_head else "tensor", observer=AbsMax(), fp8_dtype=found.fp8_dtype
    )


def _check_shapes(
    measured: dict[int, LayerStats], layers: dict[str, FoundLayer], shown: Path, source: Checkpoint
) -> None:
    """Refuse statistics whose layers, heads or channels are not those of the checkpoint."""
    sizes = {len(x) for layer in layers.values() for x in (layer.k, layer.v) if x} - {1}
    heads = {layer.k.amax.shape[0] for layer in measured.values()}
    if measured.keys() != {layer.layer for layer in layers.values()} or not sizes <= heads:
        raise InputError(
            f"'{shown}' is of another model: it has {len(measured)} layers of {_listed(heads)} KV "
            f"heads, '{source.path}' has {len(layers)} layers with {_listed(sizes or {1})} scales "
            "each"
        )
    for module, layer in layers.items():
        values, weight = measured[layer.layer].k.amax, source.entries.get(f"{module}.k_proj.weight")
        if weight and weight.dtype in _UNPACKED and weight.shape[0] != values.numel():
            raise InputError(
                f"'{shown}' is of another model: K of layer {layer.layer} has {values.numel()} "
                f"channels, and {weight.shape[0]} in '{source.path}'"
            )


def _listed(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def _write(
    scales: KVScales,
    checkpoint: Checkpoint,
    to: FormatName,
    output: Path,
    overwrite: bool,
    progress: Progress,
    *,
    reduce: Reduce | None,
    tp_size: int,
) -> tuple[str, ...]:
    plain = replace(checkpoint, config=config_without_scales(checkpoint.config))
    try:
        made = export(scales, plain, to, reduce=reduce, tp_size=tp_size, by="convert")
    except UnsupportedExportError as error:
        raise UnsupportedExportError(_for_convert(str(error))) from None
    if not (made.tensors or made.documents):
        raise UnsupportedExportError(
            f"--to {to} holds the statistics of a calibration, which cannot be derived from "
            f"scales; use fp8kv calibrate --format {to}"
        )
    about = f". Written by fp8kv {__version__} from the scales there."
    name = checkpoint.path.resolve().name
    strategy = strategy_held(scales.strategy, reduce)
    card = format_card(name, to, output, strategy, about, flags=made.flags)
    warnings = made.notes + made.doubts
    card += "".join(f"- {warning}\n" for warning in warnings)
    whole = FORMATS[to].with_weights
    with atomic_directory(output, overwrite=overwrite) as scratch:
        progress.stage("write")
        write_checkpoint(
            made, plain, scratch,
            weights="link" if whole else None, readme=card, on_copied=progress.copied,
        )  # fmt: skip
        if whole:
            remove_documents(plain, scratch)
            write_documents(made, scratch)
        plain.check_unchanged()
    return warnings


def _for_convert(refusal: str) -> str:
    """Its flag is --to, and it cannot write what only a calibration measures."""
    refusal = refusal.replace("calibrate --format", "calibrate --\0format")
    refusal = re.sub("(?:use )?--format fp8kv", "calibrate again with --\0format fp8kv", refusal)
    return refusal.replace("--format", "--to").replace("\0", "")
