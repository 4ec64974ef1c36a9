"""`fp8kv merge`: the statistics of separate runs of one model, as if one run had read it all."""

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from calib.errors import InputError
from calib.files.atomic import claimed
from calib.files.calibration import read_report
from calib.files.fingerprint import fingerprints
from calib.files.names import CALIBRATION_FILE
from calib.formats.directory import check_output
from calib.formats.output import CalibratedModel, CalibrationRecord, Destination, Result, write_output
from calib.models.sources import find_model
from calib.progress import SILENT, Progress
from calib.recipe import Recipe, load_recipe
from calib.same_model.check import ModelFacts, check_same_model, scales_facts
from calib.scales.stats import KVStats, derive_scales
from calib.scales.stats_file import load_stats
from calib.scales.summary import warnings_for


class _Run(NamedTuple):
    """A finished calibration."""

    path: Path
    report: dict[str, Any]
    recipe: Recipe

    @property
    def threads(self) -> int | None:
        """The number of threads on a CPU; older runs do not say it."""
        threads = self.report.get("threads")
        return threads if isinstance(threads, int) else None


def merge(
    directories: Sequence[Path],
    output: Path,
    *,
    model: str | None = None,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> Result:
    """Merge two or more outputs of `fp8kv calibrate` as the first one's recipe says.

    `model` is where the model is now, by default where the first calibration had it. InputError if models,
    revisions or capture settings differ, or if two have read the same data.
    """
    if len(directories) < 2:
        raise InputError("merge takes two or more calibrations; give their directories")
    progress.stage("load")
    runs = [_read_run(path) for path in directories]
    for pair in combinations(runs, 2):
        _check_pair(*pair)
    name = model or runs[0].report["model"]
    checkpoint = find_model(name)
    source = ModelFacts(name, fingerprints=fingerprints(checkpoint))
    check_same_model(scales_facts(directories[0]), source, "give the model of these runs with --model")
    for path in directories:
        check_output(output, path, overwrite=overwrite, kind="calibration")
    check_output(output, checkpoint.path, overwrite=overwrite)
    counts = {run.threads for run in runs}
    with claimed(output, overwrite=overwrite) as claim:
        stats = [load_stats(path) for path in directories]
        _check_counts(directories, stats)
        data_warnings = [line for run in zip(runs, stats, strict=True) for line in _data_warnings(*run)]
        progress.stage("write")
        destination = Destination(output, overwrite=overwrite, on_copied=progress.copied, claim=claim)
        dataset = _merge_datasets([run.report["dataset"] for run in runs])
        threads = counts.pop() if len(counts) == 1 else None
        warnings = [*dict.fromkeys(data_warnings), *_thread_warnings(runs)]
        record = CalibrationRecord(reduce(KVStats.join, stats), dataset, warnings, threads=threads)
        return write_output(CalibratedModel(name, checkpoint, runs[0].recipe), record, destination)


def _read_run(path: Path) -> _Run:
    report = read_report(path)
    if "measured_on" in report:
        problem = f"the scales in '{path}' were applied, and not measured there"
        raise InputError(f"{problem}; merge calibrations, and apply what comes of it")
    return _Run(path, report, load_recipe(str(path / CALIBRATION_FILE)))


def _check_pair(one: _Run, two: _Run) -> None:
    """Refuse runs of two models, of other settings, or over the same data."""
    both = f"'{one.path}' and '{two.path}'"
    check_same_model(scales_facts(one.path), scales_facts(two.path), "merge only runs of one model")
    settings = zip(_capture_settings(one.recipe).items(), _capture_settings(two.recipe).values(), strict=True)
    for (name, value), second_value in settings:
        if value != second_value:
            problem = f"{both} were captured with different {name} ({value}, {second_value})"
            raise InputError(f"{problem}; calibrate both with the same")
    if {*_data_parts(one.report["dataset"])} & {*_data_parts(two.report["dataset"])}:
        raise InputError(f"{both} have read the same data; merging them adds nothing")


def _capture_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that decide which numbers are collected; others are about what is made of them."""
    return {
        "dtype": recipe.dtype,
        "targets": recipe.targets,
        "data.skip_first": recipe.data.skip_first,
        "means": recipe.collects_means,
        "histograms": recipe.observer.needs_histogram,
    }


def _check_counts(directories: Sequence[Path], runs_stats: Sequence[KVStats]) -> None:
    """Refuse runs in which one module counted another share of the tokens than in the first."""
    shares = {name: Fraction(x.tokens, runs_stats[0].tokens) for name, x in runs_stats[0].layers.items()}
    for path, stats in zip(directories, runs_stats, strict=True):
        for name, layer in stats.layers.items():
            if shares.get(name) not in (None, Fraction(layer.tokens, stats.tokens)):
                raise InputError(
                    f"in '{path}' {name} counted {layer.tokens:,} of {stats.tokens:,} tokens, another "
                    f"share than in '{directories[0]}'; calibrate again"
                )


def _data_warnings(run: _Run, stats: KVStats) -> list[str]:
    """Return warnings that are not of a run's scales: the merged scales have their own."""
    own = warnings_for(stats, derive_scales(stats, run.recipe), run.recipe)
    return [line for line in run.report["warnings"] if line not in own]


def _thread_warnings(runs: Sequence[_Run]) -> list[str]:
    paths = [*{run.threads: run.path for run in runs if run.threads is not None}.items()]
    return [
        f"'{paths[0][1]}' was measured with {paths[0][0]} threads and '{path}' with {count}; on a CPU, "
        "one run over all the data may give other last bits"
        for count, path in paths[1:]
    ]


def _data_parts(dataset: dict[str, Any]) -> list[str]:
    """Return the fingerprints of the data that were merged into `dataset`, or its own."""
    return dataset.get("parts") or [dataset["fingerprint"]]


def _merge_datasets(datasets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = ("documents", "samples", "tokens", "unread_tokens")  # older runs do not say all
    counts = {x: sum(data[x] for data in datasets) for x in names if all(x in data for data in datasets)}
    parts = sorted(part for dataset in datasets for part in _data_parts(dataset))
    source = " + ".join(dict.fromkeys(dataset["source"] for dataset in datasets))
    fingerprint = hashlib.sha256("".join(parts).encode()).hexdigest()
    return {"source": source, "fingerprint": fingerprint, "parts": parts, **counts}
