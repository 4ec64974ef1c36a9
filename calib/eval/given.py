"""The scales that a user gave to be compared."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from calib.any_scales import load_any_scales
from calib.errors import InputError
from calib.eval.variants import BUILT_IN, Variant
from calib.recipe import DataRecipe, load_recipe
from calib.scalefiles.file_names import CALIBRATION_FILE


def given_names(directories: Sequence[Path]) -> list[str]:
    """What the scales in each directory are called: its name, or its path where that is taken."""
    short = [path.resolve().name for path in directories]
    return [
        name if short.count(name) == 1 and name not in BUILT_IN else str(path)
        for name, path in zip(short, directories, strict=True)
    ]


def given_variants(directories: Sequence[Path], model: PreTrainedModel) -> list[Variant]:
    """The scales in each directory, as `given_names` calls them.

    Raises:
        InputError: a directory holds no scales, those of another model, or is given twice.
    """
    twice = next((path for path in directories if directories.count(path) > 1), None)
    if twice is not None:
        raise InputError(f"--scales '{twice}' is given twice; give every directory once")
    return [
        Variant(name, "given with --scales", "given", load_any_scales(path, model))
        for name, path in zip(given_names(directories), directories, strict=True)
    ]


def samples_seen(directories: Sequence[Path], data: DataRecipe) -> tuple[int, list[str]]:
    """How many samples of `data`, from the first, the calibrations in `directories` have read.

    The second result warns of calibrations on the same dataset in another order or cut otherwise:
    which of its samples they have read cannot be told.
    """
    seen, warnings = 0, []
    for directory in directories:
        if not (directory / CALIBRATION_FILE).exists():
            continue
        read = load_recipe(str(directory / CALIBRATION_FILE)).data
        if read.dataset != data.dataset:
            continue
        if _order(read) == _order(data):
            seen = max(seen, read.samples)
        else:
            warnings.append(
                f"'{directory}' was calibrated on {data.dataset} too, with other lengths or "
                "another seed: some of the held-out text may not be new to it"
            )
    return seen, warnings


def _order(data: DataRecipe) -> dict[str, object]:
    # built-in text is cut into samples by their length; other datasets have rows
    lengths = set() if data.dataset.startswith("builtin:") else {"seq_len"}
    return data.model_dump(exclude={"samples", "batch_size", *lengths})
