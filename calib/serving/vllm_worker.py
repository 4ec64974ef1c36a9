"""What the plugin does in a vLLM worker: compare scales in use with the files', repair or replace them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from calib.engines.loaded_scales import (
    EngineLayer,
    ScalesInForce,
    Stored,
    compare,
    fingerprint,
    layers_of_files,
    stored_scales,
)
from calib.engines.outcome import Place
from calib.errors import Fp8kvError
from calib.files.stored_scales import StoredLayer
from calib.serving.engine_layers import FP8_CACHES, fill_scales, read_files, vllm_attention, vllm_layers
from calib.serving.plugin import REPAIR, guard, is_switched_on, wrap

Files = dict[int, StoredLayer]
DRAFT = 10**6  # and more: layers of a draft that counts from 0


def check_loaded(runner: Any) -> ScalesInForce:
    """Compare a runner that has just loaded its model, and watch what is loaded into it later."""
    watch_loading(runner)
    report = check(runner)
    runner.fp8kv_logged = str(report)
    return report


def check(runner: Any) -> ScalesInForce:
    """Compare all layers of a runner with the files; with FP8KV_REPAIR_SCALES=1, set them right first."""
    report = _compare(runner)
    if report.problems and is_switched_on(REPAIR):
        place, rank = _place(runner)
        for model, files in _models(runner):
            fill_scales(model, files, place, rank)
        before, report = report, _compare(runner)
        repaired = (problem for problem in before.problems if problem not in report.problems)
        report.notes += [f"repaired: {problem}" for problem in repaired]
    if harvest := getattr(runner, "fp8kv_harvest", None):
        harvest.check_scales()
    return report


def watch_loading(runner: Any) -> None:
    """Check a runner's model again after weights were loaded into it, whoever does it, before the next step.

    Steps cost nothing for it: the check is in the way of one step alone.
    """
    step = runner.execute_model

    def check_and_step(*args: Any, **kwargs: Any) -> Any:
        guard("vllm", lambda: check(runner))  # where it raises, the next step is checked again
        forget_check(runner)
        return step(*args, **kwargs)

    @wrap(runner.get_model(), "load_weights")
    def load_and_mark(load: Any, *args: Any, **kwargs: Any) -> Any:
        runner.execute_model, runner.fp8kv_from_memory = check_and_step, True
        return load(*args, **kwargs)


def forget_check(runner: Any) -> None:
    """Let a runner's next step be one like any other."""
    vars(runner).pop("execute_model", None)


def note_source(runner: Any, *, from_memory: bool) -> None:
    """Note where a runner's weights have come from: from memory, or again from files."""
    runner.fp8kv_from_memory = from_memory
    if not from_memory:
        runner.fp8kv_scales = None


@dataclass(frozen=True)
class WorkerState:
    """The scales that a worker computes with, and what is wrong with them."""

    report: ScalesInForce = field(default_factory=ScalesInForce)
    stored: Stored = field(default_factory=dict)
    unreadable: str = ""  # why nothing can be said now
    logged: str = ""  # when the model was loaded
    fnuz: bool = False  # scales are doubled, for an FP8 type that ends at 240


def state(worker: Any) -> WorkerState:
    """Return what a worker computes with, for the engine's core."""
    runner = worker.model_runner
    modules = vllm_attention(runner.get_model()).values()
    if getattr(worker, "_weight_update_active", False) or any(module._k_scale.is_meta for module in modules):
        return WorkerState(unreadable="weights are being updated")
    forget_check(runner)
    try:
        report = check(runner)
        report.awaits_scales = getattr(runner, "fp8kv_from_memory", False)
        logged, fnuz = getattr(runner, "fp8kv_logged", ""), _place(runner)[0].fnuz
        return WorkerState(report, stored_scales([*all_layers(runner)]), logged=logged, fnuz=fnuz)
    except (ValueError, OSError, Fp8kvError) as error:
        return WorkerState(unreadable=str(error))


def set_scales(worker: Any, scales: Mapping[str, Mapping[str, list[float]]]) -> None:
    """Give every copy of a worker's scales new values: by layer, of K, V or Q, one or one per head.

    From now on they count as the files'.
    """
    runner = worker.model_runner
    runner.fp8kv_scales, runner.fp8kv_from_memory = (files := {}), False
    for index, by_letter in scales.items():
        values = {letter: tuple(scale) for letter, scale in by_letter.items()}
        layer = StoredLayer(int(index), values.get("k"), values.get("v"), values.get("q"))
        files[layer.layer] = layer
    fill_scales(runner.get_model(), files, *_place(runner))


def _compare(runner: Any) -> ScalesInForce:
    config, (place, rank) = runner.vllm_config, _place(runner)
    stages = config.parallel_config.pipeline_parallel_size
    is_fp8 = config.cache_config.cache_dtype in FP8_CACHES
    (own, files), *drafts = _models(runner)
    report = compare([*vllm_layers(own, _version())], files, place, rank, stages, is_fp8)
    for draft, files in drafts:
        part = compare([*vllm_layers(draft, _version())], files, place, rank, stages)
        if part.total:
            report.notes.append(f"draft: {part.used} of {part.total} KV scales in use")
        # a draft that nobody calibrated works at 1.0: fewer of its tokens are accepted, none is wrong
        (report.problems if files else report.notes).extend(f"draft: {problem}" for problem in part.problems)
    layers = [*all_layers(runner)]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    is_captured = not getattr(runner.model_config, "enforce_eager", True) and current_platform.is_cuda_alike()
    is_pushed = getattr(runner, "fp8kv_scales", None) is not None
    if is_pushed and is_captured and any("_k_scale_float" in layer.read for layer in layers):
        report.problems.append("captured graphs keep the numbers of before: start with --enforce-eager")
    report.fingerprint = fingerprint(stored_scales(layers))
    return report


def all_layers(runner: Any) -> Iterator[EngineLayer]:
    """Yield all layers of a runner; a draft that counts from 0 is kept apart from the model."""
    yield from vllm_layers(runner.get_model(), _version())
    if (draft := _draft(runner)) is not None:
        for layer in vllm_layers(draft, _version()):
            yield replace(layer, layer=layer.layer + DRAFT)


def _draft(runner: Any) -> Any:
    """Return the model that drafts tokens; None where there is none."""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    return getattr(drafter, "model", None)


def _models(runner: Any) -> Iterator[tuple[Any, Files]]:
    """Yield a runner's model and its draft, with the scales in their files."""
    config, model = runner.vllm_config, runner.model_config
    # beside a model in an object store lies a directory without its weights
    source = getattr(model, "model_weights", "") or model.model
    pushed: Files | None = getattr(runner, "fp8kv_scales", None)
    if _has_scales_of_memory(runner):
        pushed = _own_tensors(runner)  # in no file: copies are compared with each other
    needs_files = pushed is None or config.load_config.load_format != "dummy"
    own = read_files(source, model.revision, config.load_config) if needs_files else None
    files = layers_of_files(own, vllm_attention(runner.get_model())) if pushed is None else pushed
    yield runner.get_model(), files
    if (draft := _draft(runner)) is None:
        return
    # multi-token prediction: in the same checkpoint
    files = layers_of_files(own, vllm_attention(draft), is_draft=True)
    draft_config = config.speculative_config.draft_model_config
    if draft_config.model != model.model:
        stored = read_files(draft_config.model, draft_config.revision, config.load_config)
        # the engine numbers a draft's layers after the model's
        first = min((layer.layer for layer in vllm_layers(draft)), default=0)
        files = {i + first: layer for i, layer in layers_of_files(stored).items()}
    yield draft, files


def _has_scales_of_memory(runner: Any) -> bool:
    return getattr(runner, "fp8kv_scales", None) is None and getattr(runner, "fp8kv_from_memory", False)


def _own_tensors(runner: Any) -> Files:
    factor = 2 if _place(runner)[0].fnuz else 1
    files = {}
    for layer in vllm_layers(runner.get_model(), _version()):
        copies = (next(iter(copies.values()), ()) for copies in (layer.k, layer.v, layer.q))
        k, v, q = (tuple(x / factor for x in values) for values in copies)
        files[layer.layer] = StoredLayer(layer.layer, k, v, q)
    return files


def _place(runner: Any) -> tuple[Place, int]:
    from vllm.distributed import get_tensor_model_parallel_rank  # type: ignore[import-not-found]
    from vllm.platforms import current_platform

    if _has_scales_of_memory(runner):  # they are those of this rank already
        return Place(fnuz=current_platform.is_fp8_fnuz()), 0
    ranks = runner.vllm_config.parallel_config.tensor_parallel_size
    return Place(ranks, current_platform.is_fp8_fnuz()), get_tensor_model_parallel_rank()


def _version() -> str:
    import vllm  # type: ignore[import-not-found]

    return str(vllm.__version__)
