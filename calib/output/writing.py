"""What a calibration writes: each format's directory, statistics and the report, atomically."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.atomic import Claim, atomic_directory
from calib.choices import FormatName
from calib.export import FORMATS, Export, export
from calib.model.checkpoint import Checkpoint
from calib.output.card import output_card
from calib.output.checkpoint_directory import write_checkpoint, write_documents, write_json
from calib.output.in_place import back_up, complete
from calib.output.placing import OnCopied
from calib.recipe import Recipe
from calib.scalefiles.file_names import CALIBRATION_FILE, STATS_FILE
from calib.scales.scales import KVScales
from calib.scales.stats import KVStats
from calib.scales.stats_file import save_stats


def make_exports(
    scales: KVScales, checkpoint: Checkpoint, recipe: Recipe
) -> dict[FormatName, Export]:
    """What each of the recipe's formats adds to the checkpoint, by format.

    Raises:
        UnsupportedExportError: a format cannot hold the scales.
    """
    options = recipe.export
    return {
        name: export(scales, checkpoint, name, reduce=options.reduce, tp_size=options.tp_size)
        for name in options.formats
    }


@dataclass(frozen=True)
class Destination:
    """Where an output goes."""

    path: Path
    in_place: bool = False  # it is the model's own directory
    overwrite: bool = False  # an earlier output there goes
    on_copied: OnCopied = lambda name, copied, size: None
    claim: Claim | None = None  # where it was claimed when the run began


@dataclass(frozen=True)
class Written:
    """What was written where."""

    directories: dict[FormatName, Path]
    backup: Path | None  # of the files that were replaced in place


def write_output(
    destination: Destination,
    exports: dict[FormatName, Export],
    checkpoint: Checkpoint,
    recipe: Recipe,
    stats: KVStats,
    report: dict[str, Any],
) -> Written:
    """Fill the destination with every export, all of it or nothing.

    Raises:
        InputError: it cannot be written, or the weights have changed since they were opened.
    """
    output, backup = destination.path, None
    parts = dict.fromkeys(exports, "") if len(exports) == 1 else {name: name for name in exports}
    overwrite, claim = destination.overwrite, destination.claim
    with atomic_directory(output, overwrite=overwrite, claim=claim) as scratch:
        for name, made in exports.items():
            directory = scratch / parts[name]
            directory.mkdir(exist_ok=True)
            card = output_card(report, name, output / parts[name])
            _write_format(name, made, checkpoint, recipe, directory, card, destination)
            save_stats(stats, directory / STATS_FILE)
            write_json(directory / CALIBRATION_FILE, report)
        checkpoint.check_unchanged()
        if destination.in_place:
            complete(scratch, output)
            backup = back_up(output, scratch)
    return Written({name: output / part for name, part in parts.items()}, backup)


def _write_format(
    name: FormatName,
    made: Export,
    checkpoint: Checkpoint,
    recipe: Recipe,
    directory: Path,
    card: str,
    destination: Destination,
) -> None:
    if FORMATS[name].with_weights:
        write_checkpoint(
            made,
            checkpoint,
            directory,
            weights="keep" if destination.in_place else recipe.export.weights,
            readme=card,
            on_copied=destination.on_copied,
        )
    else:
        write_documents(made, directory)
        (directory / "README.md").write_text(card)
