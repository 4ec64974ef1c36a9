"""`--fail-if 'kl>0.02'`: a condition on a report, for continuous integration."""

import math
from collections.abc import Iterable

from calib.choices import REFERENCE
from calib.errors import InputError
from calib.eval.schema import Figure, Report
from calib.text import Condition


def check_variant(condition: Condition, measured: Iterable[str]) -> None:
    """Check that a condition names a variant that is `measured`, or none.

    Raises:
        InputError: it names another one.
    """
    known = [name for name in dict.fromkeys(measured) if name != REFERENCE]
    if condition.variant not in (None, *known):
        raise InputError(
            f"--fail-if '{condition.text}': no variant '{condition.variant}'; there are "
            f"{', '.join(known)}"
        )


def failures(condition: Condition, report: Report, subjects: list[str]) -> list[str]:
    """Name each variant that meets the condition, one line each.

    A condition without a variant is about `subjects`. NaN meets every condition.

    Raises:
        InputError: the report has no such variant, or did not measure the metric.
    """
    check_variant(condition, report.variants)
    names = subjects if condition.variant is None else [condition.variant]
    if not names:
        raise InputError(f"--fail-if '{condition.text}' names no variant, and none was measured")
    found = []
    for name in names:
        figure: Figure | None = getattr(report.variants[name], condition.metric)
        if figure is None:
            raise InputError(
                f"--fail-if '{condition.text}': {condition.metric} was not measured for '{name}'"
            )
        value = figure.value
        if math.isnan(value) or condition.compare(value, condition.limit):
            found.append(f"{name}: {condition.metric} is {value:.4g} ({condition.text})")
    return found
