"""`fp8kv eval`, also installed as `fp8kv-eval`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calib import choices
from calib.commands.flags import (
    AllowFewTokens,
    AsJson,
    DataFlag,
    Debug,
    Device,
    DType,
    Flag,
    Model,
    ProgressFlag,
    Quiet,
    ResourcesFlag,
    Seed,
    TrustRemoteCode,
    Version,
)
from calib.commands.running import command, print_json, print_lines, print_table
from calib.files.text import plain

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from calib.evaluate.report import Report
    from calib.progress import Progress
    from calib.recipe import Recipe

DATASET = "builtin:python-docs"


@command
def evaluate(
    context: typer.Context,
    model: Model,
    scales: Annotated[
        list[Path] | None, Flag("Scales of any tool to compare; repeatable.", metavar="DIR")
    ] = None,
    variants: Annotated[str | None, Flag("Names to keep, such as none,tensor. Default: all.")] = None,
    caches: Annotated[str | None, Flag("Types of caches beside: names, or all.", metavar="NAME,...")] = None,
    recipe: Annotated[str | None, Flag("Recipe with an `evaluation` section; flags override it.")] = None,
    suite: Annotated[choices.SuiteName | None, Flag("How much to measure. Default: quick.")] = None,
    output: Annotated[
        Path | None, Flag("Directory for report.html, .json and .md.", "-o", "--output")
    ] = None,
    tasks: Annotated[
        str | None, Flag("lm-eval tasks: comma-separated names or YAML paths.", metavar="LIST")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        Flag("Exit 1 if it holds, as 'kl>0.02' or 'tensor:top1<0.9'.", metavar="CONDITION"),
    ] = None,
    search: Annotated[
        str | None, Flag("Find the fewest layers to leave in 16 bits for this KL.", metavar="KL")
    ] = None,
    dataset: Annotated[str | None, Flag(f"As for calibrate. Default: the recipe's, or {DATASET}.")] = None,
    also: Annotated[
        list[str] | None,
        Flag("Other text to read as well: a dataset, repeatable; or all.", metavar="DATASET"),
    ] = None,
    device: Device = None,
    samples: Annotated[int | None, DataFlag("Held-out documents. Default: the suite's.")] = None,
    seq_len: Annotated[int | None, DataFlag("Tokens per document. Default: the suite's.")] = None,
    allow_few_tokens: AllowFewTokens = False,
    seed: Seed = None,
    task_limit: Annotated[int | None, DataFlag("Documents per task. Default: all.")] = None,
    backend: Annotated[
        choices.Backend | None, ResourcesFlag("auto: Triton on a GPU, torch elsewhere.")
    ] = None,
    attention: Annotated[
        choices.AttentionMode | None,
        Flag(
            "Engine whose attention to FP8 caches is simulated; vllm_triton_fp8: on NVIDIA, from "
            "vLLM 0.33 on AMD. Default: exact, none."
        ),
    ] = None,
    dtype: DType = None,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    progress: ProgressFlag = "auto",
    as_json: AsJson = False,
    debug: Debug = False,
    version: Version = False,
) -> None:
    """Measure how an FP8 KV cache changes a model's output, on text that no scale has seen."""
    from calib.commands.overrides import overrides
    from calib.commands.progress_bar import progress_bar
    from calib.recipe import load_recipe

    defaults = {} if recipe else {"data.dataset": DATASET}
    given = overrides(context.params, ("data", "evaluation"))
    resolved = load_recipe(recipe, {**defaults, **given})
    bar = progress_bar(progress, quiet=quiet, as_json=as_json)
    silent = quiet or as_json
    report, failed = measure(model, resolved, scales or [], output, bar, silent=silent)
    if as_json:
        print_json(report.to_json())
    fail_on(failed)


def measure(
    model: str,
    recipe: "Recipe",
    scales: list[Path],
    output: Path | None,
    bar: "AbstractContextManager[Progress]",
    *,
    silent: bool,
) -> "tuple[Report, list[str]]":
    """Evaluate behind `bar`; unless `silent`, print the tables and what follows from them."""
    from calib.evaluate.page.markdown import HEADINGS, closing_lines, table_rows, task_table, title
    from calib.evaluate.page.other_tables import OTHER_HEADINGS, printed_tables
    from calib.evaluate.run import run_evaluation

    with bar as progress:
        report, failed = run_evaluation(model, recipe, scales=scales, output=output, progress=progress)
    if not silent:
        print_table(title(report), HEADINGS, table_rows(report))
        for table in printed_tables(report):
            print_table(f"Other text, '{table.name}'", OTHER_HEADINGS, table.rows)
        if report.tasks:
            print_table(*task_table(report))
        print_lines(closing_lines(report))
    return report, failed


def fail_on(failed: list[str]) -> None:
    """Exit 1 if a condition holds, and say which."""
    if failed:
        typer.echo("\n".join(plain(f"failed: {line}") for line in failed), err=True)
        raise typer.Exit(1)
