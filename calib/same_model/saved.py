"""Whether statistics are of a model's weights, by the marks that their calibration keeps."""

from collections.abc import Iterable
from pathlib import Path

from calib.files.calibration import read_report, statistics_file
from calib.files.model_directory import ModelDirectory
from calib.files.names import CALIBRATION_FILE, CONFIG_FILE
from calib.files.strict_json import read_object
from calib.same_model.judging import check_settings, judge
from calib.same_model.record import Marks
from calib.same_model.taking import settings_of, take_marks


def saved_marks(directory: Path) -> Marks | None:
    """Return those in the calibration's file in `directory`, if there is one that keeps any."""
    file = directory / CALIBRATION_FILE
    saved = read_report(directory).get("marks") if file.exists() else None
    return None if saved is None else Marks.from_json(saved, f"'{file}'")


def check_measured_on(given: Path, modules: Iterable[str], checkpoint: ModelDirectory) -> None:
    """Refuse statistics of attention `modules` whose marks say other weights than `checkpoint`."""
    marks = saved_marks(statistics_file(given).parent)
    if marks is not None:
        judge(str(given), marks, str(checkpoint.path), take_marks(checkpoint, modules))


def check_saved_alike(given: Path, directory: Path) -> None:
    """Refuse statistics of another model than `directory`, by its config and its own marks.

    Reads no weights.
    """
    marks = saved_marks(statistics_file(given).parent)
    if marks is None:
        return
    if (directory / CONFIG_FILE).exists():
        settings = settings_of(directory, read_object(directory / CONFIG_FILE))
        check_settings(str(given), marks.settings, str(directory), settings)
    if (own := saved_marks(directory)) is not None:
        judge(str(given), marks, str(directory), own)
