"""A quantization config, whose settings are checked when they are read."""

import re
from collections.abc import Collection, Iterator
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


class QuantizationConfig(dict[str, Any]):
    """A quantization config or a section of it; null is the same as an absent setting."""

    def choice(self, key: str, choices: Collection[Any], default: Any = None) -> Any:
        """Return a setting; FormatError unless it is one of `choices`."""
        value = default if self.get(key) is None else self[key]
        # 4 and 4.0 and True are equal to Python
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            raise FormatError(f"{key} {value!r:.80} is none of {[*choices]}, {ADVICE}")
        return value

    def section(self, key: str) -> "QuantizationConfig":
        """Return a JSON object inside the config, empty where it is absent; FormatError for another value."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise FormatError(f"{one_line(key)} {value!r:.80} is not a JSON object")
        return QuantizationConfig(value or {})

    def sections(self, key: str) -> dict[str, "QuantizationConfig"]:
        """Return the JSON objects inside a section, by name."""
        section = self.section(key)
        return {name: section.section(name) for name in section}

    def group_size(self, default: int | None = None) -> int | None:
        """Return the columns of a group, or None: a group is a whole row; FormatError for no number."""
        value = self.get("group_size", default)
        if value in (None, -1):
            return None
        if type(value) is not int or value < 1:
            raise FormatError(f"group_size {value!r:.80} is not a number of columns")
        return value

    def tile(self, key: str) -> tuple[int, int]:
        """Return rows and columns of a tile, `[128, 128]` or `128x128`; FormatError for another value."""
        value: Any = self.get(key)
        sizes = value.split("x") if isinstance(value, str) else value
        is_pair = isinstance(sizes, list) and len(sizes) == 2
        if not is_pair or not all(re.fullmatch(r"[1-9][0-9]{0,8}", str(size)) for size in sizes):
            raise FormatError(f"{key} {value!r:.80} is not a pair of sizes, {ADVICE}")
        return int(sizes[0]), int(sizes[1])
