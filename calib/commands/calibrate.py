"""`fp8kv calibrate`, also installed as `fp8kv-calibrate`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calib import choices
from calib.commands.evaluate import fail_on, measure
from calib.commands.flags import (
    AllowFewTokens,
    AsJson,
    DataFlag,
    Debug,
    Device,
    DType,
    Flag,
    Model,
    OutputFlag,
    Overwrite,
    ProgressFlag,
    ResourcesFlag,
    ScalesFlag,
    Seed,
    TrustRemoteCode,
    Version,
)
from calib.commands.running import command, print_json, print_lines, print_table, warn

if TYPE_CHECKING:
    from calib.formats.output import Result
    from calib.recipe import Recipe
    from calib.scales.summary import LayerSummary

_FORMATS = f"[{'|'.join(choices.FORMATS)}]"
_HEADINGS = ("layer", "K amax", "V amax", "K scale", "V scale", "K range used", "V range used")


@command
def calibrate(
    context: typer.Context,
    model: Model,
    output: Annotated[Path | None, Flag("Default: ./<model>-fp8kv-<strategy>.", "-o", "--output")] = None,
    recipe: Annotated[
        str | None, Flag("Bundled name (see `fp8kv recipes`), YAML file, or a saved calibration.")
    ] = None,
    strategy: Annotated[choices.Strategy | None, Flag("Which values share a scale.")] = None,
    format: Annotated[
        list[str] | None,
        Flag("Repeatable; several fill DIR/<format>/ each. Default: vllm.", metavar=_FORMATS),
    ] = None,
    dataset: Annotated[
        str | None,
        Flag("Hub id, .jsonl/.json/.parquet/.txt/directory, builtin:NAME, self, random."),
    ] = None,
    samples: Annotated[int | None, Flag("Number of samples. Default: 512.")] = None,
    seq_len: Annotated[
        int | None, Flag("Tokens per sample; a long document is several. Default: 2048.")
    ] = None,
    device: Device = None,
    evaluate: Annotated[bool, Flag("Then run the recipe's `evaluation`.", "--evaluate")] = False,
    set_: Annotated[
        list[str] | None, Flag("Any recipe key, as data.column=text.", "--set", metavar="KEY=VALUE")
    ] = None,
    until: Annotated[
        float | None,
        DataFlag("Stop where more text is expected to add less than this share, such as 0.05."),
    ] = None,
    allow_few_tokens: AllowFewTokens = False,
    batch_size: Annotated[str | None, DataFlag("Samples per forward pass, or auto.")] = None,
    seed: Seed = None,
    observer: Annotated[choices.ObserverName | None, ScalesFlag("How an amax is chosen.")] = None,
    targets: Annotated[choices.Targets | None, ScalesFlag("qkv adds query scales.")] = None,
    reduce: Annotated[
        choices.Reduce | None, ScalesFlag("max: write one scale per layer, the largest.")
    ] = None,
    fp8_dtype: Annotated[choices.FP8Name | None, ScalesFlag("Default: e4m3fn (max 448).")] = None,
    headroom: Annotated[
        str | None,
        ScalesFlag(
            "Multiplies every amax; auto: by layer, to clip one token in a million. Default: 1.0.",
            metavar="FACTOR|auto",
        ),
    ] = None,
    center_keys: Annotated[
        bool, ScalesFlag("Subtract K's mean per channel; for --format fp8kv.", "--center-keys")
    ] = False,
    tp_size: Annotated[int | None, OutputFlag("Ranks in kv_cache_scales.json.")] = None,
    weights: Annotated[
        choices.Weights | None,
        OutputFlag("link: hard-link the source's weights; none: scales and configs only."),
    ] = None,
    in_place: Annotated[
        bool, OutputFlag("Add to the model's directory; back up what is replaced.", "--in-place")
    ] = False,
    overwrite: Overwrite = False,
    quiet: Annotated[
        bool, OutputFlag("Print errors, and doubts that an engine loads the scales.", "--quiet")
    ] = False,
    progress: ProgressFlag = "auto",
    as_json: AsJson = False,
    debug: Debug = False,
    dtype: DType = None,
    offload: Annotated[
        choices.Offload | None,
        ResourcesFlag("layerwise: one layer in memory at a time. auto: if the weights do not fit."),
    ] = None,
    max_memory: Annotated[
        str | None, ResourcesFlag("Largest resident memory, such as 8GiB.", metavar="SIZE")
    ] = None,
    resume: Annotated[
        bool, ResourcesFlag("Continue where the same command was stopped.", "--resume")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    version: Version = False,
) -> None:
    """Calibrate a model's FP8 KV-cache scales and write a checkpoint that engines load."""
    from calib.capture.processes import is_first_process
    from calib.commands.overrides import assignments, overrides
    from calib.commands.progress_bar import progress_bar
    from calib.job import run as run_job
    from calib.recipe import load_recipe

    resolved = load_recipe(recipe, {**overrides(context.params), **assignments(set_ or [])})
    silent = quiet or as_json
    if evaluate:
        _check_evaluation(model, resolved, output, in_place=in_place)
    hidden = quiet or not is_first_process()
    with progress_bar(progress, quiet=hidden, as_json=as_json) as reported:
        result = run_job(
            model,
            resolved,
            output,
            in_place=in_place,
            overwrite=overwrite,
            resume=resume,
            progress=reported,
        )
    if result is None:  # the first process says what was done
        return
    if not silent:
        print_result(result)
    elif not as_json:
        warn(result.doubts)
    printed = result.to_json()
    failed: list[str] = []
    if evaluate:
        scales = [next(iter(result.directories.values()))]
        beside = result.output / "evaluation"
        bar = progress_bar(progress, quiet=quiet, as_json=as_json)
        evaluation, failed = measure(model, resolved, scales, beside, bar, silent=silent)
        printed["evaluation"] = evaluation.to_json()
    if as_json:
        print_json(printed)
    fail_on(failed)


def _check_evaluation(model: str, recipe: "Recipe", output: Path | None, *, in_place: bool) -> None:
    # a gate or a task that is none should be found before hours of calibration
    from calib.evaluate.run import check_evaluation
    from calib.job import default_output
    from calib.scales.plot import check_can_draw

    check_can_draw("--evaluate")
    path = Path(model) if in_place else output or default_output(model, recipe.strategy)
    formats = recipe.export.formats
    check_evaluation(recipe, [path / formats[0] if len(formats) > 1 else path])


def print_result(result: "Result", *, as_json: bool = False) -> None:
    """Print a row per layer, warnings, and how to serve what was written; or all as JSON."""
    if as_json:
        print_json(result.to_json())
        return
    print_table(_title(result), _HEADINGS, table_rows(result.written_layers))
    print_lines(closing_lines(result))


def _title(result: "Result") -> str:
    """Name what the table shows: the first format's scales, or values of an NVFP4 cache."""
    from calib.files.cache_type import FP8_DIVISOR
    from calib.formats import FORMATS

    first, *others = result.directories
    if FORMATS[first].nvfp4:
        what = f"Values of an NVFP4 cache (absmax / {FP8_DIVISOR * FORMATS[first].over_written:g})"
    else:
        what = "FP8 KV-cache scales"
    differ = [n for n in others if FORMATS[n].over_written != FORMATS[first].over_written]
    only = f", as format {first} holds them" if differ else ""
    return f"{what}, strategy {result.recipe.strategy}{only}"


def table_rows(layers: "list[LayerSummary]") -> list[tuple[str, ...]]:
    """One row per layer."""
    return [
        (
            str(row.layer_idx),
            *(f"{x:.4g}" for x in (row.k_amax, row.v_amax, row.k_scale, row.v_scale)),
            *(f"{share:.0%}" for share in (row.k_range_used, row.v_range_used)),
        )
        for row in layers
    ]


def closing_lines(result: "Result") -> list[str]:
    """Warnings, speed, where the output is, how to serve it."""
    from calib.formats import FORMATS
    from calib.formats.card import NO_WEIGHTS, engine_of, serve_command, written_strategy

    strategy = written_strategy(result.recipe.strategy, result.recipe.export.reduce)
    lines = [f"warning: {warning}" for warning in result.warnings]
    lines += ["", *result.notes, _speed(result), f"written to {result.output}"]
    if result.backup:
        lines.append(f"the files that were replaced are in {result.backup}")
    for name, directory in result.directories.items():
        form = FORMATS[name]
        if form.note:
            lines.append(f"note ({name}): {form.note}")
        if form.with_weights and result.recipe.export.weights == "none":
            lines.append(f"note ({name}): {NO_WEIGHTS}")
        if form.serve:
            flags = result.flags.get(name, "")
            command_line = serve_command(name, directory, strategy, flags)
            lines += ["", f"serve with {engine_of(name, flags)}:", f"  {command_line}"]
    return [*lines, "", _next_step(result)]


def _next_step(result: "Result") -> str:
    """Return the line that says what to try with the first directory of an output."""
    from calib.capture.capabilities import NO_FP8_CACHE
    from calib.formats import FORMATS

    runs = not any(warning.startswith(NO_FP8_CACHE) for warning in result.warnings)
    name, directory = next(iter(result.directories.items()))
    path = shlex.quote(str(directory))
    if runs and FORMATS[name].with_weights and result.recipe.export.weights != "none":
        return f'next, see it write: fp8kv generate {path} "The capital of France is" --compare'
    return f"next, see which engines load the scales: fp8kv verify {path}"


def _speed(result: "Result") -> str:
    seconds = result.seconds
    if result.tokens_per_second is None:
        return f"statistics of {result.tokens:,} tokens"
    return (
        f"{result.tokens:,} tokens in {seconds['calibrate']:.1f} s "
        f"({result.tokens_per_second:,.0f} tokens/s); load {seconds['load']:.1f} s, "
        f"write {seconds['write']:.1f} s"
    )
