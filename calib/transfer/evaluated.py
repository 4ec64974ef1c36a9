"""What an evaluation found of the scales in a pack."""

from collections.abc import Sequence
from math import isclose
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from calib.choices import FORMATS
from calib.errors import InputError
from calib.eval.schema import REPORT_FILE, Extremes, Report, Row
from calib.files.strict_json import read_object
from calib.scales.summary import LayerSummary

_FIGURES = {"kl", "ppl_change", "top1"}
_ROUNDING = 2**-8  # of scales in bfloat16


def figures_of(given: Path, layers: Sequence[LayerSummary]) -> dict[str, Any]:
    """The figures in the report `given` of scales that have these `layers`.

    InputError where it has none of these scales, by their layers and values.
    """
    file = given / REPORT_FILE if given.is_dir() else given
    document = read_object(file)
    try:
        report = Report.model_validate(document)
    except ValidationError:
        raise InputError(f"'{file}' is no report of this version of fp8kv-eval") from None
    given_rows = (row for row in report.variants.values() if row.kind == "given")
    row = next((row for row in given_rows if _is_of(row, layers)), None)
    if row is None:
        raise InputError(
            f"'{file}' has no figures of these scales; measure them: fp8kv-eval MODEL --scales "
            "OUTPUT -o REPORT"
        )
    rows = {"these scales": row, "scale 1.0": report.variants.get("none")}
    return {
        "data": report.data.source,
        "tokens": report.data.tokens,
        "dtype": report.dtype,
        "noise_floor": report.noise_floor,
        "variants": {name: r.model_dump(include=_FIGURES) for name, r in rows.items() if r},
    }


def figures_beside(
    calibration: Path, layers: Sequence[LayerSummary]
) -> tuple[dict[str, Any] | None, list[str]]:
    """The figures that `--evaluate` left with a calibration, or None; why one was not taken."""
    within = calibration.absolute()  # of an output in several formats
    homes = [calibration, *([within.parent] if within.name in FORMATS else [])]
    warnings = []
    for file in (home / "evaluation" / REPORT_FILE for home in homes):
        try:
            if file.exists():
                return figures_of(file, layers), []
        except InputError as error:
            warnings.append(f"packed without figures of an evaluation: {error}")
    return None, warnings


def _is_of(row: Row, layers: Sequence[LayerSummary]) -> bool:
    measured = {each.layer_idx: each.scale for each in row.layers}
    known = {each.layer_idx: (each.k_scale, each.v_scale) for each in layers}
    return measured.keys() == known.keys() and all(
        isclose(_largest(measured[i]["k"]), k, rel_tol=_ROUNDING)
        and isclose(_largest(measured[i]["v"]), v, rel_tol=_ROUNDING)
        for i, (k, v) in known.items()
    )


def _largest(scale: float | list[float] | Extremes) -> float:
    if isinstance(scale, Extremes):
        return scale.max
    return scale if isinstance(scale, float) else max(scale)
