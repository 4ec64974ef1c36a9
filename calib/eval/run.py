"""Evaluate, write the report, check the conditions: what both commands do."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from calib.atomic import claimed
from calib.choices import CONTROLS, VARIANTS
from calib.errors import InputError
from calib.eval.gate import failures, parse_condition
from calib.eval.given import given_names
from calib.eval.job import evaluate
from calib.eval.output import check_report_directory, write_report
from calib.eval.summary import subjects, summarize
from calib.eval.task_files import name_tasks
from calib.recipe import Recipe


def check_evaluation(recipe: Recipe, scales: Sequence[Path]) -> None:
    """Refuse what cannot be measured before anything is loaded; `scales` may not be there yet.

    Raises:
        InputError: a condition names no variant that would be measured, or there is no such task.
    """
    wanted = recipe.evaluation
    measured = [*(wanted.variants or VARIANTS), *CONTROLS, *given_names(scales)]
    for condition in map(parse_condition, wanted.fail_if):
        if condition.variant not in (None, *measured):
            known = ", ".join(dict.fromkeys(measured))
            raise InputError(
                f"--fail-if '{condition.text}': no variant '{condition.variant}'; there are {known}"
            )
    if wanted.tasks:
        name_tasks(wanted.tasks)


def run_evaluation(
    model_name: str,
    recipe: Recipe,
    *,
    scales: Sequence[Path] = (),
    output: Path | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> tuple[dict[str, Any], list[str]]:
    """Measure what `recipe.evaluation` says; returns the report and a line per failed condition.

    Args:
        model_name: local directory, Hub id or `builtin:` name.
        recipe: what is measured, on which data, and the conditions.
        scales: calibrations to compare.
        output: directory for the report; None: it is not written.
        progress: called with what is being done.

    Raises:
        Fp8kvError: anything that a user can put right.
    """
    check_evaluation(recipe, scales)
    conditions = [parse_condition(text) for text in recipe.evaluation.fail_if]
    with nullcontext() if output is None else claimed(output, overwrite=True):
        if output is not None:
            check_report_directory(output)
        report = summarize(evaluate(model_name, recipe, scales=scales, progress=progress))
        if output is not None:
            write_report(report, output)
    failed = [line for each in conditions for line in failures(each, report, subjects(report))]
    return report, failed
