"""Text from others: sizes, conditions, and words that cannot steer a terminal."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, isfinite, nan

from calib.choices import METRICS
from calib.errors import InputError

NOT_FINITE = "not finite"
_UNITS = {"B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
_BY_LOWER_CASE = {unit.lower(): factor for unit, factor in _UNITS.items()}
_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_ALIASES = {"kl_mean": "kl"}
_CONDITION = re.compile(r"\s*(?:(?P<variant>[^:]+):)?(?P<metric>\w+)\s*(?P<op>[<>]=?)\s*(?P<limit>\S+)\s*")


def plain(text: str) -> str:
    """Text that cannot steer a terminal: names may come from files that others made."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def show_number(value: float, form: str = "{:.2g}") -> str:
    """`value` as `form` says, or in words where it is no finite number."""
    return form.format(value) if isfinite(value) else NOT_FINITE


def show_interval(low: float, high: float, form: str = "{:.2g}") -> str:
    """Both ends in brackets; empty where neither is a finite number."""
    if not (isfinite(low) or isfinite(high)):
        return ""
    return f"[{show_number(low, form)}, {show_number(high, form)}]"


def parse_size(text: str) -> int:
    """Bytes of a size such as `8GiB`, `1.5 GB` or `500MB`; InputError for any other text, or 0."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    factor = _BY_LOWER_CASE.get(match[2].lower()) if match else None
    size = int(float(match[1]) * factor) if match and factor else 0
    if not size:
        raise InputError(
            f"'{text}' is not an amount of memory; give a number and one of {', '.join(_UNITS)}, such as 8GiB"
        )
    return size


def show_size(size: int) -> str:
    """`size` bytes in GiB, or in MiB where that is less than one; rounded up, to be enough."""
    in_gib = size >= 2**30
    return f"{ceil(size * 100 / 2**30) / 100:.2f}GiB" if in_gib else f"{ceil(size / 2**20)}MiB"


def show_duration(seconds: float) -> str:
    """`seconds` in words as short as they are exact enough: 39 s, 12 min, 1.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class Condition:
    """`[variant:]metric<limit`; without a variant it applies to the user's scales."""

    text: str
    variant: str | None
    metric: str
    compare: Callable[[float, float], bool]
    limit: float


def parse_condition(text: str) -> Condition:
    """Read a condition such as `kl>0.02` or `tensor:top1<0.95`; InputError for any other text."""
    match = _CONDITION.fullmatch(text)
    allowed = f"write METRIC>NUMBER or VARIANT:METRIC<NUMBER, METRIC one of {', '.join(METRICS)}"
    metric = None if match is None else _ALIASES.get(match["metric"], match["metric"])
    if match is None or metric not in METRICS:
        raise InputError(f"--fail-if '{text}' is no condition; {allowed}")
    try:
        limit = float(match["limit"])
    except ValueError:
        limit = nan
    if not isfinite(limit):
        raise InputError(f"--fail-if '{text}': '{match['limit']}' is no finite number; {allowed}")
    return Condition(text, match["variant"], metric, _OPERATORS[match["op"]], limit)
