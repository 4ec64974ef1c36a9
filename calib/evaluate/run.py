"""The whole evaluation: calibrate on one part of the data, measure every variant on another."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from calib.caches.types import Shape
from calib.capture.attention import layer_shapes
from calib.capture.capabilities import check_fp8_cache
from calib.capture.directory_scales import weight_warnings
from calib.choices import CONTROLS, VARIANTS
from calib.errors import InputError
from calib.evaluate import inputs
from calib.evaluate.attention_modes import check_model, select_variants
from calib.evaluate.cache_variants import (
    STATIC,
    cache_names,
    cache_variants,
    wanted_types,
    with_bytes,
)
from calib.evaluate.held_out import find_readers, with_own
from calib.evaluate.inputs import Material
from calib.evaluate.layer_errors import predicted
from calib.evaluate.measure import measure, search, written_texts
from calib.evaluate.other_text import (
    OtherDocuments,
    check_other_texts,
    load_other_texts,
    measure_other_texts,
    wanted_datasets,
)
from calib.evaluate.page.html import check_report_directory, write_report
from calib.evaluate.recommend import Wish
from calib.evaluate.report import Recommendation, Report, Search, Suite
from calib.evaluate.serve_commands import Offers
from calib.evaluate.summarize import Evaluation, summarize
from calib.evaluate.tasks import Tasks, find_tasks, name_tasks, run_tasks, task_variants
from calib.evaluate.variants import ONE_ATTENTION, Setup, Variant, build_variants, other_attention
from calib.evaluate.verdict import check_variant, failures
from calib.files.atomic import claimed
from calib.files.model_directory import ModelDirectory
from calib.files.text import Condition, parse_condition
from calib.models.config import load_config
from calib.models.quantized.weights import quantization_notes
from calib.models.sources import find_model
from calib.progress import SILENT, Progress
from calib.recipe import EvaluationRecipe, Recipe
from calib.scales.scales import LATENT_NOTE
from calib.scales.stats import KVStats
from calib.scales.text_summary import TextSummary
from fp8kv_runtime.errors import AttentionError


def check_evaluation(recipe: Recipe, scales: Sequence[Path]) -> list[Condition]:
    """Read the conditions; refuse unknown variants and tasks. `scales` may not be there yet."""
    wanted = recipe.evaluation
    conditions = [parse_condition(text) for text in wanted.fail_if]
    names = [*_built_in(wanted), *cache_names(wanted.caches), *inputs.given_names(scales)]
    for condition in conditions:
        check_variant(condition, names)
    if wanted.tasks:
        name_tasks(wanted.tasks)
    wanted_datasets(recipe)
    return conditions


def run_evaluation(
    model_name: str,
    recipe: Recipe,
    *,
    scales: Sequence[Path] = (),
    output: Path | None = None,
    progress: Progress = SILENT,
) -> tuple[Report, list[str]]:
    """Measure what `recipe.evaluation` says; returns the report and a line per failed condition.

    `scales` are directories to compare; the report goes to `output`; `progress` is told each step.
    """
    conditions = check_evaluation(recipe, scales)
    with nullcontext() if output is None else claimed(output, overwrite=True):
        if output is not None:
            check_report_directory(output)
        report = summarize(evaluate(model_name, recipe, scales=scales, progress=progress))
        if output is not None:
            write_report(report, output)
    failed = [line for each in conditions for line in failures(each, report, report.subjects)]
    return report, failed


def evaluate(
    model_name: str,
    recipe: Recipe,
    *,
    scales: Sequence[Path] = (),
    suite: Suite | None = None,
    wish: Wish | None = None,
    progress: Progress = SILENT,
) -> Evaluation:
    """Compare FP8 caches with the model's own on unseen text; `suite` replaces the recipe's.

    With a `wish` nothing is measured that cannot be served there.
    """
    wanted = recipe.evaluation
    checkpoint = find_model(model_name)
    config = load_config(checkpoint, recipe.trust_remote_code)
    suite, notes = inputs.fitting_suite(config, wanted, suite)
    suite = suite if wish is None else inputs.whole_text_only(suite)
    notes += quantization_notes(checkpoint)
    recipe = inputs.evaluation_recipe(recipe, suite)
    tasks = find_tasks(wanted.tasks, wanted.task_limit)
    opened = inputs.open_given(scales, checkpoint)
    notes += weight_warnings(scales, checkpoint)
    setup = inputs.load_setup(checkpoint, config, recipe, progress)
    model = setup.model
    given = [Variant(n, "given with --scales", "given", of(model)) for n, of in opened.items()]
    readers, warnings = find_readers(scales, checkpoint.path)
    data, read, material, left = inputs.load_material(setup, recipe, suite, readers)
    others, more = load_other_texts(setup, recipe, suite, with_own(readers, read.samples))
    shapes = _fitting_shapes(setup)  # runs the model, whose tokens are checked now
    types, left_out = wanted_types(wanted.caches, shapes)
    stats = inputs.calibrate_on(setup, read.samples, recipe)
    notes += _doubts(read.summary(recipe.data.skip_first), stats, model)
    about = inputs.describe(data, material, stats.tokens)
    conditions = inputs.conditions(setup, model_name, suite, about, shapes)
    variants = _static(setup, recipe, stats)
    caches, unbaked = cache_variants(setup, checkpoint, wanted.caches, types, stats)
    served_name, trust = _served_name(model_name, checkpoint), recipe.trust_remote_code
    offers = Offers(served_name, checkpoint, recipe.data.dataset, shapes, trust)
    refused = _refused([*variants, *caches], offers, wish)
    measured = [each for each in (*variants, *given, *caches) if each.name not in refused]
    measured, unlike = select_variants(setup, measured, wanted.variants)
    results = _results(setup, with_bytes(measured, shapes), material, others, tasks, wanted)
    warnings = [*notes, *data.warnings, *warnings, *left, *more, *left_out, *unbaked, *unlike]
    chances = {} if recipe.data.skip_first else predicted(measured, stats)
    return Evaluation(
        conditions, warnings=warnings, offers=offers, refused=refused,
        places=stats.places(), clip_chances=chances, **results,
    )  # fmt: skip


def _fitting_shapes(setup: Setup) -> list[Shape]:
    """Return the shapes of K and V; refuse a model that the evaluation cannot run."""
    shapes = layer_shapes(setup.model)
    check_model(setup.attention, setup.model, shapes)
    check_fp8_cache(setup.model)
    return shapes


def _doubts(text: TextSummary, stats: KVStats, model: PreTrainedModel) -> list[str]:
    """Say what limits figures of scales that were measured on `text`."""
    lacks = other_attention(model) is None
    return [*text.warnings(), *[LATENT_NOTE] * stats.latent, *[ONE_ATTENTION] * lacks]


def _results(
    setup: Setup,
    variants: list[Variant],
    material: Material,
    others: list[OtherDocuments],
    tasks: Tasks,
    asked: EvaluationRecipe,
) -> dict[str, Any]:
    """The measurements, by their names in `Evaluation`."""
    budget = asked.kl_budget
    try:
        check_other_texts(others, variants)  # what refuses comes first
        measured = measure(setup, variants, material)
        return {
            "measured": measured,
            "texts": written_texts(setup, material, measured),
            "other_texts": measure_other_texts(setup, others, variants),
            "search": None if budget is None else _search(setup, variants, material, budget),
            "tasks": run_tasks(setup, tasks, task_variants(variants, asked.variants)),
        }
    except AttentionError as error:
        raise InputError(str(error)) from error


def _refused(variants: Sequence[Variant], offers: Offers, wish: Wish | None) -> dict[str, str]:
    """Why variants cannot be served where the wish is to, by their names."""
    if wish is None:
        return {}
    caches = [each for each in variants if each.kind != "control"]
    answers = {each.name: offers.of(each, wish.engine, wish.gpu) for each in caches}
    return {name: answer for name, answer in answers.items() if isinstance(answer, str)}


def _served_name(model: str, checkpoint: ModelDirectory) -> str:
    """What engines are given for `model`."""
    return str(checkpoint.path) if model.startswith("builtin:") else model


def _static(setup: Setup, recipe: Recipe, stats: KVStats) -> list[Variant]:
    """The variants with scales that are wanted, and the controls."""
    names = _built_in(recipe.evaluation)
    random = inputs.calibrate_on_random_tokens(setup, recipe) if "random" in names else stats
    made = build_variants(stats, random)
    asked = {*(recipe.evaluation.variants or ())}
    if missing := asked - {variant.name for variant in made}:
        raise InputError(
            f"--variants {min(missing)}: this model caches latents (MLA), which have one scale per "
            f"layer; choose from {', '.join(v.name for v in made if v.kind != 'control')}"
        )
    lacks = other_attention(setup.model) is None
    return [v for v in made if v.name in names and not (v.eager and lacks)]


def _built_in(wanted: EvaluationRecipe) -> tuple[str, ...]:
    static = STATIC if {"all", "fp8"} & set(wanted.caches) else ()
    return (*(VARIANTS if wanted.variants is None else wanted.variants), *static, *CONTROLS)


def _search(setup: Setup, variants: list[Variant], material: Material, budget: float) -> Search:
    """Search with the first of --scales, or else `attn_head`, or else any variant engines load."""
    ranks = {"given": 0, "attn_head": 1}
    served = [variant for variant in variants if variant.served]
    if not served:
        raise InputError("a search needs scales that engines load: give --scales or keep attn_head")
    subject = min(served, key=lambda v: min(ranks.get(v.kind, 2), ranks.get(v.name, 2)))
    return search(setup, subject, material.layer_documents, budget)


def run_recommendation(
    model_name: str, recipe: Recipe, wish: Wish, *, progress: Progress
) -> tuple[Recommendation, list[str]]:
    """Measure whole texts with all caches that can be served, and choose one; warnings as well."""
    evaluation = recipe.evaluation.model_copy(update={"caches": ("all",), "variants": (), "also": ()})
    recipe = recipe.model_copy(update={"evaluation": evaluation})
    report = summarize(evaluate(model_name, recipe, wish=wish, progress=progress), wish)
    assert report.recommended is not None
    return report.recommended, report.warnings
