"""`fp8kv pack`: what a calibration found, for others who have the model."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.errors import InputError, UnsupportedExportError
from calib.files.atomic import atomic_directory
from calib.files.calibration import statistics_file
from calib.files.names import CALIBRATION_FILE, CARD_FILE, JSON_FILE, PACK_FILE, STATS_FILE
from calib.files.pack import PACKED, Pack, write_manifest
from calib.formats import check_format, check_latent
from calib.formats.checkpoint_directory import check_output, write_json
from calib.formats.scales_json import scales_document
from calib.recipe import load_recipe
from calib.same_model.marks import Marks
from calib.scales.scales import KVScales
from calib.scales.stats import derive_scales
from calib.scales.stats_file import load_calibration, save_stats
from calib.scales.summary import summarize
from calib.transfer.evaluated import figures_beside, figures_of
from calib.transfer.hidden_paths import places_of, without_places
from calib.transfer.pack_card import license_of, pack_card

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}", re.ASCII)


@dataclass(frozen=True)
class Packed:
    """What was written."""

    path: Path
    pack: Pack
    sizes: dict[str, int]  # bytes of each file, by name
    warnings: list[str]  # what was found and not packed


def pack(
    given: Path,
    output: Path,
    *,
    report: Path | None = None,
    base_model: str | None = None,
    overwrite: bool = False,
) -> Packed:
    """Write the calibration `given` to the directory `output`, whole or not at all.

    `report` is what fp8kv-eval wrote of these scales, by default what lies beside the calibration,
    if it fits; `base_model` is the model's id on the Hub, where that was calibrated from a copy.
    InputError for what is no calibration, or one that keeps no marks of its model.
    """
    source = statistics_file(given).parent
    check_output(output, source, overwrite=overwrite, what="calibration")
    stats, said = load_calibration(given)
    marks = _check_measured_here(source, said)
    if base_model is not None and not HUB_ID.fullmatch(base_model):
        raise InputError(f"--base-model '{base_model}' is no id on the Hub, such as owner/name")
    recipe = load_recipe(str(source / CALIBRATION_FILE))
    scales = derive_scales(stats, recipe)
    layers = summarize(stats, scales)
    found = (figures_of(report, layers), []) if report else figures_beside(source, layers)
    figures, warnings = found
    places = places_of(said, recipe, figures["data"] if figures else None)
    public = {key: x if key == "marks" else without_places(x, places) for key, x in said.items()}
    with atomic_directory(output, overwrite=overwrite) as scratch:
        save_stats(stats, scratch / STATS_FILE)
        write_json(scratch / CALIBRATION_FILE, public | {PACKED: True})
        if _fits_json(scales) and (model_type := marks.settings.get("model_type")):
            write_json(scratch / JSON_FILE, scales_document(scales, model_type, marks.layers))
        about = _origin(said, base_model) | {"evaluation": without_places(figures, places)}
        written = write_manifest(scratch / PACK_FILE, about)
        card = pack_card(public, recipe, layers, written, license_of(source))
        (scratch / CARD_FILE).write_text(card)
        sizes = {file.name: file.stat().st_size for file in sorted(scratch.iterdir())}
    return Packed(output, written, sizes, warnings)


def _check_measured_here(source: Path, said: dict[str, Any]) -> Marks:
    if PACKED in said:
        raise InputError(f"'{source}' is a pack already; copy it, or pack the calibration again")
    if "measured_on" in said:
        raise InputError(
            f"the scales in '{source}' were applied, and not measured there; pack the calibration "
            "that they are from"
        )
    if not said.get("marks"):
        raise InputError(
            f"'{source}' keeps no marks of its model, so nobody could apply its scales; calibrate "
            "again, or share the whole output"
        )
    return Marks.from_json(said["marks"], f"'{source / CALIBRATION_FILE}'")


def _origin(said: dict[str, Any], base_model: str | None) -> dict[str, Any]:
    """What the manifest says of the model that was measured."""
    hub = said.get("hub") or {}
    model = base_model or hub.get("model")
    commit = hub.get("revision") if model == hub.get("model") else None
    return {"base_model": model, "revision": commit, "fingerprint": said["checkpoint"]}


def _fits_json(scales: KVScales) -> bool:
    """Whether `kv_cache_scales.json` can hold the scales as they are."""
    try:
        if scales.latent:
            check_latent("json")
        check_format(
            "json",
            strategy=scales.strategy,
            fp8_dtype=scales.fp8_dtype,
            with_q=scales.has_q,
            reduce="none",
            center_keys=scales.has_center,
        )
    except UnsupportedExportError:
        return False
    return True
