"""`--fail-if 'kl>0.02'`: a condition on a report, for continuous integration."""

import math

from calib.choices import REFERENCE
from calib.condition import Condition
from calib.errors import InputError
from calib.eval.schema import Figure, Report


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
