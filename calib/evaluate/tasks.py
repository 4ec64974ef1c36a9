"""Tasks of lm-evaluation-harness on FP8 caches and on the model's own, side by side."""

import copy
import difflib
import hashlib
import importlib.util
import io
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import yaml
from jinja2 import TemplateError
from torch import Tensor
from transformers import set_seed

from calib.arguments import to_path
from calib.data.hub_rows import is_unreachable
from calib.errors import InputError, one_line
from calib.evaluate.variants import UNCHANGED, Setup, Variant
from calib.files.strict_json import json_text
from calib.models.load import check_token_ids

# lm-eval's own: its few-shot examples are those of its command line
_SEED = 1234
_SUFFIXES = (".yaml", ".yml")
_BATCH_SIZE = 8
# enough for two digits; only metrics without a formula for their standard error are resampled
_RESAMPLES = 1000
# what lm-eval raises where a task's YAML, its functions or its dataset cannot be used
_LOADING_ERRORS = (
    *(AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError),
    *(SyntaxError, TypeError, ValueError, TemplateError, yaml.YAMLError),
)


class Tasks(NamedTuple):
    """Tasks of lm-eval with their data."""

    loaded: dict[str, dict[str, Any]]  # "tasks", "groups" and "group_map", each by name
    limit: int | None  # documents of each; None: all


def find_tasks(specs: Sequence[str], limit: int | None = None) -> Tasks:
    """Find tasks by lm-eval's name, YAML file or directory of them, and read their datasets.

    A path has a slash or ends in .yaml. `limit` documents of each task are used; None: all. Refuse
    unknown tasks, and one that is given twice.
    """
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    if specs:
        set_seed(_SEED)  # some tasks shuffle their choices while they are read
        manager, names = name_tasks(specs)
        with _silence():
            for name in names:
                parts = _load(manager, name)
                if twice := sorted(parts["tasks"].keys() & loaded["tasks"]):
                    raise InputError(
                        f"--tasks '{name}': another of --tasks holds '{twice[0]}' too; give one of them, "
                        "or another `task:` name"
                    )
                for kind, entries in parts.items():
                    loaded[kind].update(entries)
    return Tasks(loaded, limit)


def name_tasks(specs: Sequence[str]) -> tuple[Any, list[str]]:
    """Find lm-eval's `TaskManager`, and what it loads for `specs`; an InputError without lm-eval."""
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("--tasks needs lm-eval: pip install 'fp8kv[eval]'")
    specs = [*dict.fromkeys(specs)]
    are_paths = [spec for spec in specs if "/" in spec or spec.endswith(_SUFFIXES)]
    paths = {spec: to_path(spec).resolve() for spec in are_paths}
    with _silence():
        from lm_eval.tasks import TaskManager

        directories = [path for path in paths.values() if path.is_dir()]
        # the defaults are thousands of files, which take seconds to read
        manager = TaskManager(include_path=directories, include_defaults=len(paths) < len(specs))
        names = [name for spec in specs for name in _names(manager, spec, paths.get(spec))]
    return manager, [*dict.fromkeys(names)]


@contextmanager
def _silence() -> Iterator[None]:
    """Hide what lm-eval prints and logs inside the block, and its bars: no option silences all."""
    # our own bar keeps the stream that it was given
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def _names(manager: Any, spec: str, path: Path | None) -> list[str]:
    """List the names in lm-eval's index for `spec`, or the file that it is to load."""
    if path is None:
        names: list[str] = manager.match_tasks([spec])
        if not names:
            close = difflib.get_close_matches(spec, manager.all_tasks, n=3)
            suggestion = f"did you mean {' or '.join(close)}? " if close else ""
            raise InputError(
                f"lm-eval has no task '{spec}'; {suggestion}`lm-eval ls tasks` lists them; a YAML file or "
                f"a directory of them is written as a path, such as ./{spec}"
            )
    elif path.is_dir():
        files = {name: manager.task_index[name].yaml_path for name in manager.all_subtasks}
        names = [name for name, file in files.items() if file and file.is_relative_to(path)]
        if not names:
            raise InputError(f"--tasks '{spec}' holds no task: no *.yaml in it has a `task:` name")
    else:
        _check_file(spec, path)
        names = [str(path)]
    return names


def _check_file(spec: str, path: Path) -> None:
    """Refuse a file that is not a task, before anything is loaded."""
    try:
        # composed, not loaded: the tags of lm-eval stay what they are
        document = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cannot read --tasks '{spec}': {one_line(error)}") from None
    pairs = document.value if isinstance(document, yaml.MappingNode) else []
    keys = {key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode)}
    if "group" in keys:
        raise InputError(f"--tasks '{spec}' is a group, not a task; give the directory that holds its tasks")
    if not {"task", "include"} & keys:
        raise InputError(
            f"--tasks '{spec}' is not a task of lm-eval: it has no `task:` name; see "
            "docs/evaluation.md for what a task is made of"
        )


def _load(manager: Any, name: str) -> dict[str, dict[str, Any]]:
    """Load a task or group with its data; refuse tasks that run code, or have more than text."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError

    try:
        parts: dict[str, dict[str, Any]] = manager.load([name])
    except (*_LOADING_ERRORS, DatasetsError, HTTPError) as error:
        reason = f"lm-eval cannot load task '{name}': {one_line(error)}"
        if is_unreachable(error):
            reason = (
                f"the dataset of task '{name}' cannot be reached ({one_line(error)}); with no network give "
                "--tasks a YAML file whose data lie on this machine"
            )
        raise InputError(reason) from error
    for task_name, task in parts["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise InputError(f"task '{task_name}' runs code that the model writes; use lm-eval")
        if getattr(task, "MULTIMODAL", False):
            raise InputError(f"task '{task_name}' has images or sound; only text is measured here")
    return parts


def task_variants(variants: Sequence[Variant], names: Sequence[str] | None) -> list[Variant]:
    """Choose all FP8 caches if the user gave `names`; else the user's scales, or `none` and `attn_head`."""
    whole = [variant for variant in variants if variant.is_whole_cache]
    if names is not None:
        return whole
    own = [variant for variant in whole if variant.kind == "given"]
    return own or [variant for variant in whole if variant.name in ("none", "attn_head")]


def run_tasks(setup: Setup, tasks: Tasks, variants: Sequence[Variant]) -> dict[str, Any]:
    """Run tasks with the model's own cache and with every variant's, on the same prompts.

    Returns the report's `tasks` (task, variant, metric) and `harness`; nothing without tasks.
    """
    if not tasks.loaded["tasks"]:
        return {}
    figures: dict[str, dict[str, Any]] = {}
    # a process that may hold a GPU must not be forked
    alone = patch.dict(os.environ, DISABLE_MULTIPROC="1")
    with alone, _silence(), _checking_ids(setup):
        from lm_eval.models.huggingface import HFLM

        # a copy of the tokenizer, which may be given a padding token. Choices are scored in one pass over
        # rows padded on the right and without a mask: attention is causal, so padding is never read. Text
        # is generated from rows padded on the left, with a mask
        tokenizer = copy.deepcopy(setup.tokenizer)
        lm = HFLM(pretrained=setup.model, tokenizer=tokenizer, backend="causal", batch_size=_BATCH_SIZE)
        for variant in setup.progress.each("tasks", (UNCHANGED, *variants), "variants"):
            setup.progress.detail(variant.name)
            for task, metrics in setup.saved.once(_evaluate, setup, lm, tasks, variant).items():
                if metrics:
                    figures.setdefault(task, {})[variant.name] = metrics
    harness = {"name": "lm-eval", "version": version("lm-eval"), "limit": tasks.limit}
    return {"tasks": figures, "harness": harness}


def digest_tasks(tasks: Tasks) -> str:
    """Return the SHA-256 of what models are asked: settings, documents and few-shot examples of each task."""
    digest = hashlib.sha256()
    for name, task in tasks.loaded["tasks"].items():
        with _silence():
            examples = task.fewshot_docs() if task.config.num_fewshot else ()
            parts = [name, task.dump_config(), *task.eval_docs, *examples]
        for part in parts:
            # what stands for a function that has no source says where it lies in memory
            digest.update(re.sub(" at 0x[0-9a-f]+", "", json_text(part, default=str)).encode())
    return digest.hexdigest()


@contextmanager
def _checking_ids(setup: Setup) -> Iterator[None]:
    """Check, inside the block, the token ids that lm-eval reads; they are not known before."""

    def check(module: Any, arguments: tuple[Tensor]) -> None:
        check_token_ids([int(arguments[0].max())], setup.tokenizer, setup.model)

    with setup.model.get_input_embeddings().register_forward_pre_hook(check):
        yield


def _evaluate(setup: Setup, lm: Any, tasks: Tasks, variant: Variant) -> dict[str, dict[str, Any]]:
    """Return metrics by task as `simple_evaluate` does, whose report of the machine starts 14 programs."""
    import lm_eval

    set_seed(_SEED)
    for task in tasks.loaded["tasks"].values():
        task.set_fewshot_seed(_SEED)
    try:
        with variant.apply(setup):
            results = lm_eval.evaluate(
                lm, tasks.loaded, limit=tasks.limit, bootstrap_iters=_RESAMPLES, log_samples=False
            )
    # AssertionError: how lm-eval checks lengths; ValueError: also our AttentionError
    except (AssertionError, ValueError) as error:
        reason = " ".join(str(error).split()) or f"{type(error).__name__}; --debug shows where"
        raise InputError(f"lm-eval on the cache '{variant.name}': {reason}") from error
    return {task: _metrics(row) for task, row in results["results"].items()}


def _metrics(row: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Take the metrics of a row such as `{"acc,none": 0.5, "acc_stderr,none": 0.1}`; none: no filter."""
    metrics = {}
    for key, value in row.items():
        metric, comma, answer_filter = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            pair = {"value": value, "stderr": row.get(f"{metric}_stderr,{answer_filter}")}
            label = metric if answer_filter == "none" else key
            metrics[label] = {
                name: float(x) if isinstance(x, Real) and math.isfinite(x) else None
                for name, x in pair.items()
            }
    return metrics
