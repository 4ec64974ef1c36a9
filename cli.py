"""Command line: flags become a recipe, one call does the work. The only module that prints.

Nothing heavy is imported before a command runs, so `--help` answers at once.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calib import choices

if TYPE_CHECKING:
    from calib.job import Result

app = typer.Typer(
    name="fp8kv",
    help="FP8 KV-cache scales for large language models: measure, export, check.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
calibrate_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Flag = typer.Option

# flag -> recipe key
_RECIPE_KEYS = {
    **{name: name for name in ("strategy", "targets", "device", "dtype", "fp8_dtype", "headroom")},
    **{name: f"data.{name}" for name in ("dataset", "samples", "seq_len", "batch_size", "seed")},
    **{name: f"export.{name}" for name in ("reduce", "tp_size", "weights")},
    "observer": "observer.name",
    "format": "export.formats",
    "trust_remote_code": "trust_remote_code",
}


class Terminated(BaseException):
    """SIGTERM arrived."""


@calibrate_app.command()
@app.command()
def calibrate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Local directory, Hub id, or builtin:smollm2.")],
    output: Annotated[
        Path | None, Flag("-o", "--output", help="Default: ./<model>-fp8kv-<strategy>.")
    ] = None,
    recipe: Annotated[
        str | None,
        Flag(help="Bundled name (see `fp8kv recipes`), YAML file, or a saved calibration."),
    ] = None,
    strategy: Annotated[choices.Strategy | None, Flag(help="Which values share a scale.")] = None,
    observer: Annotated[choices.ObserverName | None, Flag(help="How an amax is chosen.")] = None,
    targets: Annotated[choices.Targets | None, Flag(help="qkv adds query scales.")] = None,
    format: Annotated[
        list[str] | None,
        Flag(
            metavar=f"[{'|'.join(choices.FORMATS)}]",
            help="Repeatable; several fill DIR/<format>/ each. Default: vllm.",
        ),
    ] = None,
    reduce: Annotated[
        choices.Reduce | None, Flag(help="max: one scale per layer for engines that take no more.")
    ] = None,
    tp_size: Annotated[int | None, Flag(help="Ranks in kv_cache_scales.json.")] = None,
    dataset: Annotated[
        str | None,
        Flag(
            help="Hub id, .jsonl/.json/.parquet/.txt/directory, builtin:python-docs, self, random."
        ),
    ] = None,
    samples: Annotated[int | None, Flag(help="Default: 512.")] = None,
    seq_len: Annotated[int | None, Flag(help="Tokens per sample at most. Default: 2048.")] = None,
    batch_size: Annotated[str | None, Flag(help="Samples per forward pass, or auto.")] = None,
    seed: Annotated[int | None, Flag(help="Default: 42.")] = None,
    device: Annotated[choices.Device | None, Flag()] = None,
    dtype: Annotated[choices.DType | None, Flag(help="auto: as the checkpoint says.")] = None,
    fp8_dtype: Annotated[choices.FP8Name | None, Flag(help="Default: e4m3fn (max 448).")] = None,
    headroom: Annotated[float | None, Flag(help="Multiplies every amax. Default: 1.0.")] = None,
    weights: Annotated[
        choices.Weights | None,
        Flag(help="link: hard-link the source's weights; none: scales and configs only."),
    ] = None,
    trust_remote_code: Annotated[
        bool, Flag("--trust-remote-code", help="Run the model's code.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        Flag("--set", metavar="KEY=VALUE", help="Any recipe key, as data.column=text."),
    ] = None,
    overwrite: Annotated[bool, Flag("--overwrite", help="Replace an earlier output.")] = False,
    quiet: Annotated[bool, Flag("--quiet", help="Print nothing but errors.")] = False,
    as_json: Annotated[bool, Flag("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, Flag("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Calibrate a model's FP8 KV-cache scales and write a checkpoint that engines load."""

    def work() -> None:
        from transformers.utils import logging

        from calib.job import run
        from calib.progress import progress_bar
        from calib.recipe import load_recipe

        logging.disable_progress_bar()
        resolved = load_recipe(recipe, {**_overrides(context.params), **_assignments(set_ or [])})
        with progress_bar(show=not (quiet or as_json)) as progress:
            result = run(model, resolved, output, overwrite=overwrite, progress=progress)
        if as_json:
            print(json.dumps(result.to_json()))
        elif not quiet:
            _print_result(result)

    _run(work, debug=debug)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this recipe in full.")] = None,
) -> None:
    """List the bundled recipes, or print one in full."""

    def work() -> None:
        from calib.recipe import load_recipe, recipe_names, recipe_text

        if name:
            print(recipe_text(name), end="")
            return
        rows = [(each, load_recipe(each).description) for each in recipe_names()]
        _print_table("Bundled recipes", ("recipe", "what it does"), rows)

    _run(work)


@app.command()
def doctor() -> None:
    """Say what this machine can run: GPU, FP8 support, Triton, versions."""

    def work() -> None:
        from calib.doctor import examine

        _print_table("This machine", ("what", "found"), examine())

    _run(work)


def main() -> None:
    """Entry point of `fp8kv`."""
    app()


def calibrate_main() -> None:
    """Entry point of `fp8kv-calibrate`."""
    calibrate_app()


def _run(work: Callable[[], None], *, debug: bool = False) -> None:
    """Run a command; turn what a user can put right into one line and an exit status."""
    signal.signal(signal.SIGTERM, _terminate)
    _quieten()
    from calib.errors import Fp8kvError

    try:
        work()
    except Fp8kvError as error:
        if debug:
            raise
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("interrupted; nothing was written", 130)
    except Terminated:
        _fail("terminated; nothing was written", 2)


def _fail(message: str, status: int) -> None:
    print(f"fp8kv: {message}", file=sys.stderr)
    raise typer.Exit(status)


def _terminate(signum: int, frame: object) -> None:
    raise Terminated


def _quieten() -> None:
    # the libraries' own bars and advice would drown ours; read when they are imported
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def _overrides(params: dict[str, Any]) -> dict[str, Any]:
    given = {key: params[flag] for flag, key in _RECIPE_KEYS.items() if _was_given(params[flag])}
    batch_size = given.get("data.batch_size", "auto")
    return {**given, "data.batch_size": int(batch_size)} if batch_size.isdecimal() else given


def _was_given(value: object) -> bool:
    # 0 is a value, and equals False
    return value is not None and value is not False and value not in ((), [])


def _assignments(pairs: list[str]) -> dict[str, Any]:
    import yaml

    from calib.errors import InputError

    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise InputError(f"--set takes KEY=VALUE, such as data.column=text; got '{pair}'")
        found[key] = yaml.safe_load(value)
    return found


def _print_result(result: "Result") -> None:
    from calib.report import closing_lines
    from calib.summary import HEADINGS, table_rows

    title = f"FP8 KV-cache scales, strategy {result.recipe.strategy}"
    _print_table(title, HEADINGS, table_rows(result.layers))
    print("\n".join(closing_lines(result)))


def _print_table(title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    numeric = len(headings) > 2
    for heading in headings:
        table.add_column(heading, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
