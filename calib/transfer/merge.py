"""`fp8kv merge`: the statistics of separate runs of one model, as if one run had read it all."""

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Any

from calib.data import MEDIA_COUNTS
from calib.data.generated import GENERATED
from calib.errors import InputError
from calib.evaluate.served.watch_report import join_watched, read_watched
from calib.files.atomic import atomic_directory, claimed
from calib.files.fingerprint import fingerprints
from calib.files.names import STATS_FILE, WATCH_FILE
from calib.formats import DRAFT_LEFT_OUT
from calib.formats.directory import check_output, write_json
from calib.formats.output import CalibrationRecord, Destination, Result, write_output
from calib.models.sources import find_model
from calib.progress import SILENT, Progress
from calib.recipe import Recipe
from calib.same_model.check import ModelFacts, check_same_model, scales_facts
from calib.scales.stats import KVStats, are_equal, derive_scales
from calib.scales.stats_file import Calibration, load_stats, open_calibration, save_stats
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

    `model` is where the model is now, by default where the first calibration had it. InputError if models,
    revisions or capture settings differ, or if two have read the same data.
    """
    if len(directories) < 2:
        raise InputError("merge takes two or more calibrations; give their directories")
    progress.stage("load")
    runs = [open_calibration(path) for path in directories]
    if applied := [run for run in runs if "measured_on" in run.report]:
        problem = f"the scales in '{applied[0].path}' were applied, and not measured there"
        raise InputError(f"{problem}; merge calibrations, and apply what comes of it")
    for pair in combinations(runs, 2):
        _check_pair(*pair)
    first = runs[0]
    name = model or first.report["model"]
    checkpoint = find_model(name)
    source = ModelFacts(name, fingerprints=fingerprints(checkpoint))
    measured = scales_facts(first.path, report=first.report)
    check_same_model(measured, source, "give the model of these runs with --model")
    for path in directories:
        check_output(output, path, overwrite=overwrite, kind="calibration")
    check_output(output, checkpoint.path, overwrite=overwrite)
    counts = {run.report["threads"] for run in runs}
    with claimed(output, overwrite=overwrite) as claim:
        _check_counts(runs)
        progress.stage("write")
        destination = Destination(output, overwrite=overwrite, on_copied=progress.copied, claim=claim)
        dataset = _merge_datasets([run.report["dataset"] for run in runs])
        threads = counts.pop() if len(counts) == 1 else None
        data_warnings = dict.fromkeys(line for run in runs for line in data_warnings_of(run))
        stats = reduce(KVStats.join, (run.stats for run in runs))
        warnings = [*data_warnings, *_thread_warnings(runs)]
        warnings += filter(None, (_overlap_warning(*pair) for pair in combinations(runs, 2)))
        if any(run.report.get("drafts") for run in runs):
            warnings.append(DRAFT_LEFT_OUT)
        record = CalibrationRecord(
            name, checkpoint, first.recipe(), stats, dataset, warnings, threads=threads
        )
        return write_output(record, destination)


def merge_statistics(directories: Sequence[Path], output: Path, *, overwrite: bool = False) -> KVStats:
    """Merge statistics alone, as FP8KV_WATCH writes them, into a directory of such.

    InputError if they are of different models, as far as is known, or the same ones twice.
    """
    if len({path.resolve() for path in directories}) < max(2, len(directories)):
        raise InputError("merge takes two or more directories with statistics, each of them once")
    watched = [read_watched(path) for path in directories if (path / WATCH_FILE).is_file()]
    models = {document.model for document in watched}
    if len(models) > 1:
        raise InputError(f"these statistics are of different models: {', '.join(sorted(models))}")
    for path in directories:
        check_output(output, path, overwrite=overwrite, kind="calibration")
    runs = {path: load_stats(path) for path in directories}
    for (path, one), (other_path, two) in combinations(runs.items(), 2):
        if are_equal(one, two):
            raise InputError(f"'{path}' and '{other_path}' hold the same statistics; merge each once")
    stats = reduce(KVStats.join, runs.values())
    with atomic_directory(output, overwrite=overwrite) as scratch:
        save_stats(stats, scratch / STATS_FILE)
        if len(watched) == len(directories):
            write_json(scratch / WATCH_FILE, join_watched(watched).model_dump(exclude_none=True))
    return stats


def _check_pair(one: Calibration, two: Calibration) -> None:
    """Refuse runs of two models, of other settings, or over the same data."""
    both = f"'{one.path}' and '{two.path}'"
    facts, other_facts = (scales_facts(run.path, report=run.report) for run in (one, two))
    check_same_model(facts, other_facts, "merge only runs of one model")
    captured, other_captured = (_capture_settings(run.recipe()) for run in (one, two))
    settings = zip(captured.items(), other_captured.values(), strict=True)
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


def _check_counts(runs: Sequence[Calibration]) -> None:
    """Refuse runs in which one module counted another share of the tokens than in the first."""
    first = runs[0].stats
    shares = {name: Fraction(layer.tokens, first.tokens) for name, layer in first.layers.items()}
    for run in runs:
        for name, layer in run.stats.layers.items():
            if shares.get(name) not in (None, Fraction(layer.tokens, run.stats.tokens)):
                raise InputError(
                    f"in '{run.path}' {name} counted {layer.tokens:,} of {run.stats.tokens:,} tokens, "
                    f"another share than in '{runs[0].path}'; calibrate again"
                )


def data_warnings_of(run: Calibration) -> list[str]:
    """Return warnings that are not of a run's scales: the merged scales have their own."""
    recipe = run.recipe()
    own = warnings_for(run.stats, derive_scales(run.stats, recipe), recipe, takes_media=True)
    return [line for line in run.report["warnings"] if line not in own]


def _thread_warnings(runs: Sequence[Calibration]) -> list[str]:
    threads = {run.report["threads"]: run.path for run in runs if run.report["threads"] is not None}
    paths = [*threads.items()]
    return [
        f"'{paths[0][1]}' was measured with {paths[0][0]} threads and '{path}' with {count}; on a CPU, "
        "one run over all the data may give other last bits"
        for count, path in paths[1:]
    ]


def _overlap_warning(one: Calibration, two: Calibration) -> str:
    """Say that two runs may have read the same documents; "" if their data is not named the same."""
    data, second_data = (run.recipe().data for run in (one, two))
    amounts = {"samples", "batch_size", "until", "allow_few_tokens"}
    # other lengths and seeds choose among the same documents, but make other tokens
    amounts |= set() if data.dataset in GENERATED else {"seq_len", "seed"}
    is_same = data.model_dump(exclude=amounts) == second_data.model_dump(exclude=amounts)
    if not is_same or data == second_data:
        return ""
    return (
        f"'{one.path}' and '{two.path}', of {data.samples} and {second_data.samples} samples, may have read "
        "the same documents: what both read counts twice, as if it were more text"
    )


def _data_parts(dataset: dict[str, Any]) -> list[str]:
    """Return the fingerprints of the data that were merged into `dataset`, or its own."""
    return dataset.get("parts") or [dataset["fingerprint"]]


def _merge_datasets(datasets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = ("documents", "samples", "tokens", "unread_tokens")
    counts = {x: sum(data[x] for data in datasets) for x in names}
    media = {x: sum(data.get(x, 0) for data in datasets) for pair in MEDIA_COUNTS.items() for x in pair}
    counts |= {x: count for x, count in media.items() if count}
    parts = sorted(part for dataset in datasets for part in _data_parts(dataset))
    source = " + ".join(dict.fromkeys(dataset["source"] for dataset in datasets))
    fingerprint = hashlib.sha256("".join(parts).encode()).hexdigest()
    columns = {name: kind for data in datasets for name, kind in data.get("columns", {}).items()}
    return {"source": source, "columns": columns, "fingerprint": fingerprint, "parts": parts, **counts}
