"""`fp8kv merge`: the statistics of separate runs of one model, as if one run had read it all."""

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Any

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
from calib.scales.observers import make_observer
from calib.scales.stats import KVStats, derive_scales
from calib.scales.stats_file import load_stats
from calib.scales.summary import warnings_for


def merge(
    directories: Sequence[Path],
    output: Path,
    *,
    model: str | None = None,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> Result:
    """Merge two or more outputs of `fp8kv calibrate` as the first one's recipe says.

    `model` is where the model is now, by default where the first calibration found it. InputError
    if models, revisions or capture settings differ, or if two have read the same data.
    """
    if len(directories) < 2:
        raise InputError("merge takes two or more calibrations; give their directories")
    progress.stage("load")
    runs = [_Run(path) for path in directories]
    for pair in combinations(runs, 2):
        _check_same(*pair)
    reports = [run.report for run in runs]
    name = model or reports[0]["model"]
    checkpoint = find_model(name)
    source = ModelFacts(name, fingerprints=fingerprints(checkpoint))
    check_same_model(scales_facts(directories[0]), source, "give the model of these runs with --model")
    for path in directories:
        check_output(output, path, overwrite=overwrite, kind="calibration")
    check_output(output, checkpoint.path, overwrite=overwrite)
    counts = {run.threads for run in runs}
    threads = counts.pop() if len(counts) == 1 else None
    with claimed(output, overwrite=overwrite) as claim:
        parts = [load_stats(path) for path in directories]
        _check_counts(directories, parts)
        stats = reduce(KVStats.join, parts)
        dataset = _merged_data([report["dataset"] for report in reports])
        warnings = dict.fromkeys(line for run in runs for line in run.warnings())
        progress.stage("write")
        destination = Destination(output, False, overwrite, progress.copied, claim)
        record = CalibrationRecord(stats, dataset, [*warnings, *_other_threads(runs)], threads=threads)
        return write_output(CalibratedModel(name, checkpoint, runs[0].recipe), record, destination)


class _Run:
    """A finished calibration, as it says of itself."""

    def __init__(self, path: Path) -> None:
        self.path, self.report = path, read_report(path)
        if "measured_on" in self.report:
            raise InputError(
                f"the scales in '{path}' were applied, and not measured there; merge calibrations, "
                "and apply what comes of it"
            )
        self.recipe = load_recipe(str(path / CALIBRATION_FILE))
        threads = self.report.get("threads")  # old runs have none
        self.threads = threads if isinstance(threads, int) else None

    def warnings(self) -> list[str]:
        """Those that are not of its scales: of these the merged ones have their own."""
        stats = load_stats(self.path)
        own = warnings_for(stats, derive_scales(stats, self.recipe), self.recipe)
        return [line for line in self.report["warnings"] if line not in own]


def _other_threads(runs: Sequence[_Run]) -> list[str]:
    paths = {run.threads: run.path for run in runs if run.threads is not None}
    first = next(iter(paths), None)
    return [
        f"'{paths[first]}' was measured with {first} threads and '{path}' with {count}: on a CPU "
        "a model's last bits can depend on that, so these may differ from one run over all the data"
        for count, path in paths.items()
        if first is not None and count != first
    ]


def _check_same(first: _Run, other: _Run) -> None:
    both, mine, theirs = f"'{first.path}' and '{other.path}'", first.report, other.report
    check_same_model(scales_facts(first.path), scales_facts(other.path), "merge only runs of one model")
    wanted = _capture(other.recipe)
    for name, value in _capture(first.recipe).items():
        if value != wanted[name]:
            raise InputError(
                f"{both} were captured with different {name} ({value}, {wanted[name]}); calibrate "
                "both with the same"
            )
    if {*_parts(mine["dataset"])} & {*_parts(theirs["dataset"])}:
        raise InputError(f"{both} have read the same data; merging them adds nothing")


def _check_counts(directories: Sequence[Path], parts: Sequence[KVStats]) -> None:
    """Refuse runs in which one module counted another share of the tokens than in the first."""

    def shares(stats: KVStats) -> dict[str, Fraction]:
        return {name: Fraction(layer.tokens, stats.tokens) for name, layer in stats.layers.items()}

    expected = shares(parts[0])
    for path, stats in zip(directories, parts, strict=True):
        for name, share in shares(stats).items():
            if share != expected.get(name, share):
                tokens = stats.layers[name].tokens
                raise InputError(
                    f"in '{path}' {name} counted {tokens:,} of {stats.tokens:,} tokens, another "
                    f"share than in '{directories[0]}'; calibrate again"
                )


def _parts(dataset: dict[str, Any]) -> list[str]:
    """Fingerprints of the data that were merged into `dataset`, or its own."""
    return dataset.get("parts") or [dataset["fingerprint"]]


def _capture(recipe: Recipe) -> dict[str, Any]:
    # what decides which numbers were collected; the rest is about what is made of them
    return {
        "dtype": recipe.dtype,
        "targets": recipe.targets,
        "data.skip_first": recipe.data.skip_first,
        "means": recipe.collects_means,
        "histograms": make_observer(recipe.observer).needs_histogram,
    }


def _merged_data(datasets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    parts = sorted(part for dataset in datasets for part in _parts(dataset))
    return {
        "source": " + ".join(dict.fromkeys(dataset["source"] for dataset in datasets)),
        "fingerprint": hashlib.sha256("".join(parts).encode()).hexdigest(),
        "parts": parts,
        **{
            name: sum(dataset[name] for dataset in datasets)
            for name in ("documents", "samples", "tokens", "unread_tokens")
            if all(name in dataset for dataset in datasets)  # older runs do not say all
        },
    }
