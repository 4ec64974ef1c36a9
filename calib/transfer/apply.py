"""`fp8kv apply`: scales measured once, put beside another checkpoint of the same model."""

from dataclasses import asdict, replace
from math import log
from pathlib import Path
from typing import Any

from calib.choices import FormatName, Strategy
from calib.errors import InputError
from calib.files.atomic import claimed
from calib.files.fingerprint import fingerprints
from calib.files.model_directory import ModelDirectory
from calib.files.names import is_of_cache
from calib.formats import DRAFT_LEFT_OUT
from calib.formats.base import refusals_of
from calib.formats.directory import check_output, check_places
from calib.formats.output import (
    CalibrationRecord,
    Destination,
    Result,
    check_in_place,
    default_output,
    make_exports,
    write_output,
)
from calib.models.quantized.weights import quantization_notes
from calib.models.sources import find_model
from calib.progress import SILENT, Progress
from calib.same_model.check import ModelFacts, check_same_model, model_facts, scales_facts
from calib.same_model.mark_comparison import Likeness, compare_marks, show_factor
from calib.same_model.marks import Marks, take_marks, unmarked_matrices
from calib.scales.stats import derive_scales
from calib.scales.stats_file import Calibration, open_calibration
from calib.transfer.hub import find_calibration
from calib.transfer.merge import data_warnings_of

_MARK_STEP = 2**-8  # of bfloat16, in which marks are kept


def apply(
    calibration: str,
    model: str,
    output: Path | None = None,
    *,
    in_place: bool = False,
    format: FormatName = "vllm",
    strategy: Strategy | None = None,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> Result:
    """Put the scales of a `calibration` or pack, also one on the Hub, beside `model`, which is not run.

    InputError or UnsupportedExportError, and nothing written, unless K and V of `model` are shown to be the
    same, and its engine loads scales beside its weights.
    """
    check_places(output, in_place=in_place, overwrite=overwrite)
    path, name = find_calibration(calibration, progress)
    source = open_calibration(path)
    stats, report = source.stats, source.report
    settings: dict[str, Any] = {"export.formats": [format], "export.weights": "link"}
    settings |= {"strategy": strategy, "export.reduce": "none"} if strategy else {}
    recipe = source.recipe(settings)
    default = output or default_output(model, recipe.strategy)
    output = check_in_place(model, recipe.export) if in_place else default
    progress.stage("load")
    checkpoint = find_model(model)
    if not in_place:
        check_output(output, source.directory, overwrite=overwrite, kind="calibration")
        check_output(output, checkpoint.path, overwrite=overwrite)
    measured = replace(scales_facts(source.directory, stats, report), name=name)
    check_same_model(measured, model_facts(checkpoint))
    with refusals_of("apply"):
        make_exports(derive_scales(stats, recipe), checkpoint, recipe.export)
    _check_no_stored_scales(checkpoint)
    if measured.marks is None:
        raise InputError(f"'{name}' keeps no marks to compare weights by; calibrate '{model}' instead")
    progress.stage("compare weights")
    marks, target = measured.marks(), take_marks(checkpoint, stats.layers)
    facts = ModelFacts(model, settings=target.settings, num_layers=target.layers, marks=lambda: target)
    check_same_model(measured, facts)
    likeness, unmarked = compare_marks(marks, target), unmarked_matrices(checkpoint, marks, target)
    origin = _origin(source, name, marks, likeness)
    notes, doubts = _notes(origin, checkpoint, likeness, unmarked)
    warnings = [*data_warnings_of(source), *doubts, *([DRAFT_LEFT_OUT] if report.get("drafts") else [])]
    with claimed(output, overwrite=overwrite or in_place) as claim:
        progress.stage("write")
        record = CalibrationRecord(
            model, checkpoint, recipe, stats, report["dataset"], warnings, notes, report["threads"], origin
        )
        return write_output(record, Destination(output, in_place, overwrite, progress.copied, claim))


def _check_no_stored_scales(checkpoint: ModelDirectory) -> None:
    """Refuse weight files that hold scales: to take these out, the files would be rewritten."""
    for shard, header in sorted(checkpoint.headers.items()):
        scales = sorted(filter(is_of_cache, header))
        if scales and len(scales) < len(header):
            raise InputError(
                f"'{checkpoint.path / shard}' holds weights and KV scales ('{scales[0]}'), and "
                "apply never rewrites weights; take these scales out with fp8kv strip"
            )


def _origin(source: Calibration, name: str, marks: Marks, likeness: Likeness) -> dict[str, Any]:
    """Return the report's facts about the model that was measured, the first one where there was a chain."""
    report = source.report
    model = report.get("measured_on") or {key: report[key] for key in ("model", "checkpoint", "weights")}
    pack = {"name": name, "sha256": source.pack.sha256} if source.pack else report.get("pack")
    origin = {"marks": marks.model_dump(), "measured_on": {**model, "compared": asdict(likeness)}}
    return origin | ({"pack": pack} if pack else {})


def _notes(
    origin: dict[str, Any], checkpoint: ModelDirectory, likeness: Likeness, unmarked: list[str]
) -> tuple[list[str], list[str]]:
    """Return where the scales were measured, a note if nothing differs, and else among the warnings."""
    model = origin["measured_on"]["model"]
    digests, has_experts = fingerprints(checkpoint), any("experts." in name for name in checkpoint.entries)
    is_same = "pack" not in origin and digests.items() <= origin["measured_on"].items()
    if is_same and not has_experts:  # whose weights are in no digest
        return [], []
    model += f" (pack {origin['pack']['name']})" if "pack" in origin else ""
    notes, warnings = list[str](), list[str]()
    distance, lines = f"differs by {likeness.largest_error:.1%} at most", warnings
    if likeness.largest_error <= _MARK_STEP:
        distance, lines = f"is the same, to the {_MARK_STEP:.1%} of bfloat16", notes
    lines.append(
        f"these scales were measured on {model}: what was sampled of the weights for K and V "
        f"of '{checkpoint.path}' {distance}"
    )
    if unmarked:
        warnings.append(
            f"not compared: {', '.join(unmarked)}; K and V of later layers follow from these too, so "
            "scales fit only a model that has the same"
        )
    if likeness.scaled:
        name, factor = max(likeness.scaled.items(), key=lambda item: abs(log(abs(item[1]) or 1e-38)))
        warnings.append(
            f"a row of '{name}' is {show_factor(factor)} times what it was, the most of "
            f"{len(likeness.scaled)} such weights: scales fit only if the weight behind it, as "
            "down_proj, makes up for that, as where AWQ moves factors; else calibrate this model"
        )
    if likeness.layers_with_moved_factors:
        warnings.append(
            f"norms of {likeness.layers_with_moved_factors} layers hold other factors, as AWQ and "
            "SmoothQuant move them; the weights behind them make up for that"
        )
    if quantization_notes(checkpoint):
        warnings.append("what quantised weights and activations change in K and V was not measured")
    return notes, warnings
