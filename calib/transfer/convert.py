"""`fp8kv convert` and `strip`: a checkpoint written again with other scales, or none."""

from dataclasses import dataclass, replace
from pathlib import Path

from calib import __version__
from calib.capture.directory_scales import to_scales
from calib.choices import FormatName, Reduce
from calib.errors import UnsupportedExportError
from calib.files.atomic import atomic_directory
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.stored_scales import read_scales
from calib.formats import FORMATS, export
from calib.formats.card import format_card, strategy_held
from calib.formats.directory import check_output, write_checkpoint, write_documents
from calib.formats.refusals import Command, refusals_of
from calib.progress import SILENT, Progress
from calib.scales.scales import KVScales
from calib.scales.stats_file import load_records
from calib.scales.text_records import Records, save_records
from calib.transfer.absmax import Read, for_nvfp4, from_nvfp4
from calib.transfer.plain import config_without_scales, remove_documents, write_plain


@dataclass(frozen=True)
class Rewritten:
    """What was written."""

    scales: KVScales
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
    progress: Progress = SILENT,
) -> Rewritten:
    """Write the checkpoint `directory` to `output` with its scales in the format `to`."""
    checkpoint = open_model_directory(directory)
    check_output(output, directory, overwrite=overwrite)
    scales, notes = existing_scales(checkpoint, to)
    if scales.has_q and (without_q or not FORMATS[to].reads_q):
        if not without_q:
            raise UnsupportedExportError(
                f"--to {to} holds no query scales, and '{directory}' has some; add --without-q, or "
                "convert to vllm"
            )
        layers = {name: replace(layer, q=None) for name, layer in scales.layers.items()}
        scales = replace(scales, layers=layers)
    where = (output, overwrite, progress)
    read = load_records(directory)
    what = (scales, checkpoint, to, read, *where)
    notes += write_scales(*what, command="convert", reduce=reduce, tp_size=tp_size)
    return Rewritten(scales, notes)


def strip(directory: Path, output: Path, *, overwrite: bool = False, progress: Progress = SILENT) -> None:
    """Write `directory` to `output` without scales, with the source's files if it kept them."""
    checkpoint = open_model_directory(directory)
    check_output(output, directory, overwrite=overwrite)
    with atomic_directory(output, overwrite=overwrite) as scratch:
        progress.stage("write")
        write_plain(checkpoint, scratch, progress.copied)
        checkpoint.check_unchanged()


def existing_scales(checkpoint: ModelDirectory, to: FormatName) -> Read:
    """The scales of a checkpoint for the format `to`, and notes on how they were read.

    An InputError where K or V is missing or of no use.
    """
    found = read_scales(checkpoint.path)
    read = from_nvfp4(found)
    if read is None and FORMATS[to].nvfp4:
        read = for_nvfp4(found, checkpoint)
    return read or (to_scales(found, found.layers_by_module(), found.fp8_dtype), tuple(found.problems))


def write_scales(
    scales: KVScales,
    checkpoint: ModelDirectory,
    to: FormatName,
    read: Records,
    output: Path,
    overwrite: bool,
    progress: Progress,
    *,
    command: Command,
    reduce: Reduce = "none",
    tp_size: int = 1,
) -> tuple[str, ...]:
    """Write `checkpoint` with other scales in the format `to`; return what the engine does."""
    if FORMATS[to].build is None:
        raise UnsupportedExportError(
            f"--to {to} holds the statistics of a calibration, which cannot be derived from "
            f"scales; use fp8kv calibrate --format {to}"
        )
    plain = replace(checkpoint, config=config_without_scales(checkpoint.config))
    with refusals_of(command):
        made = export(scales, plain, to, reduce=reduce, tp_size=tp_size)
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
        save_records(read, scratch)
        plain.check_unchanged()
    return warnings
