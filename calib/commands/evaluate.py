"""`fp8kv eval`, also installed as `fp8kv-eval`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calib import choices
from calib.commands.flags import (
    AsJson,
    DataFlag,
    Debug,
    Device,
    DType,
    Flag,
    Model,
    Quiet,
    ResourcesFlag,
    TrustRemoteCode,
)
from calib.commands.running import command, print_table

if TYPE_CHECKING:
    from calib.eval.schema import Report

DATASET = "builtin:python-docs"


@command
def evaluate(
    context: typer.Context,
    model: Model,
    scales: Annotated[
        list[Path] | None,
        Flag(metavar="DIR", help="With scales of any tool to compare; repeatable."),
    ] = None,
    variants: Annotated[
        str | None, Flag(help="Comma-separated names to keep, such as none,tensor. Default: all.")
    ] = None,
    recipe: Annotated[
        str | None, Flag(help="Recipe whose `evaluation` is meant; flags override it.")
    ] = None,
    suite: Annotated[
        choices.SuiteName | None, Flag(help="How much is measured. Default: quick.")
    ] = None,
    output: Annotated[
        Path | None, Flag("-o", "--output", help="Directory for report.html, .json and .md.")
    ] = None,
    tasks: Annotated[
        str | None, Flag(metavar="LIST", help="Of lm-eval: comma-separated names or YAML paths.")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        Flag(metavar="CONDITION", help="Exit 1 if it holds, as 'kl>0.02' or 'tensor:top1<0.9'."),
    ] = None,
    search: Annotated[
        str | None,
        Flag(metavar="KL", help="Find the fewest layers to leave in 16 bits for this KL."),
    ] = None,
    dataset: Annotated[
        str | None, Flag(help=f"As for calibrate. Default: the recipe's, or {DATASET}.")
    ] = None,
    device: Device = None,
    samples: Annotated[
        int | None, DataFlag(help="Held-out documents. Default: the suite's.")
    ] = None,
    seq_len: Annotated[int | None, DataFlag(help="Tokens of each. Default: the suite's.")] = None,
    seed: Annotated[int | None, DataFlag(help="Default: 42.")] = None,
    task_limit: Annotated[
        int | None, DataFlag(help="Documents of each task. Default: all.")
    ] = None,
    backend: Annotated[
        choices.Backend | None,
        ResourcesFlag(help="auto: Triton kernels on a GPU, torch elsewhere."),
    ] = None,
    dtype: DType = None,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure how an FP8 KV cache changes a model's output, on text that no scale has seen."""
    from calib.commands.overrides import overrides
    from calib.commands.progress_bar import progress_bar
    from calib.eval.run import run_evaluation
    from calib.recipe import load_recipe

    defaults = {} if recipe else {"data.dataset": DATASET}
    resolved = load_recipe(
        recipe, {**defaults, **overrides(context.params, ("data", "evaluation"))}
    )
    with progress_bar(show=not (quiet or as_json)) as progress:
        report, failed = run_evaluation(
            model, resolved, scales=scales or [], output=output, progress=progress.stage
        )
    print_report(report, as_json=as_json, quiet=quiet)
    fail_on(failed)


def print_report(report: "Report", *, as_json: bool, quiet: bool) -> None:
    """Print the table and what follows from it, or one JSON object."""
    from calib.eval.page.markdown import HEADINGS, closing_lines, table_rows, task_table

    if as_json:
        print(json.dumps(report.to_json()))
    elif not quiet:
        print_table(f"FP8 KV cache of {report.model}", HEADINGS, table_rows(report))
        if report.tasks:
            print_table(*task_table(report))
        print("\n".join(closing_lines(report)))


def fail_on(failed: list[str]) -> None:
    """Exit 1 if a condition holds, and say which."""
    if failed:
        typer.echo("\n".join(f"failed: {line}" for line in failed), err=True)
        raise typer.Exit(1)
