"""JSON of files that anyone may have written: bounded, and read in one way only."""

import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn

from calib.errors import InputError, one_line

# the index of a model of a trillion parameters takes 20 MB
MAX_BYTES = 64 << 20
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file, as `parse_object` reads it from text; refuse huge files."""
    size = regular_size(path)
    if size > MAX_BYTES:
        raise InputError(f"'{path}' has {size:,} bytes; no such file has more than {MAX_BYTES:,}")
    return parse_object(read_bytes(path), f"'{path}'")


def read_optional(path: Path) -> dict[str, Any] | None:
    """Read a JSON object from a file; None where the file is absent."""
    return read_object(path) if path.exists() else None


def regular_size(path: Path) -> int:
    """Return the bytes of a file or of a link to one; InputError for others, and for a Git LFS pointer."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"'{path}' is not a file")
    if read_bytes(path, 0, len(_LFS_POINTER)) == _LFS_POINTER:
        raise InputError(
            f"'{path}' is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository"
        )
    return path.stat().st_size


def read_bytes(path: Path, begin: int = 0, size: int = -1) -> bytes:
    """Read `size` bytes of a file, or all; InputError where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(size)
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}") from None


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; `where` names it in errors.

    Raises:
        InputError: it is not UTF-8, JSON or an object, or not the same to every parser: a key twice,
            NaN, Infinity, numbers beyond a float, or nesting beyond reason.
    """
    try:
        document = json.loads(
            text.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
    except RecursionError:
        raise InputError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{where} is not JSON as every program reads it: {one_line(error, 200)}") from None
    if not isinstance(document, dict):
        raise InputError(f"{where} must hold a JSON object, got {type(document).__name__}")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in pairs:
        if key in document:
            raise ValueError(f"the key '{key[:80]}' is there twice")
        document[key] = value
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is not JSON; a config has {{"__float__": "{name}"}} for it')


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is beyond any float")
    return value


def json_text(document: Any, **form: Any) -> str:
    """Return `document` as JSON, with null for numbers that are not finite; `form` as of `json.dumps`."""
    return json.dumps(_nulls_for_infinite(document), allow_nan=False, **form)


def exact_json_text(document: Any, name: str, **form: Any) -> str:
    """Return `document`, called `name`, as JSON; InputError where a number is not finite."""
    try:
        return json.dumps(document, allow_nan=False, **form)
    except ValueError as error:
        raise InputError(f"{name} cannot be written as JSON: {error}; calibrate again") from None


def _nulls_for_infinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _nulls_for_infinite(item) for key, item in value.items()}
    return [*map(_nulls_for_infinite, value)] if isinstance(value, list | tuple) else value
