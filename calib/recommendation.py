"""`fp8kv recommend`: choose a cache; with `--write` make the directory that serves it, and measure that."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from calib.choices import REFERENCE, Purpose
from calib.engines.cache_support import Offer
from calib.engines.catalogue import GPUS, choose_engines
from calib.engines.outcome import Place
from calib.engines.quantization_config import names_fp8_cache
from calib.engines.verification import verify_directory
from calib.errors import InputError
from calib.evaluate.inputs import name_scales, sample_loader
from calib.evaluate.page.page import check_report_directory, write_report
from calib.evaluate.recommend import Wish
from calib.evaluate.report import Figure, Recommendation, Suite
from calib.evaluate.run import evaluate
from calib.evaluate.serve_commands import format_for
from calib.evaluate.summarize import Evaluation, summarize
from calib.evaluate.variants import Variant
from calib.files.atomic import atomic_directory, claimed
from calib.files.model_directory import ModelDirectory
from calib.formats.base import Export
from calib.formats.card import render_card
from calib.formats.directory import check_output, write_checkpoint
from calib.job import run as calibrate
from calib.models.sources import find_model
from calib.progress import SILENT, Progress
from calib.recipe import ExportRecipe, ObserverRecipe, Recipe
from calib.rescale.bake import bake
from calib.rescale.pipeline import find_scale

_MORE_SAMPLES = 4  # times those of the evaluation's own calibration, as far as there are so many


@dataclass(frozen=True)
class Written:
    """A directory that serves what was recommended."""

    output: Path
    serve: str  # the command
    kl: Figure  # of the directory, read again
    tokens: int  # that `kl` was measured on, new to the calibration
    problems: Sequence[str]  # why it is not what was recommended; empty: it is

    def lines(self) -> list[str]:
        """Say where it is, what it was measured to do, and how to serve it."""
        figures = f"KL {self.kl.value:.2g} nats [{self.kl.low:.2g}, {self.kl.high:.2g}]"
        return [
            f"written to {self.output}; read again and measured on {self.tokens:,} tokens that its making "
            f"did not read: {figures}",
            "serve with:",
            f"  {self.serve}",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            "output": str(self.output),
            "serve": self.serve,
            "kl": self.kl.model_dump(),
            "tokens": self.tokens,
            "problems": [*self.problems],
        }


@dataclass(frozen=True)
class _Making:
    """A recommended cache, and what its directory is made of."""

    model: str
    checkpoint: ModelDirectory
    variant: Variant
    offer: Offer
    serve: str
    recipe: Recipe  # of its calibration
    suite: Suite
    read_before: Sequence[list[int]]  # token ids that the choice was made on

    @property
    def purpose(self) -> Purpose | None:
        """The cache that its weights are baked for; None: they are not."""
        if not self.variant.is_baked:
            return None
        return "fp8" if self.variant.cache == "fp8" else "int8"

    @property
    def has_scales(self) -> bool:
        """Return whether the directory holds calibrated scales."""
        return self.variant.scales is not None and self.variant.name != "none"


def run_recommendation(
    model_name: str,
    recipe: Recipe,
    wish: Wish,
    *,
    write: Path | None = None,
    output: Path | None = None,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> tuple[Recommendation, list[str], Written | None]:
    """Measure whole texts with all caches that can be served, and choose one; warnings as well.

    `write` is the directory that shall serve it, `output` that of the report.
    """
    settings = recipe.evaluation.model_copy(update={"caches": ("all",), "variants": (), "also": ()})
    own = recipe.model_copy(update={"evaluation": settings})
    if write is not None:
        _check_places(find_model(model_name), write, output, overwrite=overwrite)
        wish = replace(wish, is_written=True)
    with nullcontext() if output is None else claimed(output, overwrite=True):
        if output is not None:
            check_report_directory(output)
        evaluation = evaluate(model_name, own, wish=wish, progress=progress)
        report = summarize(evaluation)
        if output is not None:
            write_report(report, output)
    answer = report.recommended
    assert answer is not None
    if write is None:
        return answer, report.warnings, None
    making = _plan(evaluation, answer.chosen.cache, recipe, wish, write)
    del evaluation  # one model in memory is enough
    _make(making, write, overwrite=overwrite, progress=progress)
    try:
        written = _measure_again(making, own, write, wish, progress)
    except InputError as error:
        raise InputError(f"'{write}' was written, but could not be measured: {error}") from None
    return answer, report.warnings, written


def _check_places(checkpoint: ModelDirectory, write: Path, output: Path | None, *, overwrite: bool) -> None:
    """Refuse, before anything is measured, places and models that nothing can be written for."""
    check_output(write, checkpoint.path, overwrite=overwrite, flag="--write")
    if output is not None:
        check_output(write, output, overwrite=overwrite, kind="report", flag="--write")
    if find_scale(checkpoint) or names_fp8_cache(checkpoint):
        raise InputError(
            f"--write takes a model without KV scales, and '{checkpoint.path}' has some, or a config that "
            "makes its cache FP8; take them out with fp8kv strip"
        )


def _plan(evaluation: Evaluation, name: str, recipe: Recipe, wish: Wish, output: Path) -> _Making:
    variant, offers = evaluation.measured[name].variant, evaluation.offers
    offer = offers.find(variant, wish.engine, wish.gpu)
    assert not isinstance(offer, str)
    suite, data = evaluation.suite, evaluation.recipe.data
    # the proof needs documents that neither the choice nor a calibration has read
    new, samples_read = suite.documents, evaluation.text.data.samples
    samples = max(_MORE_SAMPLES * suite.calibration_samples, len(samples_read)) + new
    available = len(sample_loader(evaluation.setup, data)(samples).samples) - new
    if available < len(samples_read):
        raise InputError(
            f"'{data.dataset}' is too short to measure what is written on {new} documents that the choice "
            "has not read; use a larger dataset, or a smaller --samples"
        )
    changes: dict[str, Any] = {
        "data": data.model_copy(update={"samples": available}),
        "export": ExportRecipe(formats=("fp8kv",)),
        "dtype": evaluation.recipe.dtype,
    }
    if variant.scales is not None and name != "none":
        observer = ObserverRecipe(name="mse" if name == "mse" else "absmax")
        changes |= {
            "strategy": variant.scales.strategy,
            "observer": observer,
            "export": ExportRecipe(formats=(format_for(offer.engine, wish.gpu),)),
        }
    serve = offers.serve(offer, str(output)).commands[-1]
    recipe = recipe.model_copy(update=changes)
    return _Making(
        evaluation.model_name, evaluation.checkpoint, variant, offer, serve, recipe, suite, samples_read
    )


def _make(making: _Making, output: Path, *, overwrite: bool, progress: Progress) -> None:
    """Write the directory: with scales, with baked weights, or as the model is."""
    model = making.model
    if making.purpose:
        trust = {"trust_remote_code": making.recipe.trust_remote_code}
        with TemporaryDirectory() as directory:
            scales = Path(directory, "calibration")
            calibrate(model, making.recipe, scales, progress=progress)
            bake(
                model, scales, making.purpose, output, overrides=trust, overwrite=overwrite, progress=progress
            )
    elif making.has_scales:
        calibrate(model, making.recipe, output, overwrite=overwrite, progress=progress)
    else:
        progress.stage("write")
        kind = "16 bits" if making.variant.kind == REFERENCE else f"type {making.variant.name}"
        card = render_card("as_it_is", model=model, kind=kind, serve=making.serve)
        with atomic_directory(output, overwrite=overwrite) as scratch:
            copied = progress.copied
            write_checkpoint(
                Export(), making.checkpoint, scratch, weights="link", readme=card, on_copied=copied
            )
            making.checkpoint.check_unchanged()


def _measure_again(making: _Making, recipe: Recipe, output: Path, wish: Wish, progress: Progress) -> Written:
    """Read the directory as an engine would, and measure it on text that is new to it."""
    cache, problems = making.variant.cache, list[str]()
    if making.has_scales or making.purpose == "fp8":
        place = Place(fnuz=all(GPUS[gpu].is_fnuz for gpu in making.offer.gpus))
        engines = choose_engines(making.offer.engine, making.offer.version)
        if not verify_directory(output, engines, place=place).is_good:
            problems.append(f"{making.offer.engine} does not load it: see fp8kv verify {output}")
    scales = [output] if making.has_scales else []
    if scales:
        name = name_scales(scales)[0]
    elif cache in (None, "fp8"):
        name = making.variant.name if cache is None else "none"
    else:
        name = cache
    variants, caches = (("none",), ()) if name == "none" else ((), (cache,) if cache else ())
    settings = recipe.evaluation.model_copy(update={"variants": variants, "caches": caches})
    recipe = recipe.model_copy(update={"evaluation": settings})
    evaluation = evaluate(
        str(output), recipe, scales=scales, suite=making.suite, read_before=making.read_before,
        progress=progress,
    )  # fmt: skip
    report = summarize(evaluation)
    kl = report.variants[name].kl
    if not kl.is_finite:
        problems.append(f"'{output}': its KL is not a finite number")
    elif wish.kl is not None and kl.value > wish.kl:
        problems.append(f"'{output}': its KL is above {wish.kl:g}, on other text than it was chosen on")
    return Written(output, making.serve, kl, report.data.tokens, problems)
