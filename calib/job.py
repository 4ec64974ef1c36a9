"""The whole job: find the model, measure, derive, write. The CLI calls this, and so may you."""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from calib.arguments import check_arguments, to_path
from calib.capture.processes import World, joined_world
from calib.capture.resume import SavedProgress, Share, compared_inputs, progress_file, remove_progress
from calib.capture.until import read_until
from calib.data import Batch, CalibrationData, make_batches
from calib.errors import InputError
from calib.files.atomic import claimed
from calib.files.model_directory import ModelDirectory
from calib.layerwise.loop import Step, calibrate_layerwise, scratch_directory
from calib.layerwise.memory import memory_limit
from calib.output.card import dataset_facts
from calib.output.finish import Destination, Result, default_output, finish
from calib.output.in_place import check_in_place, check_places
from calib.prepare import Prepared, check_before_loading, prepare
from calib.progress import SILENT, Progress
from calib.recipe import Recipe
from calib.scales.stats import KVStats

__all__ = ["Result", "default_output", "run"]


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
    model_name, place = str(model), None if output is None else to_path(output)
    check_places(place, in_place=in_place, overwrite=overwrite)
    place = check_in_place(model_name, recipe) if in_place else place
    place = place or default_output(model_name, recipe)
    with joined_world() as world, ExitStack() as held:
        world.check_same("commands or recipes", [model_name, str(place), recipe.model_dump()])
        destination = Destination(place, in_place, overwrite, progress.copied)
        run = _Run(model_name, destination, world, progress, resume=resume)
        checkpoint, prepared = world.together(lambda: run.load(recipe, held))
        batched = prepared.recipe.data.batch_size
        world.check_same("data or batches", [prepared.data.fingerprint, batched])
        measured = run.measure(checkpoint, prepared)
        # what goes wrong while the first process writes ends all of them
        return world.together(lambda: run.write(checkpoint, prepared, measured))


class Measured(NamedTuple):
    """Statistics of all processes, the data they are of, and what to say of it."""

    stats: KVStats
    data: CalibrationData
    notes: Sequence[str] = ()


@dataclass
class _Run:
    """The three steps of one process's run."""

    model_name: str
    destination: Destination
    world: World
    progress: Progress
    resume: bool
    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def load(self, recipe: Recipe, held: ExitStack) -> tuple[ModelDirectory, Prepared]:
        self.progress.stage("load")
        to = self.destination
        checkpoint = check_before_loading(self.model_name, recipe, to)
        if self.world.is_first:
            claim = held.enter_context(claimed(to.path, overwrite=to.overwrite or to.in_place))
            self.destination = replace(to, claim=claim)
        prepared = prepare(checkpoint, recipe, self.world.size)
        self._lap("load")
        return checkpoint, prepared

    def measure(self, checkpoint: ModelDirectory, prepared: Prepared) -> Measured:
        recipe, data, world = prepared.recipe, prepared.data, self.world
        given, size = recipe.data, int(recipe.data.batch_size)
        batches = make_batches(data.samples, size, pad_id=0, seed=given.seed, skip_first=given.skip_first)
        mine = world.share(batches)
        self.progress.stage("calibrate", sum(batch.num_tokens for batch in mine), "tokens")
        if given.until is None:
            stats = world.together(lambda: self._all(checkpoint, prepared, mine))
            measured = Measured(world.reduce(stats), data, [data.line])
        else:
            share = world.together(lambda: self._share(checkpoint, prepared, mine))
            available = sum(batch.num_tokens for batch in batches)
            stats, stop = read_until(share, batches, world, recipe)
            read = data.only(i for batch in batches[: stop.batches] for i in batch.sample_ids)
            line = stop.line(stats, available, given.until)
            measured = Measured(stats, read, [read.line, line])
        self._lap("calibrate")
        # counted here, and not where batches run: every process has all data, resumed or not
        text = measured.data.summary(given.skip_first)
        return measured._replace(stats=replace(measured.stats, text=text))

    def _all(self, checkpoint: ModelDirectory, prepared: Prepared, mine: Sequence[Batch]) -> KVStats:
        if prepared.layers is None:
            stats = self._share(checkpoint, prepared, mine).read()
            assert stats is not None
            return stats
        if self.resume:
            raise InputError(
                "--resume: a pass layer by layer saves no progress; leave --resume away, or use "
                "--offload none"
            )

        def show(step: Step) -> None:
            self.progress.detail(step.label)
            self.progress.advance(step.batch.num_tokens / step.num_layers)

        limit, directory = memory_limit(prepared.recipe.max_memory), scratch_directory(self.destination.path)
        return calibrate_layerwise(
            prepared.layers, mine, prepared.recipe, limit=limit, directory=directory, on_step=show
        )

    def _share(self, checkpoint: ModelDirectory, prepared: Prepared, batches: Sequence[Batch]) -> Share:
        recipe, path = prepared.recipe, progress_file(self.destination.path, self.world.rank)
        inputs = compared_inputs(checkpoint, recipe, prepared.data, self.world)
        saved = SavedProgress(path, inputs, 60 * recipe.save_minutes)
        model, attention, advance = prepared.model, prepared.attention, self.progress.advance
        return Share(model, batches, recipe, attention, saved, self.resume, advance)

    def write(self, checkpoint: ModelDirectory, prepared: Prepared, measured: Measured) -> Result | None:
        self.progress.stage("write")
        result = None
        if self.world.is_first:
            stats, data, notes = measured
            what = (self.model_name, checkpoint, prepared.recipe, stats, self.destination)
            threads = torch.get_num_threads()
            result = finish(*what, dataset_facts(data), data.warnings, notes, threads=threads)
            self._lap("write")
            result = replace(result, seconds=self.seconds)
        remove_progress(progress_file(self.destination.path, self.world.rank))
        return result

    def _lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._since = now - self._since, now
