"""The files of a calibration in a directory, and errors for directories without them."""

from pathlib import Path

from calib.choices import FORMATS
from calib.errors import InputError
from calib.scalefiles.file_names import CALIBRATION_FILE, JSON_FILE, STATS_FILE


def statistics_file(path: Path) -> Path:
    """The statistics file `path`, or the one in the directory `path`.

    Raises:
        InputError: it is a directory without one.
    """
    if not path.is_dir():
        return path
    if not (path / STATS_FILE).exists():
        raise absent(
            path,
            f"cannot read statistics: '{path}' has no {STATS_FILE}; give a calibration's output",
        )
    return path / STATS_FILE


def no_model(path: Path, problem: str) -> InputError:
    """An error for a directory without a model: `problem`, or what it holds instead."""
    saved = path / CALIBRATION_FILE
    if saved.is_file():
        problem = (
            f"'{path}' holds a calibration and no model: give the model's directory; another "
            f"format comes from fp8kv calibrate MODEL --recipe {saved} --format FORMAT"
        )
    elif (path / JSON_FILE).is_file():
        problem = (
            f"'{path}' holds {JSON_FILE} and no model: put it into a copy of the model's "
            "directory, and give that"
        )
    return absent(path, problem)


def absent(path: Path, problem: str) -> InputError:
    """An error for a directory that lacks a file: `problem`, or directories in it that have it."""
    inside = [path / name for name in FORMATS if (path / name / CALIBRATION_FILE).is_file()]
    if inside:
        each = ", ".join(f"'{directory}'" for directory in inside)
        problem = f"'{path}' holds a calibration in several formats: give {each}"
    return InputError(problem)
