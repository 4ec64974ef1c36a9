"""`fp8kv apply`: scales measured once, put beside another checkpoint of the same model."""

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from calib.choices import FormatName, Strategy
from calib.errors import InputError
from calib.files.atomic import claimed
from calib.files.calibration import statistics_file
from calib.files.fingerprint import fingerprints
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.names import CALIBRATION_FILE, is_of_cache
from calib.files.pack import read_pack
from calib.formats.directory import check_output, check_places
from calib.formats.output import (
    CalibratedModel,
    CalibrationRecord,
    Destination,
    Result,
    check_in_place,
    default_output,
    make_exports,
    write_output,
)
from calib.formats.refusals import refusals_of
from calib.models.quantized.detect import quantization_notes
from calib.models.sources import find_model
from calib.progress import SILENT, Progress
from calib.recipe import Recipe, load_recipe
from calib.same_model.check import ModelFacts, check_same_model, model_facts, scales_facts
from calib.same_model.judge import Likeness, compare_marks
from calib.same_model.marks import Marks, take_marks, unmarked_matrices
from calib.scales.stats import KVStats, derive_scales
from calib.scales.stats_file import load_calibration


def apply(
    given: Path,
    model: str,
    output: Path | None = None,
    *,
    in_place: bool = False,
    base: str | None = None,
    format: FormatName = "vllm",
    strategy: Strategy | None = None,
    overwrite: bool = False,
    called: str | None = None,
    progress: Progress = SILENT,
) -> Result:
    """Put the scales of the calibration or pack `given` beside `model`, which is not run.

    `base` is the model that was calibrated, for outputs that hold no marks of it; `called` is the
    name of a pack that was fetched. InputError or UnsupportedExportError, and nothing written,
    where K and V of `model` are not shown to be the same, or its engine loads no scales beside its
    weights.
    """
    check_places(output, in_place=in_place, overwrite=overwrite)
    source, name = statistics_file(given).parent, Path(called or given)
    stats, report = load_calibration(given)
    pack = _provenance(source, str(name)) or report.get("pack")
    changes: dict[str, Any] = {"export.formats": [format], "export.weights": "link"}
    changes |= {"strategy": strategy, "export.reduce": "none"} if strategy else {}
    recipe = load_recipe(str(source / CALIBRATION_FILE), changes)
    default = output or default_output(model, recipe.strategy)
    output = check_in_place(model, recipe.export) if in_place else default
    progress.stage("load")
    checkpoint = find_model(model)
    if not in_place:
        check_output(output, source, overwrite=overwrite, kind="calibration")
        check_output(output, checkpoint.path, overwrite=overwrite)
    measured = replace(scales_facts(source, stats), name=str(name))
    check_same_model(measured, model_facts(checkpoint))
    _check_loadable(stats, checkpoint, recipe)
    # of the first model, where there was a chain
    first = report.get("measured_on") or {key: report[key] for key in ("model", "checkpoint")}
    marks = _marks(base, source, measured, stats)
    progress.stage("compare weights")
    own = _check_weights(measured, marks, model, checkpoint, stats)
    likeness, left = compare_marks(marks, own), unmarked_matrices(checkpoint, marks, own)
    origin_name = first["model"] + (f" (pack {pack['name']})" if pack else "")
    warnings = [*report["warnings"], *_notes(origin_name, checkpoint, likeness, left)]
    origin = {"marks": marks.model_dump(), "measured_on": {**first, "compared": asdict(likeness)}}
    origin |= {"pack": pack} if pack else {}
    with claimed(output, overwrite=overwrite or in_place) as claim:
        progress.stage("write")
        destination = Destination(output, in_place, overwrite, progress.copied, claim)
        record = CalibrationRecord(stats, report["dataset"], warnings, (), report.get("threads"), origin)
        return write_output(CalibratedModel(model, checkpoint, recipe), record, destination)


def _provenance(source: Path, name: str) -> dict[str, Any] | None:
    """Which pack the scales are from, if `source` is one."""
    pack = read_pack(source)
    return {"name": name, "sha256": pack.sha256} if pack else None


def _check_loadable(stats: KVStats, checkpoint: ModelDirectory, recipe: Recipe) -> None:
    """Refuse, by names, scales that no engine would load."""
    for module in stats.layers:
        checkpoint.attention_prefix(module)
    with refusals_of("apply"):
        make_exports(derive_scales(stats, recipe), checkpoint, recipe.export)
    _check_linked(checkpoint)


def _check_linked(checkpoint: ModelDirectory) -> None:
    """Refuse weight files that hold scales: to take these out, the files would be rewritten."""
    for shard in checkpoint.shards:
        held = [name for name, file in checkpoint.weight_map.items() if file == shard]
        stale = [name for name in held if is_of_cache(name)]
        if stale and len(stale) < len(held):
            raise InputError(
                f"'{checkpoint.path / shard}' holds weights and KV scales ('{stale[0]}'), and "
                "apply never rewrites weights; take these scales out with fp8kv strip"
            )


def _marks(base: str | None, source: Path, measured: ModelFacts, stats: KVStats) -> Marks:
    """Return marks of the model that was measured: of `base`, or saved, or of the weights in `source`."""
    if base is not None:
        checkpoint = find_model(base)
        facts = ModelFacts(base, fingerprints=fingerprints(checkpoint))
        check_same_model(measured, facts, "give the model that was measured")
        return take_marks(checkpoint, stats.layers)
    if measured.marks is not None:
        return measured.marks()
    try:
        checkpoint = open_model_directory(source)
    except InputError:
        raise InputError(
            f"'{measured.name}' keeps neither marks nor weights of the model it was measured on; give that "
            "model with --base"
        ) from None
    return take_marks(checkpoint, stats.layers)


def _check_weights(
    measured: ModelFacts, marks: Marks, model: str, checkpoint: ModelDirectory, stats: KVStats
) -> Marks:
    """Return the marks of `checkpoint`; refuse it unless its K and V are the same as by `marks`."""
    own = take_marks(checkpoint, stats.layers)
    check_same_model(
        replace(measured, num_layers=marks.layers, settings=marks.settings, marks=lambda: marks),
        ModelFacts(model, num_layers=own.layers, settings=own.settings, marks=lambda: own),
    )
    return own


def _notes(measured: str, checkpoint: ModelDirectory, likeness: Likeness, left: list[str]) -> Iterable[str]:
    yield (
        f"these scales were measured on {measured}: what was sampled of the weights for K and V "
        f"of '{checkpoint.path}' differs by {likeness.largest_error:.1%} at most"
    )
    if left:
        yield (
            f"not compared: {', '.join(left)}; K and V of later layers follow from these too, so "
            "scales fit only a model that has the same"
        )
    if likeness.layers_with_moved_factors:
        yield (
            f"norms of {likeness.layers_with_moved_factors} layers hold other factors, as AWQ and "
            "SmoothQuant move them; the weights behind them make up for that"
        )
    if quantization_notes(checkpoint):
        yield "what quantised weights and activations change in K and V was not measured"
