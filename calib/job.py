"""The whole job: find the model, prepare, measure, derive, write. The CLI calls this, and so may you."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from calib.arguments import check_arguments, to_path
from calib.capture.attention import AttentionMap, map_attention
from calib.capture.capabilities import check_queries, engine_class, reason_against_fp8
from calib.capture.processes import World, joined_world
from calib.capture.resume import SavedProgress, Share, compared_inputs, progress_file, remove_progress
from calib.capture.until import read_until
from calib.data import Batch, CalibrationData, load_data, make_batches, shared_batch_size
from calib.errors import InputError
from calib.files.atomic import Claim, claimed
from calib.files.fingerprint import baked_for
from calib.files.model_directory import ModelDirectory
from calib.formats import check_latent, check_recipe
from calib.formats.directory import check_output, check_places
from calib.formats.output import (
    CalibratedModel,
    CalibrationRecord,
    Destination,
    Result,
    check_in_place,
    dataset_facts,
    default_output,
    make_exports,
    write_output,
)
from calib.layerwise.loop import LayerwiseModel, calibrate_layerwise, open_layers, scratch_directory
from calib.layerwise.memory import memory_limit, resolve_offload
from calib.layerwise.weights import load_skeleton
from calib.models.config import caches_latents, explain_nonsense, fit_seq_len, load_config
from calib.models.load import check_token_ids, input_device, load_model, load_tokenizer
from calib.models.quantized.detect import quantization_notes
from calib.models.sources import find_model
from calib.progress import SILENT, Progress
from calib.recipe import DataRecipe, Recipe
from calib.scales.scales import check_one_scale
from calib.scales.stats import KVStats
from calib.scales.tail import check_enough

__all__ = ["Result", "default_output", "run"]

# seen in vLLM 0.32's class, which hands on the positions that it is given
_PALIGEMMA = (
    "transformers counts PaliGemma's positions from 1 and lets text look ahead; vLLM does neither: "
    "scales are transformers', and --headroom 1.2 makes room for the difference"
)


@check_arguments
def run(
    model: str | os.PathLike[str],
    recipe: Recipe,
    output: str | os.PathLike[str] | None = None,
    *,
    in_place: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress = SILENT,
) -> Result | None:
    """Calibrate `model`, a name or a path, as `recipe` says; write all of `output` or nothing.

    With `in_place` the output is the model's own directory, and what is replaced is kept beside it.
    One of several processes, started by torchrun or accelerate launch, measures a share; the first
    writes and has a result, the others return None. What a user can put right is an Fp8kvError.
    """
    to_path(model)
    name, path = str(model), None if output is None else to_path(output)
    check_places(path, in_place=in_place, overwrite=overwrite)
    path = check_in_place(name, recipe.export) if in_place else path or default_output(name, recipe.strategy)
    with joined_world() as world:
        world.check_same("commands or recipes", [name, str(path), recipe.model_dump()])
        job = _Job(name, Destination(path, in_place, overwrite, progress.copied), resume, world, progress)
        start = time.perf_counter()
        checkpoint = world.together(lambda: job.check_before_loading(recipe))
        with job.claim_output() as claim:
            prepared = world.together(lambda: job.prepare(checkpoint, recipe))
            batch_size = prepared.recipe.data.batch_size
            world.check_same("data or batches", [prepared.data.fingerprint, batch_size])
            loaded = time.perf_counter()
            measurement = job.measure(prepared)
            measured = time.perf_counter()
            # what goes wrong while the first process writes ends all of them
            result = world.together(lambda: job.write(prepared, measurement, claim))
            end = time.perf_counter()
    seconds = {"load": loaded - start, "calibrate": measured - loaded, "write": end - measured}
    return result and replace(result, seconds=seconds)


@dataclass(frozen=True)
class Prepared:
    """A model and the data it will read."""

    checkpoint: ModelDirectory
    recipe: Recipe  # as resolved
    model: PreTrainedModel
    layers: LayerwiseModel | None  # where its weights stay in the checkpoint
    attention: AttentionMap
    data: CalibrationData


@dataclass(frozen=True)
class Measurement:
    """Statistics of all processes, the data that they read, and notes on it."""

    stats: KVStats
    data: CalibrationData
    notes: list[str]


@dataclass(frozen=True)
class _Job:
    """The steps of a calibration, in one of its processes."""

    model_name: str
    destination: Destination
    resume: bool
    world: World
    progress: Progress

    def check_before_loading(self, recipe: Recipe) -> ModelDirectory:
        """Find the checkpoint, and refuse what cannot be written before any weight is read."""
        self.progress.stage("load")
        for name in recipe.export.formats:
            check_recipe(name, recipe)
        checkpoint, output = find_model(self.model_name), self.destination
        if not output.in_place:
            check_output(output.path, checkpoint.path, overwrite=output.overwrite)
        return checkpoint

    @contextmanager
    def claim_output(self) -> Iterator[Claim | None]:
        """Claim the output for the first process, which writes it; the others get None."""
        output = self.destination
        claim = claimed(output.path, overwrite=output.overwrite or output.in_place)
        with ExitStack() as stack:
            yield self.world.together(lambda: stack.enter_context(claim) if self.world.is_first else None)

    def prepare(self, checkpoint: ModelDirectory, recipe: Recipe) -> Prepared:
        """Load the data and the model, or its skeleton, and rehearse what will be written."""
        config = load_config(checkpoint, recipe.trust_remote_code)
        _check_scales(config, recipe)
        is_default = "seq_len" not in recipe.data.model_fields_set
        seq_len, notes = fit_seq_len(config, recipe.data.seq_len, is_default=is_default)
        recipe = _update_data(recipe, seq_len=seq_len) if notes else recipe
        recipe = resolve_offload(checkpoint, config, recipe)
        by_layer = recipe.offload == "layerwise"
        if by_layer:
            _check_layerwise(recipe.data, resume=self.resume)

        @cache
        def model() -> PreTrainedModel:
            load = load_skeleton if by_layer else load_model
            return load(checkpoint, config, recipe.dtype, recipe.device, recipe.trust_remote_code)

        tokenizer = load_tokenizer(checkpoint, recipe.trust_remote_code)
        data = load_data(recipe.data, tokenizer, model)
        _check_text(recipe, data)
        check_token_ids(chain.from_iterable(data.samples), tokenizer, model())
        with explain_nonsense(f"this {config.model_type} cannot run as its config says"):
            layers = open_layers(model(), checkpoint, recipe) if by_layer else None
        attention = layers.parts.attention if layers else map_attention(model())
        # an export that must fail should do so before hours of calibration
        make_exports(attention.unit_scales(recipe.strategy, recipe.fp8_dtype), checkpoint, recipe.export)
        reason = None if layers else reason_against_fp8(model(), attention)
        notes = [*notes, *_model_notes(checkpoint, config), *data.warnings, attention.note, reason or ""]
        data = replace(data, warnings=tuple(filter(None, notes)))
        device = (layers.device if layers else input_device(model())).type
        size = shared_batch_size(recipe.data, device, data.samples, self.world.size)
        changes = {"device": device, "dtype": str(model().dtype).removeprefix("torch.")}
        recipe = _update_data(recipe, batch_size=size).model_copy(update=changes)
        return Prepared(checkpoint, recipe, model(), layers, attention, data)

    def measure(self, prepared: Prepared) -> Measurement:
        """Run this process's batches; return the statistics of all processes."""
        data, recipe = prepared.data, prepared.recipe.data
        size, skip_first = int(recipe.batch_size), recipe.skip_first
        batches = make_batches(data.samples, size, pad_id=0, seed=recipe.seed, skip_first=skip_first)
        own = self.world.share(batches)
        self.progress.stage("calibrate", sum(batch.num_tokens for batch in own), "tokens")
        notes = []
        if recipe.until is None:
            stats = self.world.reduce(self.world.together(lambda: self._measure_all(prepared, own)))
        else:
            share = self.world.together(lambda: self._open_share(prepared, own))
            stats, stop = read_until(share, batches, self.world, prepared.recipe)
            data = data.only(i for batch in batches[: stop.batches] for i in batch.sample_ids)
            notes = [stop.line(stats, sum(batch.num_tokens for batch in batches), recipe.until)]
        # counted here, and not where batches run: every process has all data, resumed or not
        stats = replace(stats, text=data.summary(skip_first))
        return Measurement(stats, data, [data.line, *notes])

    def _measure_all(self, prepared: Prepared, batches: Sequence[Batch]) -> KVStats:
        if prepared.layers is None:
            stats = self._open_share(prepared, batches).read()
            assert stats is not None
            return stats
        return calibrate_layerwise(
            prepared.layers,
            batches,
            prepared.recipe,
            limit=memory_limit(prepared.recipe.max_memory),
            directory=scratch_directory(self.destination.path),
            progress=self.progress,
        )

    def _open_share(self, prepared: Prepared, batches: Sequence[Batch]) -> Share:
        recipe, path = prepared.recipe, progress_file(self.destination.path, self.world.rank)
        inputs = compared_inputs(prepared.checkpoint, recipe, prepared.data, self.world)
        saved = SavedProgress(path, inputs, 60 * recipe.save_minutes)
        attention, advance = prepared.attention, self.progress.advance
        return Share(prepared.model, batches, recipe, attention, saved, self.resume, advance)

    def write(self, prepared: Prepared, measurement: Measurement, claim: Claim | None) -> Result | None:
        """Write the output in the first process; None in the others."""
        self.progress.stage("write")
        result = None
        if self.world.is_first:
            record = CalibrationRecord(
                measurement.stats,
                dataset_facts(measurement.data),
                measurement.data.warnings,
                measurement.notes,
                threads=torch.get_num_threads(),
            )
            model = CalibratedModel(self.model_name, prepared.checkpoint, prepared.recipe)
            result = write_output(model, record, replace(self.destination, claim=claim))
        remove_progress(progress_file(self.destination.path, self.world.rank))
        return result


def _check_scales(config: PreTrainedConfig, recipe: Recipe) -> None:
    """Refuse scales that the model's cache has no place for, or that nothing is known of."""
    if caches_latents(config):
        for name in recipe.export.formats:
            check_latent(name)
        check_one_scale(strategy=recipe.strategy, targets=recipe.targets, center_keys=recipe.center_keys)
    elif recipe.targets == "qkv":
        check_queries(engine_class(config, config.model_type), "--targets qkv")


def _check_layerwise(recipe: DataRecipe, *, resume: bool) -> None:
    """Refuse what a pass layer by layer cannot do."""
    if recipe.until is not None:
        raise InputError(
            "--until: a pass layer by layer reads all text with one layer before the next, so it "
            "cannot stop early; leave --until away, or use --offload none"
        )
    if resume:
        raise InputError(
            "--resume: a pass layer by layer saves no progress; leave --resume away, or use --offload none"
        )


def _check_text(recipe: Recipe, data: CalibrationData) -> None:
    """Refuse too few tokens for the scales that the recipe asks for."""
    if recipe.headroom == "auto" or recipe.data.until is not None:
        check_enough(sum(max(0, len(sample) - recipe.data.skip_first) for sample in data.samples))
    if not recipe.data.allow_few_tokens:
        data.summary(recipe.data.skip_first).check()


def _model_notes(checkpoint: ModelDirectory, config: PreTrainedConfig) -> list[str]:
    """Say what the user should know of this model."""
    notes = quantization_notes(checkpoint)
    if purpose := baked_for(checkpoint.path):
        notes.append(f"this model is baked for {purpose} (fp8kv bake)")
    if config.model_type == "paligemma":
        notes.append(_PALIGEMMA)
    return notes


def _update_data(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=changes)})
