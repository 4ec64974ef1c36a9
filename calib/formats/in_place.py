"""Adding scales to a model's own directory: what stays, and a backup of what does not."""

import filecmp
import os
import shutil
from itertools import chain, count
from pathlib import Path

from calib.errors import InputError
from calib.files.names import JSON_FILE, SINGLE_FILE
from calib.formats import FORMATS
from calib.recipe import ExportRecipe


def check_places(output: Path | None, *, in_place: bool, overwrite: bool) -> None:
    """Refuse `in_place` together with another place, or with leave to replace what is there."""
    if in_place and (output or overwrite):
        raise InputError("--in-place writes into the model's directory; leave -o, --overwrite away")


def check_in_place(model_name: str, options: ExportRecipe) -> Path:
    """Return the directory of `model_name`; an InputError if scales cannot be added to it."""
    path, formats, refusal = local_directory(model_name), options.formats, ""
    if len(formats) > 1 or not FORMATS[formats[0]].with_weights:
        refusal = f"writes one format that is a checkpoint, not {', '.join(formats)}; use -o"
    elif options.weights != "link":
        refusal = f"leaves the weights where they are; '{options.weights}' needs -o"
    if refusal:
        raise InputError(f"--in-place {refusal}")
    return path


def local_directory(model_name: str) -> Path:
    """The directory of `model_name`; an InputError if it is none."""
    path = Path(model_name).expanduser()
    if not path.is_dir():
        raise InputError(f"--in-place writes into a local directory, which '{model_name}' is not; use -o")
    return path.resolve()


def complete(scratch: Path, model: Path) -> None:
    """Link all other files of `model` into `scratch`, which will replace it."""
    for file in _files(model):
        target = scratch / file.relative_to(model)
        # the one has another name now, the other holds scales that are no longer the model's
        gone = file.name in (SINGLE_FILE, JSON_FILE) and file.parent == model
        if not (target.exists() or target.is_symlink() or gone):
            _link(file, target)


def back_up(model: Path, scratch: Path) -> Path | None:
    """Link what `scratch` changes or drops in a directory beside `model`; None if nothing does."""
    changed = [file for file in _files(model) if not _same(file, scratch / file.relative_to(model))]
    if not changed:
        return None
    name = f"{model.name}.before-fp8kv"
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    backup = next(path for path in map(model.with_name, names) if not path.exists())
    partial = backup.with_name(f".{backup.name}.{os.getpid()}.partial")
    try:
        for file in changed:
            _link(file, partial / file.relative_to(model))
        partial.rename(backup)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return backup


def _files(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.rglob("*")) if path.is_symlink() or path.is_file()]


def _link(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # a symbolic link stays one; both directories lie side by side, so a relative one still leads
    os.link(file, target, follow_symlinks=False)


def _same(old: Path, new: Path) -> bool:
    return new.exists() and (old.samefile(new) or filecmp.cmp(old, new, shallow=False))
