"""`--fail-if 'kl>0.02'`: a condition on a report, for continuous integration."""

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from calib.choices import METRICS, REFERENCE
from calib.errors import InputError
from calib.eval.schema import Figure, Report

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
    """`[variant:]metric<limit`; without a variant it is about what the user asked for."""

    text: str
    variant: str | None
    metric: str
    compare: Callable[[float, float], bool]
    limit: float


def parse_condition(text: str) -> Condition:
    """Read a condition such as `kl>0.02` or `tensor:top1<0.95`.

    Raises:
        InputError: it is none.
    """
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


def failures(condition: Condition, report: Report, subjects: list[str]) -> list[str]:
    """One line for each variant that meets the condition; `subjects` are meant where it names none.

    What is not a number meets every condition: nobody has seen that it is good.

    Raises:
        InputError: the report has no such variant, or did not measure the metric.
    """
    names = subjects if condition.variant is None else [condition.variant]
    if not names:
        raise InputError(f"--fail-if '{condition.text}' names no variant, and none was measured")
    found = []
    for name in names:
        row = report.variants.get(name)
        if row is None or name == REFERENCE:
            known = ", ".join(n for n in report.variants if n != REFERENCE)
            raise InputError(
                f"--fail-if '{condition.text}': no variant '{name}'; there are {known}"
            )
        figure: Figure | None = getattr(row, condition.metric)
        if figure is None:
            raise InputError(
                f"--fail-if '{condition.text}': {condition.metric} was not measured for '{name}'"
            )
        value = figure.value
        if math.isnan(value) or condition.compare(value, condition.limit):
            found.append(f"{name}: {condition.metric} is {value:.4g} ({condition.text})")
    return found
