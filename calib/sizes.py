"""Amounts of memory as people write them."""

import re
from math import ceil

from calib.errors import InputError

_UNITS = {"B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
_BY_LOWER_CASE = {unit.lower(): factor for unit, factor in _UNITS.items()}


def parse_size(text: str) -> int:
    """Bytes of a size such as `8GiB`, `1.5 GB` or `500MB`; InputError for any other text, or 0."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    factor = _BY_LOWER_CASE.get(match[2].lower()) if match else None
    size = int(float(match[1]) * factor) if match and factor else 0
    if not size:
        raise InputError(
            f"'{text}' is not an amount of memory; give a number and one of "
            f"{', '.join(_UNITS)}, such as 8GiB"
        )
    return size


def show_size(size: int) -> str:
    """`size` bytes in GiB, or in MiB where that is less than one; rounded up, to be enough."""
    in_gib = size >= 2**30
    return f"{ceil(size * 100 / 2**30) / 100:.2f}GiB" if in_gib else f"{ceil(size / 2**20)}MiB"
