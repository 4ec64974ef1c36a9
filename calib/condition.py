"""Conditions on an evaluation, such as `kl>0.02`, for `--fail-if` and for recipes."""

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from calib.choices import METRICS
from calib.errors import InputError

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_ALIASES = {"kl_mean": "kl"}
_CONDITION = re.compile(
    r"\s*(?:(?P<variant>[^:]+):)?(?P<metric>\w+)\s*(?P<op>[<>]=?)\s*(?P<limit>\S+)\s*"
)


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
        limit = math.nan
    if not math.isfinite(limit):
        raise InputError(f"--fail-if '{text}': '{match['limit']}' is no finite number; {allowed}")
    return Condition(text, match["variant"], metric, _OPERATORS[match["op"]], limit)
