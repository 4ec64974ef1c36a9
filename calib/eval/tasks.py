"""Tasks of lm-evaluation-harness on FP8 caches and on the model's own, side by side."""

import copy
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from numbers import Real
from typing import Any
from unittest.mock import patch

from torch import Tensor
from transformers import set_seed

from calib.errors import InputError
from calib.eval.task_files import SEED, Tasks, lm_eval_quiet
from calib.eval.variants import UNCHANGED, Setup, Variant
from calib.models.load import check_token_ids

_BATCH_SIZE = 8
# enough for two digits; only metrics without a formula for their standard error are resampled
_RESAMPLES = 1000


def task_variants(variants: Sequence[Variant], chosen: Sequence[str] | None) -> list[Variant]:
    """All FP8 caches if the user has `chosen` some; else those given, or none and attn_head."""
    whole = [variant for variant in variants if variant.generates]
    if chosen is not None:
        return whole
    given = [variant for variant in whole if variant.kind == "given"]
    return given or [variant for variant in whole if variant.name in ("none", "attn_head")]


def run_tasks(setup: Setup, tasks: Tasks, variants: Sequence[Variant]) -> dict[str, Any]:
    """Run tasks with the model's own cache and with every variant's, on the same prompts.

    Returns the report's `tasks` (task, variant, metric) and `harness`; nothing without tasks.
    """
    if not tasks.loaded["tasks"]:
        return {}
    found: dict[str, dict[str, Any]] = {}
    # a process that may hold a GPU must not be forked
    alone = patch.dict(os.environ, DISABLE_MULTIPROC="1")
    with alone, lm_eval_quiet(), _checking_ids(setup):
        lm = _language_model(setup)
        for variant in setup.progress.each("tasks", (UNCHANGED, *variants), "variants"):
            setup.progress.detail(variant.name)
            with variant.applied(setup):
                results = _evaluate(lm, tasks, variant.name)
            for task, figures in results.items():
                found.setdefault(task, {})[variant.name] = figures
    harness = {"name": "lm-eval", "version": version("lm-eval"), "limit": tasks.limit}
    return {"tasks": found, "harness": harness}


@contextmanager
def _checking_ids(setup: Setup) -> Iterator[None]:
    """Check, inside the block, the token ids that lm-eval reads; they are not known before."""

    def check(module: Any, given: tuple[Tensor]) -> None:
        check_token_ids([int(given[0].max())], setup.tokenizer, setup.model)

    with setup.model.get_input_embeddings().register_forward_pre_hook(check):
        yield


def _language_model(setup: Setup) -> Any:
    """Lm-eval's own wrapper, which meets the FP8 cache as it is.

    Choices are scored in one pass over rows padded on the right and without a mask: attention is
    causal, so padding is never read. Text is generated from rows padded on the left, with a mask.
    """
    from lm_eval.models.huggingface import HFLM

    # it may give the tokenizer a padding token
    own = copy.deepcopy(setup.tokenizer)
    return HFLM(pretrained=setup.model, tokenizer=own, backend="causal", batch_size=_BATCH_SIZE)


def _evaluate(lm: Any, tasks: Tasks, name: str) -> dict[str, Any]:
    """Do as `simple_evaluate`, but without its report of the machine, which asks git and pip."""
    import lm_eval

    set_seed(SEED)
    for task in tasks.loaded["tasks"].values():
        task.set_fewshot_seed(SEED)
    try:
        done = lm_eval.evaluate(
            lm, tasks.loaded, limit=tasks.limit, bootstrap_iters=_RESAMPLES, log_samples=False
        )
    # AssertionError: how lm-eval checks lengths; ValueError: also our AttentionError
    except (AssertionError, ValueError) as error:
        unsaid = f"{type(error).__name__}; --debug shows where"
        message = " ".join(str(error).split()) or unsaid
        raise InputError(f"lm-eval on the cache '{name}': {message}") from error
    return {task: figures for task, row in done["results"].items() if (figures := _figures(row))}


def _figures(row: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Metrics of a row such as `{"acc,none": 0.5, "acc_stderr,none": 0.1}`; none: no filter."""
    found = {}
    for key, value in row.items():
        metric, comma, answer_filter = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        stderr = row.get(f"{metric}_stderr,{answer_filter}")
        label = metric if answer_filter == "none" else key
        found[label] = {"value": _number(value), "stderr": _number(stderr)}
    return found


def _number(x: object) -> float | None:
    return float(x) if isinstance(x, Real) and math.isfinite(x) else None
