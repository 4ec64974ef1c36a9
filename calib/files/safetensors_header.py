"""The header of a safetensors file, checked, and the values of small tensors.

Format: https://github.com/huggingface/safetensors#format; 8 bytes of length, that much JSON, data.
"""

import math
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.files.strict_json import parse_object, regular_size

# safetensors itself refuses more
MAX_HEADER_BYTES = 100_000_000
# no scale per head, nor per channel, has more values
MAX_VALUES = 1 << 16
_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
FLOATS = ("F64", "F32", "F16", "BF16")  # the most precise first


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its type, its shape, and where its bytes are, from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, by name; an InputError where they do not fit the file."""
    header, data, size = _read_object(path)
    header.pop("__metadata__", None)
    try:
        entries = {name: _entry(fields, data) for name, fields in header.items()}
        _check_layout(entries.values(), data, size)
    except ValueError as error:
        raise InputError(f"the header of '{path}' is damaged: {error}; download it again") from None
    return entries


def read_metadata(path: Path) -> dict[str, str]:
    """What the writer of a safetensors file has noted in its header."""
    found = _read_object(path)[0].get("__metadata__")
    found = found if isinstance(found, dict) else {}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _read_object(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header; where its data begins, and where the file ends."""
    size = regular_size(path)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise InputError(
                    f"'{path}' is not a whole safetensors file: {size:,} bytes, and a header of "
                    f"{length:,}; download it again"
                )
            text = file.read(length)
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}") from None
    return parse_object(text, f"the header of '{path}'"), 8 + length, size


def read_values(path: Path, entry: Entry) -> list[float]:
    """All values of a tensor; an InputError if they are no floats, or too many to be scales."""
    if entry.size > MAX_VALUES:
        raise InputError(f"'{path}' holds a scale of {entry.size:,} values, too many for any model")
    if entry.dtype not in FLOATS:
        raise InputError(f"'{path}' holds a scale of type {entry.dtype}; it must be {', '.join(FLOATS)}")
    try:
        with path.open("rb") as file:
            file.seek(entry.begin)
            return _decode(file.read(entry.end - entry.begin), entry.dtype)
    except OSError as error:
        raise InputError(f"cannot read a scale of '{path}': {error.strerror}") from None


def is_zero(path: Path, entry: Entry) -> bool:
    """Whether all values of a tensor are 0, whatever its type."""
    try:
        with path.open("rb") as file:
            file.seek(entry.begin)
            return not any(file.read(entry.end - entry.begin))
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}") from None


def _entry(fields: Any, data: int) -> Entry:
    match fields:
        case {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, end]}:
            pass
        case _:
            raise ValueError("a tensor has a dtype, a shape and two data_offsets")
    numbers = [*shape, begin, end]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        raise ValueError(f"shape {str(shape)[:80]} and offsets must be whole numbers")
    if len(shape) > 32:
        raise ValueError(f"a tensor of {len(shape)} dimensions")
    entry = Entry(str(dtype), tuple(shape), data + begin, data + end)
    if entry.dtype not in _BITS:
        raise ValueError(f"unknown type '{entry.dtype[:40]}'")
    if 8 * (end - begin) != entry.size * _BITS[entry.dtype]:
        raise ValueError(f"{end - begin} bytes are not {dtype} {shape}")
    return entry


def _check_layout(entries: Iterable[Entry], data: int, size: int) -> None:
    position = data
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            raise ValueError("its tensors overlap, or leave gaps")
        position = entry.end
    if position != size:
        raise ValueError(f"its tensors end at {position:,} of {size:,} bytes")


def _decode(data: bytes, dtype: str) -> list[float]:
    if dtype == "BF16":
        # the upper half of a float32
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
        dtype = "F32"
    if dtype == "F16":
        return [*struct.unpack(f"<{len(data) // 2}e", data)]
    return [*map(float, array({"F32": "f", "F64": "d"}[dtype], data))]
