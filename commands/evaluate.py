"""`fp8kv eval`, also installed as `fp8kv-eval`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from calib import choices
from commands.flags import AsJson, Debug, Device, DType, Flag, Model, TrustRemoteCode
from commands.running import print_table, run


def evaluate(
    context: typer.Context,
    model: Model,
    scales: Annotated[
        list[Path] | None,
        Flag(metavar="DIR", help="Output of fp8kv-calibrate to compare; repeatable."),
    ] = None,
    variants: Annotated[
        str | None, Flag(help="Comma-separated names to keep, such as none,tensor. Default: all.")
    ] = None,
    suite: Annotated[choices.SuiteName, Flag(help="How much is measured.")] = "quick",
    backend: Annotated[
        choices.Backend, Flag(help="auto: Triton kernels on a GPU, torch elsewhere.")
    ] = "auto",
    output: Annotated[
        Path | None, Flag("-o", "--output", help="Directory for report.json and report.md.")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        Flag(metavar="CONDITION", help="Exit 1 if it holds, as 'kl>0.02' or 'tensor:top1<0.9'."),
    ] = None,
    dataset: Annotated[str, Flag(help="As for calibrate.")] = "builtin:python-docs",
    samples: Annotated[int | None, Flag(help="Held-out documents. Default: the suite's.")] = None,
    seq_len: Annotated[int | None, Flag(help="Tokens of each. Default: the suite's.")] = None,
    seed: Annotated[int | None, Flag(help="Default: 42.")] = None,
    device: Device = None,
    dtype: DType = None,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Annotated[bool, Flag("--quiet", help="Print nothing but errors.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure what an FP8 KV cache changes, with which scales, on text that no scale has seen."""

    def work() -> None:
        from calib.eval.gate import failures, parse_condition
        from calib.eval.job import evaluate as measure
        from calib.eval.output import write_report
        from calib.eval.suites import SUITES, resize
        from calib.eval.summary import subjects, summarize
        from calib.flags import overrides
        from calib.progress import progress_bar
        from calib.recipe import load_recipe

        conditions = [parse_condition(text) for text in fail_if or []]
        recipe = load_recipe(None, overrides(context.params))
        with progress_bar(show=not (quiet or as_json)) as progress:
            evaluation = measure(
                model,
                recipe,
                resize(SUITES[suite], documents=samples, seq_len=seq_len),
                scales=scales or [],
                variants=variants.split(",") if variants else None,
                backend=backend,
                progress=progress.stage,
            )
        report = summarize(evaluation)
        if output is not None:
            write_report(report, output)
        failed = [
            line for each in conditions for line in failures(each, report, subjects(report))
        ]
        _print(report, as_json=as_json, quiet=quiet)
        if failed:
            typer.echo("\n".join(f"failed: {line}" for line in failed), err=True)
            raise typer.Exit(1)

    run(work, debug=debug)


def _print(report: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    from calib.eval.markdown import HEADINGS, closing_lines, table_rows

    if as_json:
        print(json.dumps(report))
    elif not quiet:
        print_table(f"FP8 KV cache of {report['model']}", HEADINGS, table_rows(report))
        print("\n".join(closing_lines(report)))
