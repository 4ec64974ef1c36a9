"""The files of a calibration: what it says of itself, errors for directories without them."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from calib.choices import FORMATS
from calib.errors import InputError, NoModelError
from calib.files.names import CALIBRATION_FILE, JSON_FILE, PACK_FILE, STATS_FILE
from calib.files.packs import PACKED, read_pack
from calib.files.strict_json import read_object

Amax = dict[tuple[int, str], tuple[float, ...]]  # (layer, "k" | "v" | "q") -> one per head


class _Dataset(BaseModel):
    source: str
    samples: int
    tokens: int


class _Model(BaseModel):
    model: str
    checkpoint: str


class _Layer(BaseModel):
    module: str
    k_amax: FiniteFloat
    v_amax: FiniteFloat


class _Report(_Model):
    """What is read of a calibration's file; there may be more."""

    model_config = ConfigDict(strict=True)
    dataset: _Dataset
    warnings: list[str]
    layers: list[_Layer]
    measured_on: _Model | None = None


def read_report(directory: Path) -> dict[str, Any]:
    """What a finished calibration says of itself; InputError where `directory` holds none."""
    pack, file = read_pack(directory), directory / CALIBRATION_FILE
    if not file.exists():
        raise absent(directory, f"'{directory}' has no {CALIBRATION_FILE}: it is no calibration")
    report = read_object(file)
    if report.get("fp8kv_calibration") != 1:
        raise InputError(f"'{file}' is not of this version of fp8kv; calibrate again")
    if report.get(PACKED) and pack is None:
        raise InputError(f"'{directory}' was a pack, and its {PACK_FILE} is missing; get it again")
    try:
        _Report.model_validate(report)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part)[:40] for part in first["loc"])
        raise InputError(
            f"'{file}' does not say what was calibrated ({at}: {first['msg']}); calibrate again"
        ) from None
    return report


def statistics_file(path: Path) -> Path:
    """The statistics file `path`, or the one in the directory `path`; an InputError without.

    All files of a pack are checked.
    """
    file = path / STATS_FILE if path.is_dir() else path
    if not path.exists():
        raise InputError(f"cannot read statistics: there is no '{path}'")
    if path.is_dir() and not file.exists():
        problem = f"cannot read statistics: '{path}' has no {STATS_FILE}"
        raise absent(path, f"{problem}; give a calibration's output")
    read_pack(file.parent)
    return file


def no_model(path: Path, problem: str) -> NoModelError:
    """An error for a directory without a model: `problem`, or what it holds instead."""
    saved = path / CALIBRATION_FILE
    if (path / PACK_FILE).is_file():
        problem = f"'{path}' is a pack and no model; fp8kv apply puts its scales beside one"
    elif saved.is_file():
        problem = (
            f"'{path}' holds a calibration and no model: give the model's directory; another "
            f"format comes from fp8kv calibrate MODEL --recipe {saved} --format FORMAT"
        )
    elif (path / JSON_FILE).is_file():
        problem = (
            f"'{path}' holds {JSON_FILE} and no model: put it into a copy of the model's "
            "directory, and give that"
        )
    return NoModelError(str(absent(path, problem)))


def absent(path: Path, problem: str) -> InputError:
    """An error for a directory that lacks a file: `problem`, or directories in it that have it."""
    inside = [path / name for name in FORMATS if (path / name / CALIBRATION_FILE).is_file()]
    if inside:
        each = ", ".join(f"'{directory}'" for directory in inside)
        problem = f"'{path}' holds a calibration in several formats: give {each}"
    return InputError(problem)
