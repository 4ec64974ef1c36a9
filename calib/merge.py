"""`fp8kv merge`: the statistics of separate runs of one model, as if one run had read it all."""

import hashlib
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.model.checkpoint import fingerprint, read_json
from calib.model.find import find_checkpoint
from calib.output.checkpoint_directory import check_output
from calib.output.finish import Result, finish
from calib.output.writing import Destination
from calib.recipe import Recipe, load_recipe
from calib.scalefiles.calibrations import absent
from calib.scalefiles.file_names import CALIBRATION_FILE
from calib.scales.derive import recipe_observer
from calib.scales.stats import KVStats
from calib.scales.stats_file import load_stats


def merge(
    directories: Sequence[Path], output: Path, *, model: str | None = None, overwrite: bool = False
) -> Result:
    """Merge finished calibrations; scales are derived and written as the first one's recipe says.

    Args:
        directories: outputs of `fp8kv calibrate`, two or more.
        output: directory to write.
        model: where the model is now; default: where the first calibration found it.
        overwrite: replace an earlier output.

    Raises:
        InputError: one is no calibration, or they are of different models, revisions or capture
            settings, or of the same data.
        CalibrationError: the statistics give no scales.
    """
    if len(directories) < 2:
        raise InputError("merge takes two or more calibrations; give their directories")
    reports = [_report(directory) for directory in directories]
    recipes = [load_recipe(str(directory / CALIBRATION_FILE)) for directory in directories]
    for directory, report, recipe in zip(directories[1:], reports[1:], recipes[1:], strict=True):
        _check_same(directories[0], directory, (reports[0], report), (recipes[0], recipe))
    name = model or reports[0]["model"]
    checkpoint = find_checkpoint(name)
    if fingerprint(checkpoint) != reports[0]["checkpoint"]:
        raise InputError(
            f"'{name}' is not the model that '{directories[0]}' was calibrated on; give it with "
            "--model"
        )
    check_output(output, checkpoint.path, overwrite=overwrite)
    stats = reduce(KVStats.merge, map(load_stats, directories))
    dataset = _merged_data([report["dataset"] for report in reports])
    warnings = dict.fromkeys(line for report in reports for line in report["warnings"])
    return finish(
        name,
        checkpoint,
        recipes[0],
        stats,
        Destination(output, overwrite=overwrite),
        dataset,
        [*warnings, *_other_threads(directories, reports)],
        threads=_threads(reports)[0] if len({*_threads(reports)}) == 1 else None,
    )


def _threads(reports: Sequence[dict[str, Any]]) -> list[int | None]:
    counts = [report.get("threads") for report in reports]
    return [count if isinstance(count, int) else None for count in counts]  # old runs have none


def _other_threads(directories: Sequence[Path], reports: Sequence[dict[str, Any]]) -> list[str]:
    of = {n: path for path, n in zip(directories, _threads(reports), strict=True) if n is not None}
    first = next(iter(of), None)
    return [
        f"'{of[first]}' was measured with {first} threads and '{of[count]}' with {count}: on a CPU "
        "a model's last bits can depend on that, so these may differ from one run over all the data"
        for count in of
        if first is not None and count != first
    ]


def _report(directory: Path) -> dict[str, Any]:
    if not (directory / CALIBRATION_FILE).exists():
        raise absent(directory, f"'{directory}' has no {CALIBRATION_FILE}: it is no calibration")
    report = read_json(directory / CALIBRATION_FILE)
    if not {"model", "checkpoint", "dataset", "warnings"} <= report.keys():
        raise InputError(
            f"'{directory / CALIBRATION_FILE}' does not say what was calibrated; calibrate again"
        )
    return report


def _check_same(
    first: Path,
    other: Path,
    reports: tuple[dict[str, Any], dict[str, Any]],
    recipes: tuple[Recipe, Recipe],
) -> None:
    mine, theirs = reports
    if mine["checkpoint"] != theirs["checkpoint"]:
        raise InputError(
            f"'{first}' and '{other}' are of different models or revisions ({mine['model']}, "
            f"{theirs['model']}); merge only runs of one"
        )
    captured = [_capture(recipe) for recipe in recipes]
    for name, value in captured[0].items():
        if value != captured[1][name]:
            raise InputError(
                f"'{first}' and '{other}' were captured with different {name} ({value}, "
                f"{captured[1][name]}); calibrate both with the same"
            )
    if mine["dataset"]["fingerprint"] == theirs["dataset"]["fingerprint"]:
        raise InputError(
            f"'{first}' and '{other}' have read the same data; merging them adds nothing"
        )


def _capture(recipe: Recipe) -> dict[str, Any]:
    # what decides which numbers were collected; the rest is about what is made of them
    return {
        "dtype": recipe.dtype,
        "targets": recipe.targets,
        "means": recipe.collects_means,
        "histograms": recipe_observer(recipe).needs_histogram,
    }


def _merged_data(datasets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    prints = "".join(sorted(dataset["fingerprint"] for dataset in datasets))
    return {
        "source": " + ".join(dict.fromkeys(dataset["source"] for dataset in datasets)),
        "fingerprint": hashlib.sha256(prints.encode()).hexdigest(),
        "samples": sum(dataset["samples"] for dataset in datasets),
        "tokens": sum(dataset["tokens"] for dataset in datasets),
    }
