"""JSON from files that anyone may have written: bounded, and read in one way only."""

import json
import math
import stat
from pathlib import Path
from typing import Any, NoReturn

from calib.errors import InputError

# the index of a model of a trillion parameters takes 20 MB
MAX_BYTES = 64 << 20
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file, as `parse_object` reads it from text."""
    size = regular_size(path)
    if size > MAX_BYTES:
        raise InputError(f"'{path}' has {size:,} bytes; no such file has more than {MAX_BYTES:,}")
    try:
        return parse_object(path.read_bytes(), f"'{path}'")
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}") from None


def regular_size(path: Path) -> int:
    """Bytes of a file or of a link to one.

    An InputError for a directory, pipe or device, and for what Git LFS leaves in a file's place.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise InputError(f"'{path}' is not a file")
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise InputError(
                    f"'{path}' is a Git LFS pointer, not the file itself; run `git lfs pull` in "
                    "its repository"
                )
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}") from None
    return found.st_size


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; `where` names it in errors.

    An InputError if it is no UTF-8, JSON or object, or not the same to every parser: a key twice,
    NaN, Infinity, numbers beyond a float, or nesting beyond reason.
    """
    try:
        document = json.loads(
            text.decode(),
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise InputError(f"{where} is nested too deeply") from None
    except (ValueError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{where} is not JSON as every program reads it: {reason}") from None
    if not isinstance(document, dict):
        raise InputError(f"{where} must hold a JSON object, got {type(document).__name__}")
    return document


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key '{twice[:80]}' is there twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is not JSON; transformers writes {{"__float__": "{name}"}}')


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is beyond any float")
    return value


def json_text(document: Any, **form: Any) -> str:
    """Return `document` as JSON, with null for numbers that are not finite; `form` as of `json.dumps`."""
    return json.dumps(_with_nulls(document), allow_nan=False, **form)


def exact_json_text(document: Any, what: str, **form: Any) -> str:
    """Return `document` as JSON; InputError, which begins with `what`, where a number is not finite."""
    try:
        return json.dumps(document, allow_nan=False, **form)
    except ValueError as error:
        raise InputError(f"{what} cannot be written as JSON: {error}; calibrate again") from None


def _with_nulls(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _with_nulls(item) for key, item in value.items()}
    return [*map(_with_nulls, value)] if isinstance(value, list | tuple) else value
