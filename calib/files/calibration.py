"""The files of a calibration: its report, its statistics, and errors for directories without them."""

from pathlib import Path
from shlex import quote
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from calib.choices import FORMATS
from calib.errors import InputError, NoModelError, first_problem
from calib.files.names import CALIBRATION_FILE, JSON_FILE, PACK_FILE, STATS_FILE
from calib.files.pack import PACKED, Pack, read_pack
from calib.files.strict_json import read_object

Amax = dict[tuple[int, str], tuple[float, ...]]  # (layer, "k" | "v" | "q") -> one per head


class _ReportDataset(BaseModel):
    source: str
    fingerprint: str
    documents: int
    samples: int
    tokens: int
    unread_tokens: int


class _ReportModel(BaseModel):
    model: str
    checkpoint: str
    weights: str


class _ReportLayer(BaseModel):
    module: str
    k_amax: FiniteFloat
    v_amax: FiniteFloat


class _CalibrationReport(_ReportModel):
    """The part of a calibration's report that is read again."""

    model_config = ConfigDict(strict=True)
    dataset: _ReportDataset
    threads: int | None
    versions: dict[str, str]
    warnings: list[str]
    layers: list[_ReportLayer]
    drafts: list[_ReportLayer] = []
    measured_on: _ReportModel | None = None


def read_report(directory: Path) -> dict[str, Any]:
    """Read the report of a finished calibration; raise an InputError where `directory` holds none."""
    return parse_report(directory, read_pack(directory))


def parse_report(directory: Path, pack: Pack | None) -> dict[str, Any]:
    """Read the report of a calibration whose files were compared with the manifest of its `pack`, if any.

    Raises an InputError where it is missing, damaged or of another version.
    """
    file = directory / CALIBRATION_FILE
    if not file.exists():
        problem = f"'{directory}' has no {CALIBRATION_FILE}: it is not a calibration"
        raise InputError(_own_contents(directory) or problem)
    report = read_object(file)
    if report.get("fp8kv_calibration") != 1:
        raise InputError(f"'{file}' is not of this version of fp8kv; calibrate again")
    if report.get(PACKED) and pack is None:
        raise InputError(f"'{directory}' was a pack, and its {PACK_FILE} is missing; get it again")
    try:
        _CalibrationReport.model_validate(report)
    except ValidationError as error:
        problem = f"'{file}' does not say what was calibrated ({first_problem(error)})"
        raise InputError(f"{problem}; calibrate again") from None
    return report


def statistics_file(path: Path) -> Path:
    """Return the statistics file `path`, or the one in the directory `path`; refuse a path without."""
    file = path / STATS_FILE if path.is_dir() else path
    if not path.exists():
        raise InputError(f"cannot read statistics: '{path}' does not exist; give a calibration's output")
    if path.is_dir() and not file.exists():
        problem = f"cannot read statistics: '{path}' has no {STATS_FILE}; give a calibration's output"
        raise InputError(_own_contents(path) or problem)
    return file


def missing_model_error(path: Path, problem: str) -> NoModelError:
    """Return an error for a directory without a model: `problem`, or what the directory holds instead."""
    report = path / CALIBRATION_FILE
    if (path / PACK_FILE).is_file():
        problem = f"'{path}' is a pack and not a model; fp8kv apply puts its scales beside one"
    elif report.is_file():
        problem = (
            f"'{path}' holds a calibration and no model: give the model's directory; another "
            f"format comes from fp8kv calibrate MODEL --recipe {quote(str(report))} --format FORMAT"
        )
    elif (path / JSON_FILE).is_file():
        problem = (
            f"'{path}' holds {JSON_FILE} and no model: put it into a copy of the model's directory, "
            "and give that"
        )
    return NoModelError(_own_contents(path) or problem)


def _own_contents(path: Path) -> str | None:
    """Return the problem that `path` holds a calibration in several formats, or statistics alone."""
    formats = [path / name for name in FORMATS if (path / name / CALIBRATION_FILE).is_file()]
    names = ", ".join(f"'{directory}'" for directory in formats)
    if not formats and (path / STATS_FILE).is_file() and not (path / CALIBRATION_FILE).is_file():
        uses = "verify --against, repair --stats, inspect and merge"
        return f"'{path}' holds statistics alone, as FP8KV_WATCH writes them: they are for fp8kv {uses}"
    return f"'{path}' holds a calibration in several formats: give {names}" if formats else None
