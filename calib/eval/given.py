"""The scales that a user gave to be compared."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from calib.any_scales import load_any_scales
from calib.errors import InputError
from calib.eval.variants import BUILT_IN, Variant


def given_variants(directories: Sequence[Path], model: PreTrainedModel) -> list[Variant]:
    """The scales in each directory, under its name, or its path where that name is taken.

    Raises:
        InputError: a directory holds no scales, those of another model, or is given twice.
    """
    twice = next((path for path in directories if directories.count(path) > 1), None)
    if twice is not None:
        raise InputError(f"--scales '{twice}' is given twice; give every directory once")
    short = [path.resolve().name for path in directories]
    return [
        Variant(
            name if short.count(name) == 1 and name not in BUILT_IN else str(path),
            "given with --scales",
            "given",
            load_any_scales(path, model),
        )
        for name, path in zip(short, directories, strict=True)
    ]
