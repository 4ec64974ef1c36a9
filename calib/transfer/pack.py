"""`fp8kv pack`: what a calibration measured, for others who have the model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any

import yaml

from calib.errors import InputError
from calib.evaluate.compare import load_report
from calib.evaluate.report import REPORT_FILE, Extremes, Row
from calib.files.atomic import atomic_directory
from calib.files.model_directory import check_model_type
from calib.files.names import (
    CALIBRATION_FILE,
    CARD_FILE,
    CONFIG_FILE,
    EVALUATION_DIRECTORY,
    JSON_FILE,
    STATS_FILE,
)
from calib.files.pack import PACKED, Pack, write_manifest
from calib.files.strict_json import read_optional
from calib.formats import FORMATS
from calib.formats.card import front_matter, render_card
from calib.formats.directory import check_output, write_json
from calib.formats.scales_json import scales_document
from calib.recipe import Recipe
from calib.same_model.marks import Marks
from calib.scales.scales import KVScales
from calib.scales.stats import derive_scales
from calib.scales.stats_file import open_calibration, save_stats
from calib.scales.summary import LayerSummary, summarize
from calib.strict_yaml import read_yaml
from calib.transfer.hidden_paths import hide_paths, local_paths
from calib.transfer.hub import check_hub_id

_FIGURES = {"kl", "ppl_change", "top1"}
_ROUNDING = 2**-8  # of scales in bfloat16
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")


@dataclass(frozen=True)
class WrittenPack:
    """A pack that was written, the bytes of its files, and warnings about figures that are not in it."""

    pack: Pack
    sizes: dict[str, int]
    warnings: list[str]


def pack(
    calibration: Path,
    output: Path,
    *,
    report: Path | None = None,
    base_model: str | None = None,
    overwrite: bool = False,
) -> WrittenPack:
    """Write `calibration`, an output or its statistics, to the directory `output`, whole or not at all.

    `report` is what fp8kv-eval wrote of these scales, by default what lies beside the calibration, if it
    fits; `base_model` is the model's id on the Hub, where a copy of that was calibrated.
    """
    measured = open_calibration(calibration)
    source, facts = measured.directory, measured.report
    check_output(output, source, overwrite=overwrite, kind="calibration")
    check_model_type(source, read_optional(source / CONFIG_FILE) or {})
    marks, stats = _check_measured_here(source, facts), measured.stats
    if base_model is not None:
        check_hub_id("--base-model", base_model)
    recipe = measured.recipe()
    scales = derive_scales(stats, recipe)
    layers = summarize(stats, scales)
    figures, warnings = (_read_figures(report, layers), []) if report else _figures_beside(source, layers)
    paths = local_paths(facts, recipe, figures["data"] if figures else None)
    public = {key: x if key == "marks" else hide_paths(x, paths) for key, x in facts.items()}
    with atomic_directory(output, overwrite=overwrite) as scratch:
        save_stats(stats, scratch / STATS_FILE)
        write_json(scratch / CALIBRATION_FILE, public | {PACKED: True})
        if _fits_json(scales) and (model_type := marks.settings.get("model_type")):
            write_json(scratch / JSON_FILE, scales_document(scales, model_type, marks.layers))
        hub = facts.get("hub") or {}
        model = base_model or hub.get("model")
        origin = {
            "base_model": model,
            "revision": hub.get("revision") if model == hub.get("model") else None,
            "fingerprint": facts["checkpoint"],
            "evaluation": hide_paths(figures, paths),
        }
        manifest = write_manifest(scratch, origin)
        (scratch / CARD_FILE).write_text(pack_card(public, recipe, layers, manifest, license_of(source)))
        sizes = {file.name: file.stat().st_size for file in sorted(scratch.iterdir())}
    return WrittenPack(manifest, sizes, warnings)


def _check_measured_here(source: Path, facts: dict[str, Any]) -> Marks:
    """Refuse scales that were not measured in `source`; return the marks of the model."""
    if PACKED in facts:
        problem = "is a pack already; copy it, or pack the calibration again"
    elif "measured_on" in facts:
        problem = "holds scales that were applied, and not measured there; pack their own calibration"
    elif not facts.get("marks"):
        problem = (
            "keeps no marks, without which nobody can apply its scales; calibrate again, or share it all"
        )
    else:
        return Marks.from_json(facts["marks"], f"'{source / CALIBRATION_FILE}'")
    raise InputError(f"'{source}' {problem}")


def _fits_json(scales: KVScales) -> bool:
    """Return whether `kv_cache_scales.json` can hold the scales, of K and V the larger."""
    json, is_plain = FORMATS["json"], not (scales.latent or scales.has_q or scales.has_center)
    return is_plain and scales.strategy in json.strategies and scales.fp8_dtype in json.fp8_dtypes


def _figures_beside(
    calibration: Path, layers: Sequence[LayerSummary]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the figures that `--evaluate` left with a calibration, or None and why they were not taken."""
    path = calibration.absolute()
    # an output in several formats has one evaluation beside their directories
    directories = [calibration, path.parent] if path.name in FORMATS else [calibration]
    warnings = []
    for file in (directory / EVALUATION_DIRECTORY / REPORT_FILE for directory in directories):
        try:
            if file.exists():
                return _read_figures(file, layers), []
        except InputError as error:
            warnings.append(f"packed without figures of an evaluation: {error}")
    return None, warnings


def _read_figures(report: Path, layers: Sequence[LayerSummary]) -> dict[str, Any]:
    """Read what a report says of scales that have these `layers`; an InputError where it has none of them."""
    evaluation = load_report(report)
    variants = evaluation.variants
    row = next((row for row in variants.values() if _has_scales(row, layers)), None)
    if row is None:
        problem = f"'{report}' has no figures of these scales"
        raise InputError(f"{problem}; measure them: fp8kv-eval MODEL --scales OUTPUT -o REPORT")
    rows = {"these scales": row} | ({"scale 1.0": variants["none"]} if "none" in variants else {})
    return {
        "data": evaluation.data.source,
        "tokens": evaluation.data.tokens,
        "dtype": evaluation.dtype,
        "noise_floor": evaluation.noise_floor,
        "variants": {name: row.model_dump(include=_FIGURES) for name, row in rows.items()},
    }


def _has_scales(row: Row, layers: Sequence[LayerSummary]) -> bool:
    """Return whether a row is of the scales of `layers`, by their values."""
    measured = {layer.layer_idx: layer.scale for layer in row.layers}
    if row.kind != "given" or measured.keys() != {layer.layer_idx for layer in layers}:
        return False
    return all(
        isclose(_largest(measured[layer.layer_idx]["k"]), layer.k_scale, rel_tol=_ROUNDING)
        and isclose(_largest(measured[layer.layer_idx]["v"]), layer.v_scale, rel_tol=_ROUNDING)
        for layer in layers
    )


def _largest(scale: float | list[float] | Extremes) -> float:
    if isinstance(scale, Extremes):
        return scale.max
    return scale if isinstance(scale, float) else max(scale)


def license_of(source: Path) -> str | None:
    """Return the license in the model's card, whose head an output's card repeats; None if unknown."""
    card = source / CARD_FILE
    text = front_matter(card.read_text(errors="replace")) if card.is_file() else ""
    try:
        head = read_yaml(text.strip().strip("-"), f"the head of '{card}'")
    except InputError:
        return None
    license = head.get("license") if isinstance(head, dict) else None
    return license if isinstance(license, str) and _LICENSE.fullmatch(license) else None


def pack_card(
    report: dict[str, Any], recipe: Recipe, layers: Sequence[LayerSummary], pack: Pack, license: str | None
) -> str:
    """Return the card of `pack`, whose calibration has this `report`."""
    data, versions = report["dataset"], report["versions"]
    head: dict[str, Any] = {"base_model": pack.base_model} if pack.base_model else {}
    head |= {"license": license} if license else {}
    head |= {"library_name": "fp8kv", "tags": ["fp8", "kv-cache", "fp8kv"]}
    facts = {
        "model": report["model"],
        "revision": pack.revision or "not known",
        "scales": f"{recipe.strategy}, {recipe.observer.name}, {recipe.fp8_dtype}",
        "data": f"{data['source']}, {data['samples']:,} samples, {data['tokens']:,} tokens",
        "fingerprint of the data": data["fingerprint"],
        "versions": ", ".join(f"{name} {text}" for name, text in versions.items()),
    }
    card = render_card(
        "pack",
        model=pack.base_model or report["model"],
        facts=facts,
        evaluation=pack.evaluation,
        layers=layers,
        warnings=report["warnings"],
    )
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n{card}"
