"""`fp8kv calibrate`, also installed as `fp8kv-calibrate`, and `fp8kv recipes`."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from calib import choices
from calib.commands import flags
from calib.commands.evaluate import report_blocks
from calib.commands.running import Answer, Block, TextTable, job_command, print_blocks
from calib.progress import SILENT, Progress

if TYPE_CHECKING:
    from calib.formats.output import Result
    from calib.recipe import Recipe
    from calib.scales.summary import LayerSummary

_NOT_GATED = "the recipe's evaluation.fail_if was not checked; --evaluate measures the scales and checks it"
_HEADINGS = ("layer", "K amax", "V amax", "K scale", "V scale", "K smallest head", "V smallest head")


@job_command
def calibrate(
    context: typer.Context,
    model: str = flags.MODEL,
    output: Path | None = flags.option(
        "Write to this directory. Default: ./<model>-fp8kv-<strategy>.", "-o", "--output", metavar="DIR"
    ),
    draft: str | None = flags.option(
        "Calibrate this drafter (EAGLE, EAGLE-3), a checkpoint of its own, as it drafts for MODEL.",
        metavar="DRAFTER",
    ),
    recipe: str | None = flags.option(
        "Take settings from this recipe: a name (see `fp8kv recipes`), a YAML file, or a calibration."
    ),
    strategy: choices.Strategy | None = flags.option(
        "Make one scale for each layer (`tensor`), KV head (`attn_head`) or `channel`. Default: tensor."
    ),
    format: list[str] | None = flags.option(
        "Write for this engine. Repeat for several, each into DIR/<format>/. Default: vllm.",
        metavar=f"[{'|'.join(choices.FORMATS)}]",
    ),
    dataset: str | None = flags.option(
        "Read this text: a Hub dataset, a file or directory (.jsonl, .json, .parquet, .txt), builtin:NAME, "
        "`self` (the model's own) or `random`."
    ),
    images: str | None = flags.IMAGES,
    audio: str | None = flags.AUDIO,
    samples: int | None = flags.option("Read this many samples. Default: 512."),
    seq_len: int | None = flags.option(
        "Cut samples to this many tokens; a long document is several. Default: 2048."
    ),
    device: choices.Device | None = flags.DEVICE,
    evaluate: bool = flags.option(
        "Then measure what the scales change, as the recipe's `evaluation` says, into DIR/evaluation.",
        "--evaluate",
        default=False,
    ),
    set_: list[str] | None = flags.SET,
    until: float | None = flags.data(
        "Stop early, once four times the text is expected to raise the largest magnitudes by less than this "
        "share, such as 0.05."
    ),
    allow_few_tokens: bool = flags.ALLOW_FEW_TOKENS,
    batch_size: str | None = flags.data(
        "Run this many samples at once. Default: auto, some thousand tokens."
    ),
    seed: int | None = flags.SEED,
    observer: choices.ObserverName | None = flags.scales(
        "Choose what the largest FP8 value of a scale stands for. "
        + " ".join(f"`{name}`: {entry.amax}." for name, entry in choices.OBSERVERS.items())
        + " Default: absmax."
    ),
    targets: choices.Targets | None = flags.scales(
        "Make scales for K and V (`kv`), or for queries as well (`qkv`). Default: kv."
    ),
    reduce: choices.Reduce | None = flags.scales(
        "Keep all scales (`none`), or write only the largest of each layer (`max`). Default: none."
    ),
    fp8_dtype: choices.FP8Name | None = flags.scales(
        "Calibrate for this FP8 type. Default: e4m3fn, whose largest number is 448."
    ),
    headroom: str | None = flags.scales(
        "Multiply every largest magnitude by this factor. `auto` chooses one for each layer, so that one "
        "token in a million has values beyond what FP8 holds. Default: 1.0.",
        metavar="FACTOR|auto",
    ),
    center_keys: bool = flags.scales(
        "Subtract the mean of each channel from K. Format fp8kv only.", "--center-keys", default=False
    ),
    tp_size: int | None = flags.output(
        "Write kv_cache_scales.json for this many tensor-parallel ranks. Default: 1."
    ),
    weights: choices.Weights | None = flags.output(
        "Hard-link or copy the model's weights, or leave them out (`none`). Default: link."
    ),
    in_place: bool = flags.IN_PLACE,
    dtype: choices.DType | None = flags.DTYPE,
    offload: choices.Offload | None = flags.resources(
        "Keep one layer in memory at a time (`layerwise`). Default: auto, if weights do not fit."
    ),
    max_memory: str | None = flags.resources("Use at most this much memory, such as 8GiB.", metavar="SIZE"),
    resume: bool = flags.RESUME,
    trust_remote_code: bool = flags.TRUST_REMOTE_CODE,
    version: bool = flags.VERSION,
    *,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
    progress: Progress,
) -> Answer | None:
    """Measure a model's K and V, and write a checkpoint with FP8 KV-cache scales that engines load."""
    from calib.capture.processes import is_first_process
    from calib.job import run as run_job
    from calib.recipe import load_recipe

    resolved = load_recipe(recipe, flags.recipe_keys(context.params))
    if evaluate:
        _check_evaluation(model, resolved, output, in_place=in_place)
    result = run_job(
        model, resolved, output, draft=draft, in_place=in_place, overwrite=overwrite, resume=resume,
        progress=progress if is_first_process() else SILENT,
    )  # fmt: skip
    if result is None:  # the first process has the result
        return None
    if resolved.evaluation.fail_if and not evaluate:
        warnings, doubts = [*result.warnings, _NOT_GATED], (*result.doubts, _NOT_GATED)
        result = replace(result, warnings=warnings, doubts=doubts)
    blocks = (f"warning: {doubt}" for doubt in result.doubts) if quiet else result_blocks(result)
    if not evaluate:
        return Answer(result.to_json(), blocks)
    from calib.evaluate.run import run_evaluation
    from calib.files.names import EVALUATION_DIRECTORY

    progress.end()
    if not as_json:
        print_blocks(blocks)
    scales, directory = [next(iter(result.directories.values()))], result.output / EVALUATION_DIRECTORY
    report, failures = run_evaluation(
        model, resolved, scales=scales, output=directory, overwrite=True, progress=progress
    )
    document = {**result.to_json(), "evaluation": report.to_json()}
    return Answer(document, () if quiet else report_blocks(report, directory), failures)


def _check_evaluation(model: str, recipe: "Recipe", output: Path | None, *, in_place: bool) -> None:
    # what cannot be evaluated should be reported before hours of calibration
    from calib.evaluate.run import check_evaluation, open_inputs
    from calib.job import default_output
    from calib.scales.plot import check_can_draw

    check_can_draw("--evaluate")
    path = Path(model) if in_place else output or default_output(model, recipe.strategy)
    formats = recipe.export.formats
    check_evaluation(recipe, [path / formats[0] if len(formats) > 1 else path])
    open_inputs(model, recipe)


def result_blocks(result: "Result") -> Iterator[Block]:
    """Yield a row per layer, warnings, where the output is, and how to serve it."""
    from calib.formats import FORMATS
    from calib.formats.card import NO_WEIGHTS, backup_line, engine_of, serve_command, written_strategy

    rows = [*layer_rows(result.written_layers)]
    width = 5 if all({*row[5:]} == {"100%"} for row in rows) else 7  # as with a scale for each head
    yield TextTable(_title(result), _HEADINGS[:width], [row[:width] for row in rows])
    strategy = written_strategy(result.recipe.strategy, result.recipe.export.reduce)
    yield from (f"warning: {warning}" for warning in result.warnings)
    yield from ("", *result.notes, _speed_line(result), f"written to {result.output}")
    if result.backup:
        yield backup_line(result.output, result.backup)
    for name, directory in result.directories.items():
        form = FORMATS[name]
        if note := form.note_on(strategy):
            yield f"note ({name}): {note}"
        if form.with_weights and result.recipe.export.weights == "none":
            yield f"note ({name}): {NO_WEIGHTS}"
        if form.serve:
            flags = result.flags.get(name, "")
            yield from ("", f"serve with {engine_of(name, flags)}:")
            yield f"  {serve_command(name, directory, strategy, flags, result.drafts_for)}"
    yield from ("", _next_step(result))


def _title(result: "Result") -> str:
    """Name what the table shows: the first format's scales, or values of an NVFP4 cache."""
    from calib.files.cache_type import FP8_DIVISOR
    from calib.formats import FORMATS

    first = next(iter(result.directories))
    factors = {name: FORMATS[name].over_written for name in result.directories}
    values = "FP8 KV-cache scales"
    if FORMATS[first].nvfp4:
        values = f"Values of an NVFP4 cache (absmax / {FP8_DIVISOR * factors[first]:g})"
    only = f", as format {first} holds them" if len({*factors.values()}) > 1 else ""
    largest = "" if result.recipe.strategy == "tensor" else ", largest of each layer"
    queries = "; those of queries (Q) are in the files" if result.recipe.targets == "qkv" else ""
    return f"{values}, strategy {result.recipe.strategy}{largest}{only}{queries}"


def layer_rows(layers: "list[LayerSummary]") -> list[tuple[str, ...]]:
    """Return the cells of a row per layer."""
    return [
        (
            str(row.layer_idx),
            *(f"{x:.4g}" for x in (row.k_amax, row.v_amax, row.k_scale, row.v_scale)),
            *(f"{share:.0%}" for share in (row.k_range_used, row.v_range_used)),
        )
        for row in layers
    ]


def _next_step(result: "Result") -> str:
    """Return the line that says what to try with the first directory of an output."""
    from calib.capture.capabilities import NO_FP8_CACHE
    from calib.formats import FORMATS

    runs = not result.drafts_for and not any(warning.startswith(NO_FP8_CACHE) for warning in result.warnings)
    name, directory = next(iter(result.directories.items()))
    form, path = FORMATS[name], shlex.quote(str(directory))
    if runs and form.with_weights and not form.nvfp4 and result.recipe.export.weights != "none":
        return f'next, see it write: fp8kv generate {path} "The capital of France is" --compare'
    return f"next, see which engines load the scales: fp8kv verify {path}"


def _speed_line(result: "Result") -> str:
    seconds = result.seconds
    if result.tokens_per_second is None:
        return f"statistics of {result.tokens:,} tokens"
    return (
        f"{result.tokens:,} tokens in {seconds['calibrate']:.1f} s ({result.tokens_per_second:,.0f} "
        f"tokens/s); load {seconds['load']:.1f} s, write {seconds['write']:.1f} s"
    )


@job_command
def recipes(
    name: str | None = typer.Argument(None, help="Print this recipe in full.", metavar="NAME"),
) -> Answer:
    """List the bundled recipes, or print one in full."""
    from calib.recipe import load_recipe, recipe_names, recipe_text

    if name:
        return Answer(load_recipe(name).model_dump(mode="json"), recipe_text(name).splitlines())
    descriptions = {name: load_recipe(name).description for name in recipe_names()}
    rows = [*descriptions.items()]
    return Answer(descriptions, [TextTable("Bundled recipes", ("recipe", "what it does"), rows)])
