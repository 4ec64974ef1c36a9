"""Settings of a quantization config, checked one at a time."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from calib.errors import InputError, one_line

ADVICE = "which nothing here can read; give the model it was made from"


class FormatError(InputError):
    """Quantised weights that cannot be read, or that are not what their config says."""


@contextmanager
def name_subject(subject: str) -> Iterator[None]:
    """Put `subject`, a weight, config or model, in front of a FormatError."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{subject}: {one_line(error, 1000)}") from None


def check_choice(key: str, value: Any, choices: Collection[Any]) -> Any:
    """Return the `value` of a setting, which must be one of `choices`."""
    # 4 and 4.0 and True are equal to Python
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise FormatError(f"{key} {value!r:.80} is none of {[*choices]}, {ADVICE}")
    return value


def read_section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the JSON object under `key`, empty where it is absent."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise FormatError(f"{key} {value!r:.80} is not a JSON object")
    return value or {}


def read_group_size(config: Mapping[str, Any], default: int | None = None) -> int | None:
    """Return the columns of a group; None: a group is a whole row."""
    value = config.get("group_size", default)
    if value in (None, -1):
        return None
    if type(value) is not int or value < 1:
        raise FormatError(f"group_size {value!r:.80} is not a number of columns")
    return value


def read_tile(key: str, value: Any) -> tuple[int, int]:
    """Return rows and columns of a tile: `[128, 128]` or `128x128`."""
    sizes = value.split("x") if isinstance(value, str) else value
    is_pair = isinstance(sizes, list) and len(sizes) == 2
    if not is_pair or not all(re.fullmatch(r"[1-9][0-9]{0,8}", str(size)) for size in sizes):
        raise FormatError(f"{key} {value!r:.80} is not a pair of sizes, {ADVICE}")
    return int(sizes[0]), int(sizes[1])
