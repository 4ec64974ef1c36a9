"""`fp8kv repair`: scales that are missing, or that measured absmax contradicts, are made of it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from calib.capture.directory_scales import to_scales
from calib.choices import FormatName, FP8Name
from calib.engines.catalogue import choose_engines
from calib.engines.scale_fit import Limits, MeasuredAmax, Scale, describe_unbounded, judge, measured_amax
from calib.engines.verification import verify_directory
from calib.errors import Fp8kvError, InputError, NoScalesError, UnsupportedExportError
from calib.files.cache_type import FP8_MAX, FP8_SMALLEST
from calib.files.config import head_counts, layer_config
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.names import SCALES_SHARD, WATCH_FILE
from calib.files.stored_scales import StoredLayer, StoredScales, Values, is_usable, read_scales
from calib.files.text import show_layers
from calib.formats import FORMATS
from calib.formats.directory import check_output
from calib.formats.output import Destination
from calib.progress import SILENT, Progress
from calib.same_model.check import LayerFacts, check_same_model, model_facts, scales_facts
from calib.scales.observers import AbsMax
from calib.scales.stats import KVStats, LayerStats
from calib.scales.stats_file import (
    Calibration,
    changed_scales,
    has_calibration,
    load_records,
    load_stats,
    open_calibration,
)
from calib.transfer.convert import Conversion, write_scales
from calib.transfer.estimates import settle_estimates
from calib.transfer.traffic import check_traffic

# weights with a row per channel
_UNPACKED = ("F32", "F16", "BF16", "F8_E4M3")


@dataclass(frozen=True)
class Replacement:
    """A scale, or those of a layer's heads, before and after."""

    module: str
    letter: str
    old: Values
    new: Values

    def __str__(self) -> str:
        digits = 4 if _show(self.old) != _show(self.new) else 9  # which tell all float32 apart
        return f"{self.module} {self.letter}: {_show(self.old, digits)}, now {_show(self.new, digits)}"


@dataclass(frozen=True)
class Repair(Conversion):
    """The scales that were written, which were replaced, and what `verify --against` says against them."""

    replacements: list[Replacement]
    problems: list[str]
    name_changes: list[str]  # a line for each scale that was called as no module of the model


def repair(
    directory: Path,
    statistics: Path,
    to: FormatName,
    output: Path,
    *,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> Repair:
    """Write the checkpoint with scales of measured absmax where its own do not fit that."""
    if FORMATS[to].nvfp4:
        problem = f"--to {to}: repair mends FP8 scales, which need not be absmax / 448"
        raise UnsupportedExportError(f"{problem}; calibrate the model again with --format {to}")
    checkpoint = open_model_directory(directory, needs_scales=False)
    check_output(output, directory, overwrite=overwrite)
    measurement = open_calibration(statistics, needs_report=False)
    calibration, substitutions = settle_estimates(measurement, directory)
    try:
        stored = read_scales(directory)
    except NoScalesError:  # all are missing
        stored = StoredScales(checkpoint, [])
    checkpoint, misnamed = _remove_misnamed(checkpoint)
    stored, name_changes = _remove_strays(stored, checkpoint)
    stats = _join_calibration(calibration, directory)
    layers = stored.layers_by_module()
    layer_stats = {layer.layer_idx: layer for layer in stats.layers.values()}
    layer_stats |= {module.layer_idx: stats.layers[module.owner] for module in stats.shared.values()}
    doubts = _check_model(measurement, checkpoint, stored, layer_stats)
    replacements = _replace_wrong(stored, layers, measured_amax(calibration, [*layers.values()]), layer_stats)
    scales = to_scales(replace(stored, layers=[*layers.values()]), layers, stored.fp8_dtype)
    is_all_new = len(replacements) == sum(bool(layer.values(x)) for layer in layers.values() for x in "kvq")
    records = (*(() if is_all_new else load_records(directory)), *stats.records)
    progress.stage("write")
    destination = Destination(output, overwrite=overwrite, on_copied=progress.copied)
    notes = (
        *doubts,
        *substitutions,
        *write_scales(scales, checkpoint, to, records, destination, command="repair"),
    )
    layers_with_q = [layer.layer for layer in layers.values() if layer.q]
    if lost := [layer.layer for layer in stored.layers if layer.q and layer.layer not in layers_with_q]:
        notes += (f"query scales of no use are left out in {show_layers(lost)}",)
    verification = verify_directory(output, choose_engines(None, None), calibration)
    notes += tuple(verification.warnings)
    if not (verification.problems or verification.is_good):
        notes += ("fp8kv verify knows of no engine that loads all of these scales",)
    return Repair(scales, notes, replacements, verification.problems, [*misnamed, *name_changes])


def _join_calibration(traffic: Calibration, directory: Path) -> KVStats:
    """Return the statistics of `traffic` with the larger values of the calibration in `directory`, if any.

    New scales have to hold both: a head that an engine's traffic asks little of may be asked more again.
    Other statistics than an engine's stay as they are.
    """
    stats = traffic.stats
    # also a copy of an engine's statistics, without its counts
    is_of_engine = any(layer.k.least is not None for layer in stats.layers.values())
    if not (is_of_engine or (traffic.directory / WATCH_FILE).is_file()):
        return stats
    try:
        own = {layer.layer_idx: layer for layer in load_stats(directory).layers.values()}
    except (Fp8kvError, OSError):  # without, or damaged
        return stats
    layers = {}
    for name, layer in stats.layers.items():
        pairs = {x: (getattr(layer, x), getattr(own.get(layer.layer_idx, layer), x)) for x in "kv"}
        parts = {
            letter: replace(part, amax=torch.maximum(part.amax, calibrated.amax))
            for letter, (part, calibrated) in pairs.items()
            if part.amax.shape == calibrated.amax.shape
        }
        layers[name] = replace(layer, **parts)
    return replace(stats, layers=layers)


def _remove_misnamed(checkpoint: ModelDirectory) -> tuple[ModelDirectory, list[str]]:
    """Leave out tensors of our own file of scales that have no name of one; return a line for each."""
    tensors = checkpoint.headers.get(SCALES_SHARD, {})
    strays = [name for name in checkpoint.misnamed if name in tensors and "scale" in name.lower()]
    headers = {
        file: {name: entry for name, entry in entries.items() if file != SCALES_SHARD or name not in strays}
        for file, entries in checkpoint.headers.items()
    }
    lines = [f"removed: '{name}' is not a name that an engine looks for" for name in strays]
    return replace(checkpoint, headers=headers), lines


def _remove_strays(stored: StoredScales, checkpoint: ModelDirectory) -> tuple[StoredScales, list[str]]:
    """Leave out scales of layers that the model lacks; return a line for these, and for other modules'."""
    modules, lines, layers = stored.modules(), list[str](), list[StoredLayer]()
    for layer in stored.layers:
        is_stray = bool(checkpoint.layers) and layer.layer not in checkpoint.layers
        for tensor in layer.tensors:
            own, module = tensor.parsed.module.removesuffix(".attn"), modules.get(layer.layer)
            if is_stray:
                lines.append(f"removed: '{tensor.name}' is of no layer of the model")
            elif own != (module or own):
                lines.append(f"renamed: '{tensor.name}' is now a scale of {module}")
        layers += [] if is_stray else [layer]
    return replace(stored, layers=layers), lines


def _check_model(
    calibration: Calibration,
    checkpoint: ModelDirectory,
    stored: StoredScales,
    layer_stats: dict[int, LayerStats],
) -> list[str]:
    """Refuse statistics of another model; return a warning where that cannot be told."""
    report = calibration.report
    shapes = {
        index: {"K heads": {len(layer.k.amax)}, "K channels": {layer.k.amax.numel()}}
        for index, layer in layer_stats.items()
    }
    model = model_facts(checkpoint, calibration.stats.layers)
    advice = "give statistics of this model"
    if checkpoint.misnamed:
        advice += f", or rename the misspelt scale '{checkpoint.misnamed[0]}'"
    check_same_model(
        replace(scales_facts(calibration.path, report=report), layers=shapes),
        replace(model, layers=_shapes(stored.layers_by_module(), layer_stats, checkpoint)),
        advice,
    )
    return [] if report.get("marks") else check_traffic(calibration, model, stored)


def _shapes(
    layers: dict[str, StoredLayer], layer_stats: dict[int, LayerStats], checkpoint: ModelDirectory
) -> dict[int, LayerFacts]:
    """Collect the heads that scales or the config allow, and the channels of the weights for K.

    Scales for other heads are wrong where the config names those that were measured.
    """
    counts = {len(values) for layer in layers.values() for values in (layer.k, layer.v) if values} - {1}
    are_doubtful = bool(counts) and counts.isdisjoint(len(layer.k.amax) for layer in layer_stats.values())
    shapes = dict[int, LayerFacts]()
    for module, layer in layers.items():
        facts, weight = dict[str, set[object]](), checkpoint.entries.get(f"{module}.k_proj.weight")
        if are_doubtful:
            heads = head_counts(layer_config(checkpoint.text_config, layer.layer), "k")
            facts["K heads"] = {*counts, *heads}
        if weight and weight.dtype in _UNPACKED:
            facts["K channels"] = {weight.shape[0]}
        shapes[layer.layer] = facts
    return shapes


def _replace_wrong(
    stored: StoredScales, layers: dict[str, StoredLayer], measured: MeasuredAmax, stats: dict[int, LayerStats]
) -> list[Replacement]:
    """Put scales of measured absmax into `layers` where theirs do not fit that, or their own statistics."""
    if measured.unbounded:
        raise InputError(f"cannot repair: {describe_unbounded(measured.unbounded)}")
    per_head, replacements = _letters_per_head(stored, [*layers.values()], measured), list[Replacement]()
    wrong = _find_wrong([*layers.values()], measured, per_head, stored.fp8_dtype)
    with suppress(InputError):  # without a recipe, what it makes of its statistics is not known
        if has_calibration(path := stored.directory.path):
            wrong |= {*changed_scales(open_calibration(path, needs_report=False))}
    before = {layer.layer: layer for layer in stored.layers}
    for module, layer in layers.items():
        letters = "".join(letter for letter in "kvq" if (layer.layer, letter) in wrong)
        # a latent and k_pe have one scale
        for letter in "kv" if letters and stats[layer.layer].latent else letters:
            scales = KVStats({module: stats[layer.layer]}).scales(
                strategy="attn_head" if letter in per_head else "tensor",
                observer=AbsMax(),
                fp8_dtype=stored.fp8_dtype,
                targets="qkv" if letter == "q" else "kv",
            )
            new = tuple(getattr(scales.layers[module], letter).tolist())
            old = before.get(layer.layer, layer).values(letter)
            replacements.append(Replacement(module, letter, old, new))
            setattr(layer, letter, new)
    return replacements


def _letters_per_head(stored: StoredScales, layers: Sequence[StoredLayer], measured: MeasuredAmax) -> str:
    """Return the letters with a scale per head in most layers; where scales are missing, by the config."""
    if not stored.layers:
        scheme = (stored.directory.quantization or {}).get("kv_cache_scheme")
        return "kv" if isinstance(scheme, dict) and scheme.get("strategy") == "attn_head" else ""

    def is_usual(letters: str) -> bool:
        counts = [
            len(values) > 1
            for layer in layers
            for letter in letters
            if (values := layer.values(letter)) and len(measured.amax.get((layer.layer, letter), ())) > 1
        ]
        return 2 * sum(counts) > len(counts)

    if not is_usual("kv"):
        return ""
    return "kvq" if is_usual("q") else "kv"


def _find_wrong(
    layers: Sequence[StoredLayer], measured: MeasuredAmax, per_head: str, fp8_dtype: FP8Name
) -> set[Scale]:
    """Find scales that are missing, not usable, all 1.0, of another shape, or contradicted."""
    letters = "kvq" if any(layer.q for layer in layers) else "kv"
    scales = {(layer.layer, letter): layer.values(letter) for layer in layers for letter in letters}
    scales = {place: values for place, values in scales.items() if place in measured.amax}
    wrong = set[Scale]()
    for (layer, letter), values in scales.items():
        count = len(measured.amax[layer, letter]) if letter in per_head else 1
        if len(values) != count or not is_usable(values):
            wrong.add((layer, letter))
    for letter in letters:
        if len(layers) > 1 and {value for layer in layers for value in layer.values(letter)} == {1.0}:
            wrong |= {place for place in scales if place[1] == letter}
    right = {layer.layer: StoredLayer(layer.layer) for layer in layers}
    for layer, letter in scales.keys() - wrong:
        setattr(right[layer], letter, scales[layer, letter])
    usable, limits = [*right.values()], Limits(FP8_MAX[fp8_dtype], FP8_SMALLEST[fp8_dtype])
    for finding in judge(usable, measured, limits)[1]:
        wrong |= finding.scales
    return wrong & scales.keys()


def _show(values: Values, digits: int = 4) -> str:
    if not values:
        return "missing"
    shown = ", ".join(f"{value:.{digits}g}" for value in values[:8])
    shown += f" and {len(values) - 8} more" if len(values) > 8 else ""
    return shown if len(values) == 1 else f"[{shown}]"
