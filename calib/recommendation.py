"""`fp8kv recommend`: choose a cache; with `--write` make the directory that serves it, and measure that."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from calib.capture.directory_scales import open_scales
from calib.capture.processes import World
from calib.capture.resume import START_AGAIN, check_same_run, compared_inputs, progress_file
from calib.choices import REFERENCE, FormatName, Purpose
from calib.engines.cache_support import format_for
from calib.engines.catalogue import GPUS, choose_engines
from calib.engines.outcome import Place
from calib.engines.quantization_config import names_fp8_cache
from calib.engines.verification import verify_directory
from calib.errors import Fp8kvError, InputError, one_line
from calib.evaluate.held_out import hold_out
from calib.evaluate.inputs import sample_loader
from calib.evaluate.measure import compare_variants
from calib.evaluate.recommend import Wish, advised_cache
from calib.evaluate.report import Figure, Recommendation, RecommendedDirectory, Report, ServedCache
from calib.evaluate.run import evaluate, saved_report
from calib.evaluate.statistics import estimate, to_numpy
from calib.evaluate.summarize import Evaluation, summarize
from calib.evaluate.variants import Setup, Variant
from calib.files.atomic import atomic_directory, claimed
from calib.files.model_directory import ModelDirectory
from calib.formats.base import Export
from calib.formats.card import render_card
from calib.formats.directory import check_output, check_printable, write_checkpoint
from calib.job import run as calibrate
from calib.models.config import load_config
from calib.models.load import load_model, load_tokenizer
from calib.models.sources import find_model
from calib.progress import SILENT, Progress
from calib.recipe import ExportRecipe, ObserverRecipe, Recipe
from calib.rescale.bake import bake
from calib.rescale.pipeline import find_scale
from calib.scales.stats_file import load_progress
from fp8kv_runtime.errors import AttentionError

_MORE_SAMPLES = 4  # times those of the evaluation's own calibration, as far as there are so many
_CHOSEN = ("strategy", "observer", "offload")  # settings of a calibration that are not known before it


def run_recommendation(
    model_name: str,
    recipe: Recipe,
    wish: Wish,
    *,
    write: Path | None = None,
    output: Path | None = None,
    overwrite: bool = False,
    resume: bool | None = None,
    progress: Progress = SILENT,
) -> tuple[Recommendation, list[str], RecommendedDirectory | None, list[str]]:
    """Measure whole texts with all caches that can be served, and choose one.

    `write` is the directory that shall serve it, `output` that of the report; unless `resume` is None,
    results are saved beside that, and with `resume` a run that was stopped goes on. Returns the choice,
    warnings, what was written, and sentences on what went wrong after the choice.
    """
    check_printable(Path(model_name))
    settings = recipe.evaluation.model_copy(update={"caches": ("all",), "variants": (), "also": ()})
    own = recipe.model_copy(update={"evaluation": settings})
    if output is None and write is not None and progress_file(write, 0).exists():
        resume = None  # the calibration alone goes on
    with saved_report(output, own, overwrite=overwrite, resume=resume) as (saved, write_report):
        if write is not None:
            overwrite = overwrite or saved.written_cache(write) is not None
            _check_places(find_model(model_name), write, output, overwrite=overwrite)
            wish = replace(wish, is_written=True)

        def check(loaded: Evaluation) -> None:
            if write is not None:
                _check_calibration(loaded, recipe, write)

        evaluation = evaluate(model_name, own, wish=wish, saved=saved, progress=progress, check=check)
        report = summarize(evaluation)
        problems = write_report(report)
        answer, written = report.recommended, None
        assert answer is not None
        if write is not None:
            try:
                written = _write(evaluation, answer.chosen, recipe, wish, write, overwrite=overwrite)
                write_report(_tell_written(report, answer, written))
            except (Fp8kvError, OSError) as error:
                problems.append(one_line(error))
    return answer, report.warnings, written, [*problems, *(written.problems if written else [])]


def _tell_written(report: Report, answer: Recommendation, written: RecommendedDirectory) -> Report:
    """Return the report with the command that serves what was written, and its KL."""
    chosen = answer.chosen.model_copy(update={"commands": (written.serve,)})
    answer = answer.model_copy(update={"chosen": chosen})
    advice = [advised_cache(answer), f"{chosen.cache} was {written.line}."]
    return report.model_copy(update={"recommended": answer, "advice": advice})


def _check_places(checkpoint: ModelDirectory, write: Path, output: Path | None, *, overwrite: bool) -> None:
    """Refuse, before anything is measured, places and models that nothing can be written for."""
    if output is not None:
        check_output(write, output, overwrite=overwrite, kind="report", flag="--write")
    check_output(write, checkpoint.path, overwrite=overwrite, flag="--write")
    with claimed(write, overwrite=overwrite):
        pass  # it can be written
    if find_scale(checkpoint) or names_fp8_cache(checkpoint):
        raise InputError(
            f"--write takes a model without KV scales, and '{checkpoint.path}' has some, or a config that "
            "makes its cache FP8; take them out with fp8kv strip"
        )


def _write(
    evaluation: Evaluation, chosen: ServedCache, recipe: Recipe, wish: Wish, output: Path, *, overwrite: bool
) -> RecommendedDirectory:
    """Make the directory, unless the run that this one resumes has made it; and measure it again."""
    variant, saved = evaluation.measured[chosen.cache].variant, evaluation.setup.saved
    offer, progress = evaluation.offers.find(variant, wish.engine, wish.gpu), evaluation.setup.progress
    serve = evaluation.offers.serve(offer, str(output)).commands[-1]
    recipe, documents = _plan(evaluation, variant, recipe, format_for(offer.engine, wish.gpu))
    del evaluation.setup  # one model in memory
    if saved.written_cache(output) != chosen.cache:
        _make_directory(evaluation, variant, recipe, serve, output, progress, overwrite=overwrite)
        saved.save_written(output, chosen.cache)
    try:
        kl, problems = _measure_again(evaluation, variant, documents, output, progress), list[str]()
    except (Fp8kvError, AttentionError, OSError) as error:
        raise InputError(f"'{output}' was written, but could not be measured: {one_line(error)}") from error
    if variant.is_calibrated or variant.cache == "fp8":
        place = Place(fnuz=all(GPUS[gpu].is_fnuz for gpu in offer.gpus))
        if not verify_directory(output, choose_engines(offer.engine, offer.version), place=place).is_good:
            problems.append(f"{offer.engine} does not load it: see fp8kv verify {quote(str(output))}")
    if not kl.is_finite:
        problems.append(f"'{output}': its KL is not a finite number")
    elif wish.kl is not None and kl.value > wish.kl:
        problems.append(f"'{output}': its KL is above {wish.kl:g}, on other text than it was chosen on")
    tokens = sum(map(len, documents))
    return RecommendedDirectory(output=str(output), serve=serve, kl=kl, tokens=tokens, problems=problems)


def _make_directory(
    evaluation: Evaluation, variant: Variant, recipe: Recipe, serve: str, output: Path, progress: Progress,
    *, overwrite: bool,
) -> None:  # fmt: skip
    """Make the directory: with scales, with baked weights, or as the model is."""
    model = evaluation.model_name
    if variant.is_baked:
        trust = {"trust_remote_code": recipe.trust_remote_code}
        purpose: Purpose = "fp8" if variant.cache == "fp8" else "int8"
        with TemporaryDirectory() as directory:
            scales = Path(directory, "calibration")
            calibrate(model, recipe, scales, progress=progress)
            bake(model, scales, purpose, output, overrides=trust, overwrite=overwrite, progress=progress)
    elif variant.is_calibrated:
        resume = progress_file(output, 0).exists()  # of a run that was stopped
        calibrate(model, recipe, output, overwrite=overwrite, resume=resume, progress=progress)
    else:
        progress.stage("write")
        kind = "16 bits" if variant.kind == REFERENCE else f"type {variant.cache or variant.kind}"
        card = render_card("as_it_is", model=model, kind=kind, serve=serve)
        source, copied = evaluation.checkpoint, progress.copied
        with atomic_directory(output, overwrite=overwrite) as scratch:
            write_checkpoint(Export(), source, scratch, weights="link", readme=card, on_copied=copied)
            source.check_unchanged()


def _plan(
    evaluation: Evaluation, variant: Variant, recipe: Recipe, format: FormatName
) -> tuple[Recipe, Sequence[Tensor]]:
    """Return the recipe of its calibration, and documents that neither that nor the choice has read."""
    recipe, scales = _plan_text(evaluation, recipe), variant.scales
    changes: dict[str, Any] = {
        "strategy": scales.strategy if scales else recipe.strategy,
        "observer": ObserverRecipe(name="mse" if variant.name == "mse" else "absmax"),
        "export": ExportRecipe(formats=(format if variant.is_calibrated else "fp8kv",)),
    }
    load = sample_loader(evaluation.setup, recipe.data)
    pieces = hold_out(load, evaluation.readers, recipe.data.samples, evaluation.suite.documents).pieces
    return recipe.model_copy(update=changes), [torch.tensor(piece.ids) for piece in pieces]


def _plan_text(evaluation: Evaluation, recipe: Recipe) -> Recipe:
    """Return the recipe with the text of its calibration, and the type of the weights that reads it."""
    suite, data, least = evaluation.suite, evaluation.recipe.data, len(evaluation.text.data.samples)
    samples = max(_MORE_SAMPLES * suite.calibration_samples, least)
    available = len(sample_loader(evaluation.setup, data)(samples + suite.documents).samples)
    samples = max(min(samples, available - suite.documents), least)
    data = data.model_copy(update={"samples": samples})
    return recipe.model_copy(update={"data": data, "dtype": evaluation.recipe.dtype})


def _check_calibration(evaluation: Evaluation, recipe: Recipe, output: Path) -> None:
    """Refuse, before anything is measured, saved progress towards `output` that no choice goes on with."""
    path = progress_file(output, 0)
    if not path.exists():
        return
    recipe = _plan_text(evaluation, recipe).model_copy(update={"device": evaluation.recipe.device})
    data = sample_loader(evaluation.setup, recipe.data)(recipe.data.samples)
    inputs = compared_inputs([evaluation.checkpoint], recipe, data, World())
    earlier = load_progress(path, START_AGAIN)[1].get("run", {})
    check_same_run(path, *map(_drop_choice, (earlier, inputs)))


def _drop_choice(inputs: dict[str, Any]) -> dict[str, Any]:
    """Leave out of a calibration's inputs what follows from the choice, or is resolved later."""
    recipe = {key: value for key, value in inputs.get("recipe", {}).items() if key not in _CHOSEN}
    data = {key: value for key, value in recipe.get("data", {}).items() if key != "batch_size"}
    return {**inputs, "recipe": {**recipe, "data": data}}


@torch.inference_mode()
def _measure_again(
    evaluation: Evaluation, variant: Variant, documents: Sequence[Tensor], output: Path, progress: Progress
) -> Figure:
    """Read the directory as an engine would, and return its KL on `documents` [T]."""
    checkpoint, recipe = find_model(str(output)), evaluation.recipe
    trust, backend = recipe.trust_remote_code, recipe.evaluation.backend
    model = load_model(checkpoint, load_config(checkpoint, trust), recipe.dtype, recipe.device, trust)
    setup = Setup(model, load_tokenizer(checkpoint, trust), backend, progress)
    if variant.is_calibrated:
        variant = replace(variant, scales=open_scales(output, checkpoint)(model))
    elif variant.is_baked:  # its rounding, without the factors that the weights have now
        plain = "none" if variant.cache == "fp8" else str(variant.cache)
        variant = evaluation.measured[plain].variant
    variant = replace(variant, name="written")
    reads = progress.each("held-out text", documents, "samples")
    kl = [compare_variants(setup, token_ids, [variant])["written"].kl for token_ids in reads]
    return estimate(to_numpy(kl))
