"""The whole evaluation: calibrate on one part of the text, measure every variant on another."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calib.capture.attention import cached_layers
from calib.capture.capabilities import check_backend, check_fp8_cache
from calib.capture.resume import THREADS, check_resumed, package_versions, remove_progress
from calib.choices import CONTROLS, REFERENCE, VARIANTS
from calib.data import MediaReader, resolve_batch_size
from calib.engines.cache_support import NotServed
from calib.errors import InputError
from calib.evaluate import inputs
from calib.evaluate.attention_modes import check_model
from calib.evaluate.cache_variants import (
    STATIC,
    cache_names,
    cache_variants,
    check_types,
    count_bytes,
    select_types,
)
from calib.evaluate.held_out import add_own_samples, find_readers
from calib.evaluate.layer_errors import Clipping, LayerError, LayerValues
from calib.evaluate.measure import choose_searched, measure, search_layers, written_texts
from calib.evaluate.other_text import check_other_texts, load_other_texts, measure_other_texts, other_datasets
from calib.evaluate.page.page import report_place
from calib.evaluate.recommend import Wish
from calib.evaluate.report import BROKEN, Report, Suite, explain_not_finite, is_of_own_text
from calib.evaluate.resume import UNSAVED, SavedResults, results_file
from calib.evaluate.serve_commands import Offers
from calib.evaluate.statistics import Divergence
from calib.evaluate.summarize import Evaluation, machine_name, summarize
from calib.evaluate.tasks import digest_tasks, find_tasks, run_tasks, task_variants
from calib.evaluate.variants import (
    ONE_ATTENTION,
    Setup,
    Variant,
    build_variants,
    other_attention,
    select_variants,
)
from calib.evaluate.verdict import check_variant, failures
from calib.files.fingerprint import fingerprint, settings_digest
from calib.files.strict_json import json_text
from calib.files.text import Condition, parse_condition
from calib.models.config import check_positions, load_config, takes_media
from calib.models.load import load_model, load_tokenizer
from calib.models.quantized.weights import quantization_notes
from calib.models.sources import find_model, served_name
from calib.progress import SILENT, Progress
from calib.recipe import EvaluationRecipe, Recipe
from calib.same_model.check import weight_warnings
from calib.scales.scales import LATENT_NOTE, SharedAttention
from calib.scales.stats import KVStats, LayerStats, TensorStats
from calib.scales.stats_file import change_warnings
from calib.scales.summary import TEXT_ALONE
from fp8kv_runtime.errors import AttentionError

_RESULT_TYPES = (
    *(Divergence, Clipping, LayerError, LayerValues),
    *(KVStats, LayerStats, TensorStats, SharedAttention),
)
# besides those that a report names
_LIBRARIES = ("lm_eval", "numpy", "tokenizers", "triton")
# parts of a recipe that no measurement depends on
_FREE_TO_CHANGE: Any = {"export": True, "description": True, "save_minutes": True, "evaluation": {"fail_if"}}
# and those that are resolved when the model is loaded
_RESOLVED: Any = {
    "device": True, "dtype": True, "offload": True, "data": {"batch_size"}, "evaluation": {"backend"}
}  # fmt: skip


def evaluate(
    model_name: str,
    recipe: Recipe,
    *,
    scales: Sequence[Path] = (),
    suite: Suite | None = None,
    wish: Wish | None = None,
    saved: SavedResults = UNSAVED,
    progress: Progress = SILENT,
    check: Callable[[Evaluation], None] = lambda _: None,
) -> Evaluation:
    """Compare FP8 caches with the model's own on unseen text; `suite` replaces the recipe's.

    With a `wish`, nothing is measured that cannot be served there. Results are kept in `saved`, or were.
    `check` may refuse what was loaded. `summarize` makes the report.
    """
    evaluation = open_inputs(model_name, recipe, scales, suite, wish)
    if saved.path is not None:
        saved.open(_inputs_of_files(evaluation), _RESULT_TYPES)
    _load_model_and_text(evaluation, progress, saved)
    if saved.path is not None:
        evaluation.warnings += saved.begin(_inputs_in_memory(evaluation), progress)
    check(evaluation)
    _calibrate(evaluation)
    _choose_variants(evaluation)
    _measure_variants(evaluation)
    return evaluation


def open_inputs(
    model_name: str, recipe: Recipe, scales: Sequence[Path] = (), suite: Suite | None = None,
    wish: Wish | None = None,
) -> Evaluation:  # fmt: skip
    """Find everything by its name, and refuse what cannot be evaluated before the model is loaded."""
    check_backend(recipe.evaluation.backend, recipe.device)
    checkpoint = find_model(model_name)
    config = load_config(checkpoint, recipe.trust_remote_code)
    check_types(recipe.evaluation.caches, is_latent=checkpoint.caches_latents)
    suite, warnings = inputs.fit_suite(config, recipe.evaluation, suite)
    if (few := suite.documents) < inputs.ENOUGH:
        warnings.append(f"an interval over {few} samples tells little: measure {inputs.ENOUGH} or more")
        if wish is not None:
            raise InputError(f"--samples {few}: {warnings[-1]}, as this decides")
    if wish is not None:
        suite = inputs.whole_text_only(suite)
        check_positions(config, wish.request_tokens or 0, "--request-tokens")
    tasks = find_tasks(recipe.evaluation.tasks, recipe.evaluation.task_limit)
    opened_scales = inputs.open_named_scales(scales, checkpoint)
    misfits = weight_warnings(scales, checkpoint)
    if misfits and recipe.evaluation.fail_if:
        raise InputError(f"{misfits[0]}; without --fail-if they are measured all the same")
    readers, unknown = find_readers(scales, checkpoint.path)
    return Evaluation(
        model_name=model_name,
        checkpoint=checkpoint,
        config=config,
        recipe=inputs.complete_recipe(recipe, suite, with_other_text=wish is None),
        suite=suite,
        wish=wish,
        tasks=tasks,
        scales=opened_scales,
        readers=readers,
        warnings=[*warnings, *quantization_notes(checkpoint), *misfits, *change_warnings(scales), *unknown],
    )


def _load_model_and_text(evaluation: Evaluation, progress: Progress, saved: SavedResults = UNSAVED) -> None:
    """Load the model and the text; refuse a model, scales or cache types that cannot be measured."""
    recipe, suite, checkpoint = evaluation.recipe, evaluation.suite, evaluation.checkpoint
    settings, trust_code = recipe.evaluation, recipe.trust_remote_code
    progress.stage("load")
    source = partial(load_model, checkpoint, evaluation.config, recipe.dtype, recipe.device, trust_code)
    tokenizer = load_tokenizer(checkpoint, trust_code)
    evaluation.setup = setup = Setup(source, tokenizer, settings.backend, progress, settings.attention, saved)
    evaluation.text, warnings = inputs.load_text(setup, recipe, suite, evaluation.readers)
    readers = add_own_samples(evaluation.readers, evaluation.text.calibration.samples)
    reader = MediaReader(checkpoint, evaluation.config, trust_code)
    evaluation.other_documents, other_warnings = load_other_texts(setup, recipe, suite, readers, reader)
    evaluation.variants = [
        Variant(name, "given with --scales", "given", scales_for(setup.model))
        for name, scales_for in evaluation.scales.items()
    ]
    is_text = not any(text.data.media for text in evaluation.other_documents)
    if is_text and takes_media(checkpoint.config):
        other_warnings.append(TEXT_ALONE)
    model = setup.model
    size = resolve_batch_size(recipe.data, model.device.type)
    resolved = {
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "offload": "none",
    }
    data = recipe.data.model_copy(update={"batch_size": size})
    own = settings.model_copy(update={"backend": setup.resolved_backend})
    evaluation.recipe = recipe.model_copy(update={**resolved, "data": data, "evaluation": own})
    evaluation.layers = cached_layers(model)  # runs the model, whose tokens are checked now
    check_model(setup.attention, model, [*evaluation.layers.shapes.values()])
    check_fp8_cache(model)
    evaluation.cache_types, type_warnings = select_types(settings.caches, evaluation.layers)
    evaluation.warnings += [*warnings, *other_warnings, *type_warnings]


def _inputs_of_files(evaluation: Evaluation) -> dict[str, Any]:
    """Return what figures follow from and is known before the model is loaded, by its name in errors.

    A run goes on only with equal inputs, these and `_inputs_in_memory`.
    """
    checkpoint = evaluation.checkpoint
    not_compared = {**_FREE_TO_CHANGE, **_RESOLVED, "evaluation": {"fail_if", "backend"}}
    return {
        **package_versions(_LIBRARIES),
        "model": fingerprint(checkpoint),
        "file beside the weights": settings_digest(checkpoint),
        "state of the weight files": checkpoint.sizes_and_times(),
        **_settings(evaluation.recipe.model_dump(mode="json", exclude=not_compared)),
        "suite": asdict(evaluation.suite),
        "command": "recommend" if evaluation.wish else "eval",
        "--engine": evaluation.wish and evaluation.wish.engine,
        "--gpu": evaluation.wish and evaluation.wish.gpu,
        "task or text of a task": digest_tasks(evaluation.tasks),
    }


def _inputs_in_memory(evaluation: Evaluation) -> dict[str, Any]:
    """Return what else figures follow from, by its name in errors."""
    device, text = evaluation.setup.model.device.type, evaluation.text
    other_texts = [
        (x.data.fingerprint, [piece.ids for piece in x.pieces]) for x in evaluation.other_documents
    ]
    return {
        "machine": machine_name(device),
        **_settings(evaluation.recipe.model_dump(mode="json", include=_RESOLVED)),
        "set of scales in --scales": _digest({x.name: x.scales for x in evaluation.variants}),
        "dataset": _digest([text.calibration.samples, text.documents, text.long_documents, text.passkeys]),
        "dataset of --also": _digest(other_texts),
        THREADS: device == "cpu" and torch.get_num_threads(),
    }


def _settings(document: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe, or of a part of it, by their names in errors."""
    settings = dict[str, Any]()
    for key, value in document.items():
        section = value if isinstance(value, dict) else {"": value}
        settings |= {f"setting '{key}.{name}'".replace(".'", "'"): x for name, x in section.items()}
    return settings


def _digest(content: Any) -> str:
    """Return the SHA-256 of tensors, records and plain values."""
    text = json_text(content, default=lambda x: x.tolist() if isinstance(x, Tensor) else vars(x))
    return sha256(text.encode()).hexdigest()


def _calibrate(evaluation: Evaluation) -> None:
    """Measure the statistics that variants are made of."""
    setup, recipe, text = evaluation.setup, evaluation.recipe, evaluation.text.calibration
    evaluation.stats = evaluation.random_stats = setup.saved.once(
        inputs.calibrate_on, setup, text.samples, recipe, "the evaluation's own text"
    )
    if "random" in _built_in_names(recipe.evaluation):
        evaluation.random_stats = setup.saved.once(inputs.calibrate_on_random_tokens, setup, recipe)
    if evaluation.stats.latent:
        evaluation.warnings.append(LATENT_NOTE)
    if other_attention(setup.model) is None:
        evaluation.warnings.append(ONE_ATTENTION)


def _choose_variants(evaluation: Evaluation) -> None:
    """Make the variants that were asked for and can be measured; the scales of --scales come second."""
    setup, stats, settings = evaluation.setup, evaluation.stats, evaluation.recipe.evaluation
    setup.progress.stage("derive scales")
    built_in = _choose_built_in(evaluation)
    caches, warnings = cache_variants(
        setup, evaluation.checkpoint, settings.caches, evaluation.cache_types, evaluation.layers, stats
    )
    _refuse_variants(evaluation, [*built_in, *caches])
    variants = [
        variant
        for variant in (*built_in, *evaluation.variants, *caches)
        if variant.name not in evaluation.refused
    ]
    variants, mode_warnings = select_variants(setup, variants, settings.variants)
    evaluation.variants = count_bytes(variants, evaluation.layers)
    if any(is_of_own_text(variant.name, variant.kind, variant.is_baked) for variant in variants):
        data = evaluation.recipe.data
        advice = inputs.advise_length(evaluation.suite, data)
        evaluation.warnings += evaluation.text.calibration.summary(data.skip_first).warnings(advice)
    evaluation.warnings += [*warnings, *mode_warnings]


def _choose_built_in(evaluation: Evaluation) -> list[Variant]:
    """Return the controls and the variants with static scales."""
    variants = build_variants(evaluation.stats, evaluation.random_stats)
    missing = {*(evaluation.recipe.evaluation.variants or ())} - {variant.name for variant in variants}
    if missing:
        raise InputError(
            f"--variants {min(missing)}: this model caches latents (MLA), which have one scale per "
            f"layer; choose from {', '.join(v.name for v in variants if v.kind != 'control')}"
        )
    names = _built_in_names(evaluation.recipe.evaluation)
    has_eager = other_attention(evaluation.setup.model) is not None
    return [v for v in variants if v.name in names and (has_eager or not v.eager)]


def _built_in_names(settings: EvaluationRecipe) -> tuple[str, ...]:
    static = STATIC if {"all", "fp8"} & set(settings.caches) else ()
    return (*(VARIANTS if settings.variants is None else settings.variants), *static, *CONTROLS)


def _refuse_variants(evaluation: Evaluation, variants: Sequence[Variant]) -> None:
    """Find out which `variants` cannot be served as the wish says; without one, all are measured."""
    name, checkpoint, wish = evaluation.model_name, evaluation.checkpoint, evaluation.wish
    recipe = evaluation.recipe
    evaluation.offers = offers = Offers(
        served_name(name, checkpoint.path), checkpoint, recipe.data.dataset, evaluation.config,
        evaluation.layers, recipe.trust_remote_code,
    )  # fmt: skip
    if wish is not None:
        for variant in variants:
            try:
                if variant.kind != "control":
                    offers.find(variant, wish.engine, wish.gpu)
            except NotServed as error:
                evaluation.refused[variant.name] = str(error)
        evaluation.refused |= offers.refuse_unsimulated(wish.engine, wish.gpu)


def _measure_variants(evaluation: Evaluation) -> None:
    """Measure every variant beside the reference, on all that was loaded."""
    setup, text, variants = evaluation.setup, evaluation.text, evaluation.variants
    settings = evaluation.recipe.evaluation
    try:
        check_other_texts(evaluation.other_documents, variants)  # what refuses comes first
        if settings.kl_budget is not None:
            choose_searched(variants)
        evaluation.measured = measure(setup, variants, text)
        if evaluation.wish and not (own := evaluation.measured[REFERENCE]).is_finite:
            reason = explain_not_finite([document.kl for document in own.documents])
            raise InputError(f"{BROKEN}: {reason}; mend its weights before a cache is chosen")
        evaluation.texts = written_texts(setup, text, evaluation.measured)
        evaluation.other_texts = measure_other_texts(setup, evaluation.other_documents, variants)
        if settings.kl_budget is not None:
            evaluation.search = search_layers(setup, variants, text.layer_documents, settings.kl_budget)
        evaluation.task_figures = run_tasks(
            setup, evaluation.tasks, task_variants(variants, settings.variants)
        )
    except AttentionError as error:
        raise InputError(str(error)) from error


def check_evaluation(recipe: Recipe, scales: Sequence[Path]) -> list[Condition]:
    """Read the conditions; refuse unknown variants. `scales` may not be there yet."""
    settings = recipe.evaluation
    conditions = [parse_condition(text) for text in settings.fail_if]
    names = [*_built_in_names(settings), *cache_names(settings.caches), *inputs.name_scales(scales)]
    for condition in conditions:
        check_variant(condition, names)
    other_datasets(recipe)
    return conditions


def run_evaluation(
    model_name: str,
    recipe: Recipe,
    *,
    scales: Sequence[Path] = (),
    output: Path | None = None,
    overwrite: bool = False,
    resume: bool | None = None,
    progress: Progress = SILENT,
) -> tuple[Report, list[str]]:
    """Measure what `recipe.evaluation` says; returns the report and a line for each failure.

    `scales` are directories to compare; the report goes to `output`, with `overwrite` in place of an earlier
    one; `progress` is told each step. Failures are a broken model, conditions that are met, and a report that
    cannot be written. Unless `resume` is None, results are saved beside `output` until it is there; with
    `resume` a run that was stopped goes on.
    """
    conditions = check_evaluation(recipe, scales)
    with saved_report(output, recipe, overwrite=overwrite, resume=resume) as (saved, write):
        report = summarize(evaluate(model_name, recipe, scales=scales, saved=saved, progress=progress))
        problems = write(report)
    lines = [line for condition in conditions for line in failures(condition, report, report.subjects)]
    broken = [] if report.variants[REFERENCE].kl.is_finite else [BROKEN]
    return report, [*broken, *problems, *lines]


@contextmanager
def saved_report(
    output: Path | None, recipe: Recipe, *, overwrite: bool, resume: bool | None
) -> Iterator[tuple[SavedResults, Callable[[Report], list[str]]]]:
    """Yield where results are saved, and what writes the report; after both, results are removed.

    Nothing is saved without an `output`, nor with `resume=None`. InputError as from `report_place`.
    """
    if resume and output is None:
        raise InputError("--resume needs -o: results are saved beside the report; give its directory")
    place = None if output is None or resume is None else results_file(output)
    if place is not None:
        check_resumed(place, resume=bool(resume))
    # one that was killed as it wrote its report may have left a part of it
    is_cut_short = bool(resume) and place is not None and place.exists()
    problems = list[str]()
    with report_place(output, overwrite=overwrite or is_cut_short) as write_report:

        def write(report: Report) -> list[str]:
            problems[:] = write_report(report)
            return problems  # what is added to it keeps the results

        yield SavedResults(place, bool(resume), 60 * recipe.save_minutes), write
        if place is not None and not problems:
            remove_progress(place)
