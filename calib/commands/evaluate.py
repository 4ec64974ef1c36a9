"""`fp8kv eval`, also installed as `fp8kv-eval`, and `fp8kv recommend`: caches measured beside 16 bits."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from calib import choices
from calib.caches.types import ALL_CACHES
from calib.commands import flags
from calib.commands.running import Answer, Block, TextTable, job_command, print_blocks
from calib.progress import WRITTEN, Progress

if TYPE_CHECKING:
    from calib.evaluate.report import Recommendation, RecommendedDirectory, Report

_DATASET = "builtin:python-docs"

_SUITE = flags.option("Measure on little text (`quick`) or on more (`full`). Default: quick.")
_DTYPE = flags.resources("Load the weights in this type. Default: the checkpoint's own; float32 on a CPU.")
_SAMPLES = flags.data("Read this many held-out samples. Default: the suite's number.")
_SEQ_LEN = flags.data("Read this many tokens of each sample. Default: the suite's number.")


@job_command
def evaluate(
    context: typer.Context,
    model: str = flags.MODEL,
    scales: list[Path] | None = flags.option(
        "Compare the scales in this directory, which any tool may have written. Repeatable.", metavar="DIR"
    ),
    variants: str | None = flags.option(
        "Measure only these variants, such as none,tensor. Default: all.", metavar="NAME,..."
    ),
    caches: str | None = flags.option(
        f"Also measure these cache types, or `all`: {', '.join(ALL_CACHES)}.",
        metavar="NAME,...",
    ),
    recipe: str | None = flags.option(
        "Take settings from this recipe's `evaluation` section. Flags override it."
    ),
    set_: list[str] | None = flags.SET_EVALUATION,
    suite: choices.SuiteName | None = _SUITE,
    output: Path | None = flags.option(
        "Write report.html, report.json and report.md to this directory.", "-o", "--output", metavar="DIR"
    ),
    tasks: str | None = flags.option(
        "Also run these lm-eval tasks: names or paths of YAML files.", metavar="NAME,..."
    ),
    fail_if: list[str] | None = flags.option(
        "Exit with status 1 if this is true, such as 'kl>0.02' or 'tensor:top1<0.9'. Repeatable. "
        f"Metrics: {', '.join(choices.METRICS)}.",
        metavar="CONDITION",
    ),
    search: str | None = flags.option(
        "Find the fewest layers that must stay in 16 bits, so that KL is at most this many nats per token.",
        metavar="KL",
    ),
    dataset: str | None = flags.option(
        f"Read this text; see `fp8kv calibrate --help`. Default: the recipe's, or {_DATASET}."
    ),
    also: list[str] | None = flags.option(
        "Also measure on this dataset, or on `all` built-in texts. Repeatable.", metavar="DATASET"
    ),
    images: str | None = flags.IMAGES,
    audio: str | None = flags.AUDIO,
    device: choices.Device | None = flags.DEVICE,
    samples: int | None = _SAMPLES,
    seq_len: int | None = _SEQ_LEN,
    long: int | None = flags.data(
        "Also read built-in documents of this many tokens, such as 32768, and find what is hidden in them. "
        "Default: none; 4096 with --suite full."
    ),
    allow_few_tokens: bool = flags.ALLOW_FEW_TOKENS,
    seed: int | None = flags.SEED,
    task_limit: int | None = flags.data("Read this many documents of each task. Default: all."),
    backend: choices.Backend | None = flags.BACKEND,
    attention: choices.AttentionMode | None = flags.option(
        "Simulate how this engine's attention reads FP8 caches. Default: exact, no engine. "
        "`vllm_triton_fp8` is vLLM on NVIDIA and, from 0.33, on AMD."
    ),
    dtype: choices.DType | None = _DTYPE,
    resume: bool = flags.RESUME,
    trust_remote_code: bool = flags.TRUST_REMOTE_CODE,
    version: bool = flags.VERSION,
    *,
    overwrite: bool,
    quiet: bool,
    progress: Progress,
) -> Answer:
    """Measure how an FP8 KV cache changes a model's output, on text that was not used for calibration."""
    from calib.evaluate.run import run_evaluation
    from calib.models.sources import find_model
    from calib.recipe import load_recipe
    from calib.same_model.check import weight_warnings
    from calib.scales.stats_file import change_warnings

    flags.check_assignments(context.params, ("data", "evaluation"))
    keys = flags.recipe_keys(context.params, ("data", "evaluation"))
    resolved = load_recipe(recipe, keys)
    if "dataset" not in resolved.data.model_fields_set:
        resolved = load_recipe(recipe, {"data.dataset": _DATASET, **keys})
    if scales and not resolved.evaluation.fail_if:  # the report says it too, after all the work
        warnings = [*weight_warnings(scales, find_model(model)), *change_warnings(scales)]
        print_blocks(f"warning: {warning}" for warning in warnings)
    report, failures = run_evaluation(
        model,
        resolved,
        scales=scales or [],
        output=output,
        overwrite=overwrite,
        resume=resume,
        progress=progress,
    )
    return Answer(report.to_json(), () if quiet else report_blocks(report, output), failures)


def report_blocks(report: "Report", output: Path | None) -> Iterator[Block]:
    """Yield the tables of an evaluation, what follows from them, and where the report was written."""
    from calib.evaluate.page.tables import printed_tables, summary_lines

    for table in printed_tables(report):
        yield TextTable(table.title, table.headings, table.lines)
    yield from summary_lines(report)
    yield from _report_lines(output)


def _report_lines(output: Path | None) -> list[str]:
    """Say where the report is, if it was written."""
    return [f"report written to {output / 'report.html'}"] if output and output in WRITTEN else []


@job_command
def recommend(
    context: typer.Context,
    model: str = flags.MODEL,
    budget_kl: str | None = flags.option(
        f"Allow this divergence (KL) from a 16-bit cache, in nats per token. Default: {choices.KL_BUDGET}.",
        metavar="KL",
    ),
    budget_bytes: str | None = flags.option(
        "Spend this share of the bytes of a 16-bit cache, such as 0.55, in place of a KL.", metavar="SHARE"
    ),
    engine: str | None = flags.option("Consider only this engine: vllm, sglang or lmdeploy. Default: all."),
    gpu: str | None = flags.option(
        "Consider only caches for this GPU, such as a100, h100 or b200. Default: any."
    ),
    request_tokens: int | None = flags.data(
        "Count what fits in requests of this many tokens. Default: 32768, or the model's positions.", min=1
    ),
    suite: choices.SuiteName | None = _SUITE,
    dataset: str | None = flags.option(f"Read this text; see `fp8kv calibrate --help`. Default: {_DATASET}."),
    device: choices.Device | None = flags.DEVICE,
    samples: int | None = _SAMPLES,
    seq_len: int | None = _SEQ_LEN,
    allow_few_tokens: bool = flags.ALLOW_FEW_TOKENS,
    seed: int | None = flags.SEED,
    set_: list[str] | None = flags.SET_DATA,
    backend: choices.Backend | None = flags.BACKEND,
    dtype: choices.DType | None = _DTYPE,
    trust_remote_code: bool = flags.TRUST_REMOTE_CODE,
    write: Path | None = flags.output(
        "Make a directory that serves the cache, and measure it again. Default: print the commands.",
        "--write",
        metavar="DIR",
    ),
    output: Path | None = flags.output(
        "Write a report with a picture to this directory. Default: none.", "-o", "--output", metavar="DIR"
    ),
    resume: bool = flags.RESUME,
    *,
    overwrite: bool,
    progress: Progress,
) -> Answer:
    """Measure the KV caches that engines offer, and name the cheapest that keeps the model's output."""
    from calib.evaluate.recommend import make_wish
    from calib.recipe import load_recipe
    from calib.recommendation import run_recommendation

    wish = make_wish(budget_kl, budget_bytes, engine, gpu, request_tokens)
    flags.check_assignments(context.params, ("data",))
    keys = flags.recipe_keys(context.params, ("data", "evaluation"))
    recipe = load_recipe(None, {"data.dataset": _DATASET, **keys})
    advice, warnings, written, problems = run_recommendation(
        model, recipe, wish, write=write, output=output, overwrite=overwrite, resume=resume, progress=progress
    )
    document = {**advice.model_dump(by_alias=True), "warnings": warnings}
    if written is not None:
        document["written"] = written.model_dump()
        chosen = advice.chosen.model_copy(update={"commands": (written.serve,)})
        advice = advice.model_copy(update={"chosen": chosen})
    blocks = chain(_advice_blocks(model, advice, warnings, written), _report_lines(output))
    return Answer(document, blocks, problems)


def _advice_blocks(
    model: str, advice: "Recommendation", warnings: Iterable[str], written: "RecommendedDirectory | None"
) -> Iterator[Block]:
    from calib.evaluate.page.tables import figure_cell
    from calib.evaluate.recommend import answer_lines

    yield from (f"warning: {warning}" for warning in warnings)
    rows = [
        (
            offer.cache,
            f"{offer.bytes_per_token:,}",
            f"{offer.share:.1%}",
            "by bytes" if offer.tokens_per_gb is None else f"{offer.tokens_per_gb:,}",
            str(figure_cell(offer.kl)),
            offer.why,
        )
        for offer in advice.alternatives
    ]
    yield TextTable(
        f"KV caches of {model}, not chosen",
        ("cache", "bytes", "of 16 bits", "tokens/GB", "KL", "why not"),
        rows,
    )
    names_by_reason = defaultdict[str, list[str]](list)
    for name, reason in advice.not_served.items():
        cache = name.removesuffix(", baked")
        names_by_reason[reason.removeprefix(f"{cache} is ")].append(name)
    for reason, names in names_by_reason.items():
        yield f"{'; '.join(names)} {'are' if len(names) > 1 else 'is'} not offered ({reason})"
    if written is not None:
        yield written.line
    yield from answer_lines(advice)
