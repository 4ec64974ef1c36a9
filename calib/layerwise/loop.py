"""The measurement of `calib.capture.loop`, one layer at a time: the same statistics, bit for bit."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from calib.capture import loop
from calib.capture.draft import add_draft_layer
from calib.capture.running_amax import RunningLayer
from calib.data import Batch
from calib.errors import InputError
from calib.files.model_directory import ModelDirectory
from calib.files.text import show_size
from calib.layerwise.hidden import HiddenStates, to_meta
from calib.layerwise.memory import (
    MemoryPlan,
    memory_limit,
    plan_memory,
    resident_bytes,
    return_free_memory,
    statistics_bytes,
)
from calib.layerwise.probe import probe_layers, random_bytes
from calib.layerwise.replay import DecoderParts, Output, Replay
from calib.layerwise.weights import Stages, WeightLoader, execution_device, load_in_turn, plan_stages
from calib.models.load import weight_sources
from calib.progress import SILENT, Progress, library_bars_hidden
from calib.recipe import Recipe
from calib.scales.stats import KVStats


@dataclass(frozen=True)
class LayerwiseModel:
    """A model whose weights stay in its checkpoint; see `open_layers`."""

    model: PreTrainedModel  # on the meta device
    device: torch.device  # where layers compute
    parts: DecoderParts
    stages: Stages
    loader: WeightLoader


def open_layers(model: PreTrainedModel, checkpoint: ModelDirectory, recipe: Recipe) -> LayerwiseModel:
    """Prove that `model`, made by `load_skeleton`, can run layer by layer, or refuse; find its weights."""
    device, limit = execution_device(recipe.device), memory_limit(recipe.max_memory)
    in_use, layer = resident_bytes(), random_bytes(model.get_decoder())
    if in_use + layer > limit:
        raise InputError(
            f"{recipe.max_memory or show_size(limit)} of memory is too little: {show_size(in_use)} are in "
            f"use and one layer takes {show_size(layer)}, to which activations are added; use --max-memory "
            f"{show_size((in_use + layer) * 5 // 4)} or more"
        )
    parts = probe_layers(model, device)
    attention = add_draft_layer(parts.attention, model, checkpoint, device, is_cut=bool(parts.unused))
    parts = replace(parts, attention=attention)
    mapping = get_model_conversion_mapping(model)
    sources = weight_sources(checkpoint, model.config, recipe.dtype)
    stages = plan_stages(model, parts.layers, parts.unused, sources, mapping)
    return LayerwiseModel(model, device, parts, stages, WeightLoader(model, mapping, device))


def scratch_directory(output: Path) -> Path:
    """Return the directory for hidden states that do not fit in memory: TMPDIR, else beside `output`."""
    # the usual default, /tmp, is memory on many machines
    if os.environ.get("TMPDIR"):
        return Path(os.environ["TMPDIR"])
    return next(parent for parent in output.absolute().parents if parent.is_dir())


@torch.inference_mode()
def calibrate_layerwise(
    source: LayerwiseModel,
    batches: Sequence[Batch],
    recipe: Recipe,
    *,
    limit: int,
    directory: Path,
    progress: Progress = SILENT,
) -> KVStats:
    """Run `batches` through one layer after the other; return the statistics of `calibrate`.

    Each weight is read once. The process may take `limit` bytes of resident memory; hidden states
    that do not fit lie under `directory`. `progress` advances by the tokens of each batch, in all.
    Raises a CalibrationError that names the layer and the sample with NaN or Inf.
    """
    attention = source.parts.attention
    always = resident_bytes() + statistics_bytes(attention, recipe)
    plan = plan_memory(source.model, source.stages, batches, always, limit) if batches else None
    running = loop.running_layers(attention, recipe)
    batches = [loop.to_device(batch, source.device) for batch in batches]
    with library_bars_hidden():
        if plan and (failure := _run_layers(source, plan, directory, batches, running, progress)):
            batch = batches[failure[0]]
            samples, again = loop.singles(batch), loop.running_layers(attention, recipe)
            first = _run_layers(source, plan, directory, samples, again, progress)
            raise loop.blame(first[1], samples[first[0]]) if first else loop.blame(None, batch)
    return loop.results(running, attention)


def _run_layers(
    source: LayerwiseModel,
    plan: MemoryPlan,
    directory: Path,
    batches: Sequence[Batch],
    running: dict[str, RunningLayer],
    progress: Progress,
) -> tuple[int, str] | None:
    """Add `batches` to the `running` statistics, up to the first that holds NaN or Inf.

    Return the index of that batch and the first place where it is not finite, or None.
    """
    failure, names, last = None, source.parts.names, [*running][-1]
    shapes: list[Output] = []  # of the results of the embeddings
    with ExitStack() as stack:
        replay = stack.enter_context(Replay(source.model, source.parts))
        hidden = stack.enter_context(HiddenStates(directory, plan.hidden_bytes))
        stack.enter_context(source.loader.loaded(source.stages.resident))
        with source.loader.loaded(source.stages.embeddings):
            for i, batch in enumerate(batches):
                embedded = replay.run_embeddings(batch)
                hidden.put(("embedded", i), embedded)
                shapes.append(to_meta(embedded))
                del embedded
        layers = load_in_turn(source.loader, source.stages.layers, reads_ahead=plan.reads_ahead)
        for index in stack.enter_context(closing(layers)):
            own = {name: layer for name, layer in running.items() if name.startswith(f"{names[index]}.")}
            for i, batch in enumerate(batches):
                if resident_bytes() > plan.ceiling:
                    return_free_memory()
                with loop.observing(source.model, batch, own, last=last):
                    _run_layer(source, replay, hidden, index, i, batch, shapes[i])
                if place := loop.first_non_finite(own, source.parts.attention):
                    # an earlier batch may yet turn out not to be finite in a later layer
                    failure, batches = (i, place), batches[:i]
                    break
                progress.detail(f"layer {index + 1} of {len(names)}, batch {i + 1} of {len(batches)}")
                progress.advance(batch.num_tokens / len(names))
            if not batches:
                break
        if draft := source.parts.attention.draft:
            stack.enter_context(source.loader.loaded(source.stages.embeddings))
            for i, batch in enumerate(batches):
                _run_layer(source, replay, hidden, len(names), i, batch, shapes[i])
                loop.observe_draft(draft, batch, hidden.take(("hidden", i), source.device), running)
    return failure


def _run_layer(
    source: LayerwiseModel,
    replay: Replay,
    hidden: HiddenStates,
    index: int,
    i: int,
    batch: Batch,
    shapes: Output,
) -> None:
    """Run batch `i` through layer `index`, whose weights are loaded; `shapes` are of its embeddings."""
    previous = hidden.take(("hidden", i), source.device) if index else None
    if source.parts.keeps_embeddings:
        embedded = hidden.get(("embedded", i), source.device)
    else:
        embedded = shapes if index else hidden.take(("embedded", i), source.device)
    hidden.put(("hidden", i), replay.run_layer(index, batch, previous, embedded))
