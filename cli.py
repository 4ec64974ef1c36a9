"""Command line: flags become a recipe, one call does the work. The only module that prints.

Nothing heavy is imported before a command runs, so `--help` answers at once.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
Model = Annotated[str, typer.Argument(help="Local directory, Hub id, or builtin:smollm2.")]
Device = Annotated[choices.Device | None, Flag()]
DType = Annotated[choices.DType | None, Flag(help="auto: as the checkpoint says.")]
TrustRemoteCode = Annotated[bool, Flag("--trust-remote-code", help="Run the model's code.")]
AsJson = Annotated[bool, Flag("--json", help="Print one JSON object.")]
Debug = Annotated[bool, Flag("--debug", help="Show tracebacks.")]


class Terminated(BaseException):
    """SIGTERM arrived."""


@calibrate_app.command()
@app.command()
def calibrate(
    context: typer.Context,
    model: Model,
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
    device: Device = None,
    dtype: DType = None,
    fp8_dtype: Annotated[choices.FP8Name | None, Flag(help="Default: e4m3fn (max 448).")] = None,
    headroom: Annotated[float | None, Flag(help="Multiplies every amax. Default: 1.0.")] = None,
    weights: Annotated[
        choices.Weights | None,
        Flag(help="link: hard-link the source's weights; none: scales and configs only."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    set_: Annotated[
        list[str] | None,
        Flag("--set", metavar="KEY=VALUE", help="Any recipe key, as data.column=text."),
    ] = None,
    overwrite: Annotated[bool, Flag("--overwrite", help="Replace an earlier output.")] = False,
    quiet: Annotated[bool, Flag("--quiet", help="Print nothing but errors.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Calibrate a model's FP8 KV-cache scales and write a checkpoint that engines load."""

    def work() -> None:
        from calib.flags import assignments, overrides
        from calib.job import run
        from calib.progress import progress_bar
        from calib.recipe import load_recipe

        resolved = load_recipe(recipe, {**overrides(context.params), **assignments(set_ or [])})
        with progress_bar(show=not (quiet or as_json)) as progress:
            result = run(model, resolved, output, overwrite=overwrite, progress=progress)
        if as_json:
            print(json.dumps(result.to_json()))
        elif not quiet:
            _print_result(result)

    _run(work, debug=debug)


@app.command()
def generate(
    context: typer.Context,
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    scales: Annotated[
        str | None, Flag(metavar="DIR", help="Output of fp8kv-calibrate. none: 1.0. Default: MODEL")
    ] = None,
    max_new_tokens: Annotated[int, Flag(min=1, help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, Flag(min=0.0, help="0: the likeliest token every time.")] = 0.0,
    seed: Annotated[int, Flag(help="Of the sampling.")] = 42,
    chat: Annotated[bool, Flag("--chat", help="Apply the model's chat template.")] = False,
    compare: Annotated[
        bool, Flag("--compare", help="Generate with transformers' 16-bit cache too.")
    ] = False,
    backend: Annotated[
        choices.Backend, Flag(help="auto: Triton kernels on a GPU, torch elsewhere.")
    ] = "auto",
    device: Device = None,
    dtype: DType = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt with the model's KV cache in FP8."""

    def work() -> None:
        from calib.flags import overrides
        from calib.generation import GenerationOptions, generate_text
        from calib.report import generation_lines

        options = GenerationOptions(max_new_tokens, temperature, seed, chat, compare, backend)
        result = generate_text(
            model,
            prompt,
            scales=scales,
            options=options,
            overrides=overrides(context.params),
            on_text=None if as_json else lambda text: print(text, end="", flush=True),
        )
        print(json.dumps(result.to_json()) if as_json else "\n".join(generation_lines(result)))

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
    # the libraries' own bars and advice would drown ours; read when they are imported
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
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


def _print_result(result: "Result") -> None:
    from calib.report import closing_lines
    from calib.summary import HEADINGS, table_rows

    title = f"FP8 KV-cache scales, strategy {result.recipe.strategy}"
    _print_table(title, HEADINGS, table_rows(result.layers))
    print("\n".join(closing_lines(result)))


def _print_table(title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console

    from calib.report import table

    Console().print(table(title, headings, rows))


if __name__ == "__main__":
    main()
