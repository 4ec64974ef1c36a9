"""`fp8kv recommend`."""

from typing import TYPE_CHECKING, Annotated

import typer

from calib import choices
from calib.commands.evaluate import DATASET
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
    ResourcesFlag,
    Seed,
    TrustRemoteCode,
)
from calib.commands.running import command, print_json, print_lines, print_table, warn
from calib.files.text import show_interval, show_number

if TYPE_CHECKING:
    from calib.evaluate.report import Recommendation

_HEADINGS = ("cache", "bytes", "of 16 bits", "KL", "why not")


@command
def recommend(
    context: typer.Context,
    model: Model,
    budget_kl: Annotated[
        str | None, Flag(f"Nats per token that may be lost. Default: {choices.KL_BUDGET}.")
    ] = None,
    budget_bytes: Annotated[
        str | None, Flag("Or the share of 16 bits' bytes to spend, such as 0.55.")
    ] = None,
    engine: Annotated[str | None, Flag("vllm, sglang or lmdeploy. Default: any.")] = None,
    gpu: Annotated[str | None, Flag("Such as a100, h100, b200. Default: any.")] = None,
    suite: Annotated[choices.SuiteName | None, Flag("How much to measure. Default: quick.")] = None,
    dataset: Annotated[str | None, Flag(f"As for calibrate. Default: {DATASET}.")] = None,
    device: Device = None,
    samples: Annotated[int | None, DataFlag("Held-out documents. Default: the suite's.")] = None,
    seq_len: Annotated[int | None, DataFlag("Tokens per document. Default: the suite's.")] = None,
    allow_few_tokens: AllowFewTokens = False,
    seed: Seed = None,
    backend: Annotated[
        choices.Backend | None, ResourcesFlag("auto: Triton on a GPU, torch elsewhere.")
    ] = None,
    dtype: DType = None,
    trust_remote_code: TrustRemoteCode = False,
    progress: ProgressFlag = "auto",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure the caches that engines offer; name the cheapest that keeps the model's output."""
    from calib.commands.overrides import overrides
    from calib.commands.progress_bar import progress_bar
    from calib.evaluate.recommend import answer_lines, make_wish
    from calib.evaluate.run import run_recommendation
    from calib.recipe import load_recipe

    wish = make_wish(budget_kl, budget_bytes, engine, gpu)
    given = overrides(context.params, ("data", "evaluation"))
    recipe = load_recipe(None, {"data.dataset": DATASET, **given})
    with progress_bar(progress, as_json=as_json) as reported:
        found, warnings = run_recommendation(model, recipe, wish, progress=reported)
    if as_json:
        print_json({**found.model_dump(by_alias=True), "warnings": warnings})
        return
    warn(warnings)
    print_table(f"KV caches of {model}, not chosen", _HEADINGS, _rows(found))
    print_lines([f"{name} cannot be served: {why}" for name, why in found.not_served.items()])
    print_lines(answer_lines(found))


def _rows(found: "Recommendation") -> list[tuple[str, ...]]:
    return [
        (
            each.cache,
            f"{each.bytes_per_token:,}",
            f"{each.share:.1%}",
            f"{show_number(each.kl.value)} {show_interval(each.kl.low, each.kl.high)}".strip(),
            each.why,
        )
        for each in found.alternatives
    ]
