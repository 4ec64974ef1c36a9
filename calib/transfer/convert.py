"""`fp8kv convert`: a checkpoint written again with its scales in the format of another engine."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from calib.capture.directory_scales import to_scales
from calib.choices import FormatName, Reduce
from calib.engines.tokens_that_fit import window_doubts
from calib.errors import InputError, UnsupportedExportError
from calib.files.cache_type import FP8_DIVISOR, Convention, nvfp4_convention, parse_release
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.names import MODELOPT_FILE, STATS_FILE
from calib.files.skipped_layers import SKIP_KEY, check_layers, skipped_layers
from calib.files.stored_scales import StoredScales, read_scales
from calib.files.text import show_layers
from calib.formats import DRAFT_LEFT_OUT, FORMATS, Export, Format, export
from calib.formats.base import Command, refusals_of
from calib.formats.card import format_card, written_strategy
from calib.formats.directory import check_output
from calib.formats.output import Destination, write_exports
from calib.models.config import read_config
from calib.progress import SILENT, Progress
from calib.same_model.check import check_same_model, model_facts, scales_facts, weight_warnings
from calib.scales.scales import KVScales
from calib.scales.stats import derive_scales
from calib.scales.stats_file import has_calibration, load_records, open_calibration
from calib.scales.text_summary import Records, save_records
from calib.transfer.strip import remove_documents, strip_config

# before, its exporter clamped scales below 1.0
_MODELOPT_UNCLAMPED = Version("0.43")


@dataclass(frozen=True)
class Conversion:
    """The scales that were written, and warnings about what the engine does with them."""

    scales: KVScales
    warnings: tuple[str, ...]


def convert(
    directory: Path,
    to: FormatName,
    output: Path,
    *,
    reduce: Reduce = "none",
    without_q: bool = False,
    tp_size: int = 1,
    skip_layers: Sequence[int | str] | None = None,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> Conversion:
    """Write the checkpoint `directory` to `output` with its scales in the format `to`.

    The config leaves `skip_layers` in 16 bits; by default those that it left there before.
    """
    checkpoint = open_model_directory(directory)
    check_output(output, directory, overwrite=overwrite)
    scales, notes = existing_scales(checkpoint, to)
    if has_calibration(directory):
        try:
            open_calibration(directory)  # refuses scales that were changed since
        except InputError as error:
            way = f"to convert the scales as they are, delete {STATS_FILE} there"
            raise InputError(f"{error}; {way}") from None
        notes += tuple(weight_warnings([directory], checkpoint))
    if without_q:
        scales = replace(scales, layers={name: replace(x, q=None) for name, x in scales.layers.items()})
    elif scales.has_q and not FORMATS[to].reads_q:
        problem = f"--to {to} holds no query scales, and '{directory}' has some"
        raise UnsupportedExportError(f"{problem}; add --without-q, or convert to vllm")
    if skip_layers and not FORMATS[to].skip_flag:
        legal = ", ".join(name for name, target in FORMATS.items() if target.skip_flag)
        raise UnsupportedExportError(
            f"--skip-layers: all layers have one type of cache in {FORMATS[to].engine}; convert to {legal}"
        )
    skipped = None
    if skip_layers is not None:
        skipped = check_layers(skip_layers, checkpoint.num_layers, "--skip-layers")
        if len(skipped) == checkpoint.num_layers:
            raise InputError("--skip-layers names every layer; serve the model without an FP8 cache instead")
    progress.stage("write")
    destination = Destination(output, overwrite=overwrite, on_copied=progress.copied)
    notes += write_scales(
        scales, checkpoint, to, load_records(directory), destination,
        command="convert", reduce=reduce, tp_size=tp_size, skipped=skipped,
    )  # fmt: skip
    return Conversion(scales, notes)


def existing_scales(checkpoint: ModelDirectory, to: FormatName) -> tuple[KVScales, tuple[str, ...]]:
    """Read the scales of a checkpoint for the format `to`, with notes on how they were read."""
    path, stored = checkpoint.path, read_scales(checkpoint.path)
    if convention := nvfp4_convention(stored.directory):
        return _read_values(stored, convention)
    if FORMATS[to].nvfp4:
        if has_calibration(path):
            return _derive_absmax(stored, checkpoint)
        _check_absmax(stored)
    return to_scales(stored, stored.layers_by_module(), stored.fp8_dtype), tuple(stored.problems)


def _read_values(stored: StoredScales, convention: Convention) -> tuple[KVScales, tuple[str, ...]]:
    """Return the values of an NVFP4 cache as absmax / 448."""
    if convention.divisor is None:
        raise InputError(
            f"'{stored.directory.path}': whether its values of an NVFP4 cache are absmax / 448 or "
            f"absmax / 2688 is {convention.evidence}; calibrate the model again"
        )
    scales = to_scales(stored, stored.layers_by_module(), "e4m3fn")
    factor = convention.divisor / FP8_DIVISOR
    layers = {name: replace(x, k=x.k * factor, v=x.v * factor) for name, x in scales.layers.items()}
    return replace(scales, layers=layers), (f"values were read as {convention}",)


def _derive_absmax(stored: StoredScales, checkpoint: ModelDirectory) -> tuple[KVScales, tuple[str, ...]]:
    """Return absmax / 448 by the statistics of a calibration, whose scales may clip on purpose."""
    calibration = open_calibration(checkpoint.path, needs_report=False)
    settings: dict[str, Any] = {"observer.name": "absmax", "strategy": stored.strategy}
    settings |= {"fp8_dtype": "e4m3fn", "center_keys": False}
    source = scales_facts(checkpoint.path, report=calibration.report)
    check_same_model(source, model_facts(checkpoint, calibration.stats.layers))
    scales = derive_scales(calibration.stats, calibration.recipe(settings))
    return scales, ("values were made from the absmax in the calibration's statistics",)


def _check_absmax(stored: StoredScales) -> None:
    """Refuse FP8 scales unless they are known to be absmax / 448, as those of a new ModelOpt."""
    producer = stored.directory.producer
    version = parse_release(producer.get("version")) if producer.get("name") == "modelopt" else None
    if version is None or version < _MODELOPT_UNCLAMPED:
        problem = f"'{stored.directory.path}': whether its FP8 scales are absmax / 448 is not known"
        advice = "calibrate the model again with that --format"
        raise InputError(f"{problem}, and values of an NVFP4 cache are made from absmax; {advice}")


def write_scales(
    scales: KVScales,
    checkpoint: ModelDirectory,
    to: FormatName,
    records: Records,
    destination: Destination,
    *,
    command: Command,
    reduce: Reduce = "none",
    tp_size: int = 1,
    skipped: tuple[int, ...] | None = None,
) -> tuple[str, ...]:
    """Write `checkpoint` with `scales` in the format `to`; return what the engine does with them.

    Layers that are `skipped`, by default those of `checkpoint`, have their scales there and 16 bits in vLLM.
    """
    if FORMATS[to].build is None:
        problem = f"--to {to} holds the statistics of a calibration, which cannot be derived from scales"
        raise UnsupportedExportError(f"{problem}; use fp8kv calibrate --format {to}")
    plain = replace(checkpoint, config=strip_config(checkpoint.config))
    with refusals_of(command):
        exported = export(scales, plain, to, reduce=reduce, tp_size=tp_size)
    if skipped := skipped_layers(checkpoint) if skipped is None else skipped:
        exported = _leave_out(exported, FORMATS[to], skipped, checkpoint)
    warnings = exported.notes + exported.doubts
    if checkpoint.draft_tensors:
        warnings += (DRAFT_LEFT_OUT,)
    strategy = written_strategy(scales.strategy, reduce)
    name = checkpoint.path.resolve().name
    card = format_card(name, to, destination.path, strategy, exported.flags, warnings)

    def add_files(directory: Path) -> None:
        if FORMATS[to].with_weights and MODELOPT_FILE not in exported.documents:
            remove_documents(plain, directory)
        save_records(records, directory)

    write_exports({to: exported}, plain, destination, {to: card}, add_files)
    return warnings


def _leave_out(
    exported: Export, target: Format, skipped: tuple[int, ...], checkpoint: ModelDirectory
) -> Export:
    """Name the layers that stay in 16 bits, for our plugin and as vLLM's argument; say where none can."""
    if target.rules and target.skip_flag and exported.config is not None:
        flags = f"{exported.flags} {target.rules.skip_argument(skipped)}"
        exported = replace(exported, config={**exported.config, SKIP_KEY: [*skipped]}, flags=flags)
        notes: tuple[str, ...] = ()
        with suppress(InputError):  # a model that needs code of its own
            config = read_config(checkpoint.path, checkpoint.config, trust_remote_code=False)
            notes = window_doubts(config.get_text_config(decoder=True), skipped)
    else:
        places = f"16 bits in vLLM, FP8 as all others in {target.engine}"
        notes = (f"{show_layers(skipped)} of the checkpoint: {places}",)
    return replace(exported, notes=exported.notes + notes)
