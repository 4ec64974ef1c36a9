"""Text of sizes, numbers, layers and conditions: read from a user, shown on a terminal."""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite, nan
from unicodedata import category

from calib.choices import METRICS
from calib.errors import InputError

NOT_FINITE = "not finite"
_UNITS = {"B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
# variant, metric, operator, limit
_CONDITION = re.compile(r"\s*(?:([^:]+):)?(\w+)\s*([<>]=?)\s*(\S+)\s*")


def plain(text: str) -> str:
    """Return text that cannot steer a terminal: names may come from files that others made."""
    return "".join(c if c.isprintable() or category(c) == "Zs" else "\N{REPLACEMENT CHARACTER}" for c in text)


def show_number(value: float, form: str = "{:.2g}") -> str:
    """Format `value` by `form`, or in words where it is not finite."""
    return form.format(value) if isfinite(value) else NOT_FINITE


def show_interval(low: float, high: float, form: str = "{:.2g}") -> str:
    """Format both ends in brackets; return nothing where neither is finite."""
    return f"[{show_number(low, form)}, {show_number(high, form)}]" if isfinite(low) or isfinite(high) else ""


def show_layers(indices: Sequence[int | str]) -> str:
    """Name layers, the first eight by number."""
    ending = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices[:8]))}{ending}"


def show_size(size: int) -> str:
    """Format `size` bytes in GiB, or in MiB where that is less than one; rounded up, to be enough."""
    return f"{ceil(size * 100 / 2**30) / 100:.2f}GiB" if size >= 2**30 else f"{ceil(size / 2**20)}MiB"


def show_duration(seconds: float) -> str:
    """Format `seconds` as briefly as they are exact enough: 39 s, 12 min, 1.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `8GiB`, `1.5 GB` or `500MB`; raise an InputError for others."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    factors = [factor for unit, factor in _UNITS.items() if match and unit.lower() == match[2].lower()]
    size = int(float(match[1]) * factors[0]) if match and factors else 0
    if not size:
        raise InputError(
            f"'{text}' is not an amount of memory; give a number and one of {', '.join(_UNITS)}, such as 8GiB"
        )
    return size


@dataclass(frozen=True)
class Condition:
    """The condition `[variant:]metric<limit`; without a variant it applies to the user's scales."""

    text: str
    variant: str | None
    metric: str
    compare: Callable[[float, float], bool]
    limit: float


def parse_condition(text: str, metrics: Sequence[str] = METRICS) -> Condition:
    """Read a condition such as `kl>0.02` or `tensor:top1<0.95`; raise an InputError for others."""
    match = _CONDITION.fullmatch(text)
    variant, metric, operation, limit = match.groups() if match else (None, "", "", "nan")
    metric = "kl" if metric == "kl_mean" else metric
    try:
        number = float(limit)
    except ValueError:
        number = nan
    if metric not in metrics or not isfinite(number):
        by_variant = " or VARIANT:METRIC<NUMBER" if metrics is METRICS else ""
        raise InputError(
            f"--fail-if '{text}' is not a condition; write METRIC>NUMBER{by_variant}, with a finite number, "
            f"METRIC one of {', '.join(metrics)}"
        )
    return Condition(text, variant, metric, _OPERATORS[operation], number)
