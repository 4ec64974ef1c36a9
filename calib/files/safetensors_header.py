"""The header of a safetensors file, checked, and the values of small tensors.

Format: https://github.com/huggingface/safetensors#format; 8 bytes of length, that much JSON, data.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.files.names import way_back
from calib.files.strict_json import parse_object, read_bytes, regular_size

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
_STRUCT_CODES = {"F64": "d", "F32": "f", "F16": "e", "BF16": "f"}
FLOATS = tuple(_STRUCT_CODES)  # the most precise first


@dataclass(frozen=True, slots=True)
class Entry:
    """Type and shape of a tensor, and where its bytes are, from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


def read_header(path: Path, advice: str = "") -> dict[str, Entry]:
    """Read the tensors of a safetensors file by name; InputError with `advice` where they do not fit it."""
    advice = advice or way_back(path.name)
    header, begin, end = _read_document(path, advice)
    header.pop("__metadata__", None)
    try:
        entries = {name: _parse_entry(fields, begin) for name, fields in header.items()}
        for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
            if entry.begin != begin:
                raise ValueError("its tensors overlap, or leave gaps")
            begin = entry.end
        if begin < end:
            raise ValueError(f"its tensors end at {begin:,} of {end:,} bytes")
    except ValueError as error:
        raise InputError(f"the header of '{path}' is damaged: {error}; {advice}") from None
    if begin > end:
        raise InputError(f"'{path}' is cut short: it has {end:,} of {begin:,} bytes; {advice}")
    return entries


def read_metadata(path: Path) -> dict[str, str]:
    """Read the notes that the writer of a safetensors file has put into its header."""
    notes = _read_document(path, way_back(path.name))[0].get("__metadata__")
    notes = notes if isinstance(notes, dict) else {}
    return {name: text for name, text in notes.items() if isinstance(text, str)}


def read_values(path: Path, entry: Entry) -> list[float]:
    """Read all values of a tensor; InputError unless they are floats, and few enough to be scales."""
    if entry.size > MAX_VALUES:
        raise InputError(f"'{path}' holds a scale of {entry.size:,} values, too many for any model")
    if entry.dtype not in FLOATS:
        raise InputError(f"'{path}' holds a scale of type {entry.dtype}; it must be {', '.join(FLOATS)}")
    data = read_bytes(path, entry.begin, entry.end - entry.begin)
    if entry.dtype == "BF16":  # the upper half of a float32
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    return [value for (value,) in struct.iter_unpack(f"<{_STRUCT_CODES[entry.dtype]}", data)]


def is_zero(path: Path, entry: Entry) -> bool:
    """Return whether all values of a tensor are 0, whatever its type."""
    return not any(read_bytes(path, entry.begin, entry.end - entry.begin))


def _read_document(path: Path, advice: str) -> tuple[dict[str, Any], int, int]:
    """Read the header; return it, where its data begins, and where the file ends."""
    size = regular_size(path)
    length = int.from_bytes(read_bytes(path, 0, 8), "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        needed = (
            f"and its header alone should have {length:,}" if size >= 8 else "too few for a safetensors file"
        )
        raise InputError(f"'{path}' is damaged or incomplete: it has {size:,} bytes, {needed}; {advice}")
    return parse_object(read_bytes(path, 8, length), f"the header of '{path}'"), 8 + length, size


def _parse_entry(fields: Any, data: int) -> Entry:
    """Check the fields of one tensor; `data` is where the file's data begins."""
    match fields:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
            pass
        case _:
            raise ValueError("a tensor has a dtype, a shape and two data_offsets")
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"shape {str(shape)[:80]} and offsets must be whole numbers")
    if len(shape) > 32:
        raise ValueError(f"a tensor of {len(shape)} dimensions")
    if dtype not in _BITS:
        raise ValueError(f"unknown type '{dtype[:40]}'")
    entry = Entry(dtype, tuple(shape), data + begin, data + end)
    if 8 * (end - begin) != entry.size * _BITS[dtype]:
        raise ValueError(f"{end - begin} bytes are not {dtype} {shape}")
    return entry
