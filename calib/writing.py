"""What a calibration writes: each format's directory, statistics and the report, atomically."""

from pathlib import Path
from typing import Any

from calib.checkpoint import Checkpoint
from calib.choices import FormatName
from calib.export import FORMATS, Export, export
from calib.output import (
    CALIBRATION_FILE,
    atomic_directory,
    write_checkpoint,
    write_documents,
    write_json,
)
from calib.recipe import Recipe
from calib.report import output_card
from calib.scales import KVScales
from calib.stats import KVStats
from calib.stats_file import STATS_FILE, save_stats


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


def write_output(
    output: Path,
    exports: dict[FormatName, Export],
    checkpoint: Checkpoint,
    recipe: Recipe,
    stats: KVStats,
    report: dict[str, Any],
) -> dict[FormatName, Path]:
    """Fill `output` with every export, all of it or nothing; returns each format's directory.

    Raises:
        InputError: it cannot be written.
    """
    several = len(exports) > 1
    with atomic_directory(output) as scratch:
        for name, made in exports.items():
            directory = scratch / name if several else scratch
            directory.mkdir(exist_ok=True)
            card = output_card(report, name, output / name if several else output)
            if FORMATS[name].with_weights:
                write_checkpoint(
                    made, checkpoint, directory, weights=recipe.export.weights, readme=card
                )
            else:
                write_documents(made, directory)
                (directory / "README.md").write_text(card)
            save_stats(stats, directory / STATS_FILE)
            write_json(directory / CALIBRATION_FILE, report)
    return {name: output / name if several else output for name in exports}
