"""`calib.capture.loop`, one layer at a time: the same statistics, bit for bit."""

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from calib.capture import loop
from calib.capture.statistics import RunningLayer
from calib.data import Batch
from calib.errors import InputError
from calib.files.model_directory import ModelDirectory
from calib.files.text import show_size
from calib.layerwise.hidden import HiddenStates, form_of
from calib.layerwise.memory import (
    MemoryPlan,
    give_back_free,
    memory_limit,
    plan_memory,
    resident_bytes,
    statistics_bytes,
)
from calib.layerwise.probe import Layout, probe_layers, random_bytes
from calib.layerwise.replay import Output, Replay, replaying
from calib.layerwise.skeleton import execution_device
from calib.layerwise.stages import Stages, plan_stages
from calib.layerwise.weights import LayerWeights, WeightLoader
from calib.models.load import weight_sources
from calib.progress import Progress, library_bars_hidden
from calib.recipe import Recipe
from calib.scales.stats import KVStats


@dataclass(frozen=True)
class Step:
    """One batch that one layer has computed; both are counted from 0."""

    layer: int
    num_layers: int
    batch_index: int
    num_batches: int
    batch: Batch

    @property
    def label(self) -> str:
        """Where the pass is."""
        layer, batch = self.layer + 1, self.batch_index + 1
        return f"layer {layer} of {self.num_layers}, batch {batch} of {self.num_batches}"


@dataclass(frozen=True)
class LayerwiseModel:
    """A model whose weights stay in its checkpoint; see `open_layers`."""

    model: PreTrainedModel  # on the meta device
    device: torch.device  # where layers compute
    layout: Layout
    stages: Stages
    loader: WeightLoader


def open_layers(model: PreTrainedModel, checkpoint: ModelDirectory, recipe: Recipe) -> LayerwiseModel:
    """Prove that `model`, made by `load_skeleton`, can run layer by layer, and find its weights."""
    device, limit = execution_device(recipe), memory_limit(recipe)
    in_use, layer = resident_bytes(), random_bytes(model.get_decoder())
    if in_use + layer > limit:
        raise InputError(
            f"{show_size(limit)} of memory is too little: {show_size(in_use)} are in use and one "
            f"layer takes {show_size(layer)}, to which activations are added; use --max-memory "
            f"{show_size((in_use + layer) * 5 // 4)} or more"
        )
    layout = probe_layers(model, device)
    mapping = get_model_conversion_mapping(model)
    sources = weight_sources(checkpoint, model.config, recipe)
    stages = plan_stages(model, layout.layers, layout.unused, sources, mapping)
    return LayerwiseModel(model, device, layout, stages, WeightLoader(model, mapping, device))


def measure_layers(
    source: LayerwiseModel,
    batches: Iterable[Batch],
    recipe: Recipe,
    output: Path,
    progress: Progress,
) -> KVStats:
    """Calibrate layer by layer within the limits of `recipe`; see `calibrate_layerwise`."""

    def step(done: Step) -> None:
        progress.detail(done.label)
        progress.advance(done.batch.num_tokens / done.num_layers)

    limit, directory = memory_limit(recipe), scratch_directory(output)
    return calibrate_layerwise(source, batches, recipe, limit=limit, directory=directory, on_step=step)


def scratch_directory(output: Path) -> Path:
    """Directory for hidden states that do not fit in memory: TMPDIR, else beside `output`."""
    # the usual default, /tmp, is memory on many machines
    if os.environ.get("TMPDIR"):
        return Path(os.environ["TMPDIR"])
    return next(parent for parent in output.absolute().parents if parent.is_dir())


# the first batch that is not finite somewhere, and the first place where it is not
_NonFinite = tuple[int, str]


@torch.inference_mode()
def calibrate_layerwise(
    source: LayerwiseModel,
    batches: Iterable[Batch],
    recipe: Recipe,
    *,
    limit: int,
    directory: Path,
    on_step: Callable[[Step], None] = lambda step: None,
) -> KVStats:
    """Run `batches` through one layer after the other; return the statistics of `calibrate`.

    Each weight is read once. The process may take `limit` bytes of resident memory; hidden states
    that do not fit lie under `directory`. `on_step` is called after each batch of each layer.
    """
    batches = list(batches)
    attention = source.layout.attention
    layers = loop.running_layers(attention, recipe)
    if batches:
        always = resident_bytes() + statistics_bytes(attention, recipe)
        plan = plan_memory(source.model, source.stages, batches, always, limit)
        with library_bars_hidden():
            if found := _pass(source, plan, directory, batches, layers, on_step):
                whole = batches[found[0]]
                alone, again = loop.singles(whole), loop.running_layers(attention, recipe)
                first = _pass(source, plan, directory, alone, again, on_step)
                raise loop.blame(first[1], alone[first[0]]) if first else loop.blame(None, whole)
    return loop.results(layers, attention)


def _pass(
    source: LayerwiseModel,
    plan: MemoryPlan,
    directory: Path,
    batches: list[Batch],
    layers: dict[str, RunningLayer],
    on_step: Callable[[Step], None],
) -> _NonFinite | None:
    """Add `batches` to `layers`; those after one that holds NaN or Inf are left out."""
    stages, found = source.stages, None
    forms: list[Output] = []
    with ExitStack() as stack:
        replay = stack.enter_context(replaying(source.model, source.layout.attention, source.layout.layers))
        hidden = stack.enter_context(HiddenStates(directory, plan.hidden_bytes))
        stack.enter_context(source.loader.held(stages.resident))
        with source.loader.held(stages.embeddings):
            for i, batch in enumerate(batches):
                embedded = replay.run_embeddings(loop.to_device(batch, source.device))
                hidden.put(("embedded", i), embedded)
                forms.append(form_of(embedded))
        weights = LayerWeights(source.loader, stages.layers, ahead=plan.reads_ahead)
        stack.callback(weights.close)
        for index in range(len(stages.layers)):
            layer = _Layer(source, plan, index, replay, hidden, forms)
            with weights.loaded(index):
                # an earlier batch may yet turn out not to be finite in a later layer
                found = layer.run(batches, layers, on_step) or found
            batches = batches[: found[0]] if found else batches
            if not batches:
                break
    return found


@dataclass(frozen=True)
class _Layer:
    """One layer, while its weights are there."""

    source: LayerwiseModel
    plan: MemoryPlan
    index: int
    replay: Replay
    hidden: HiddenStates
    forms: list[Output]  # of what the embeddings returned for each batch

    def run(
        self, batches: list[Batch], layers: dict[str, RunningLayer], on_step: Callable[[Step], None]
    ) -> _NonFinite | None:
        """Add `batches` to those of `layers` that are here, up to one that is not finite."""
        prefix = f"{self.source.layout.names[self.index]}."
        own = {name: layer for name, layer in layers.items() if name.startswith(prefix)}
        for i, batch in enumerate(batches):
            self._compute(i, loop.to_device(batch, self.source.device), own, last=[*layers][-1])
            if where := loop.first_non_finite(own):
                return i, where
            on_step(Step(self.index, len(self.source.stages.layers), i, len(batches), batch))
        return None

    def _compute(self, i: int, batch: Batch, own: dict[str, RunningLayer], *, last: str) -> None:
        if resident_bytes() > self.plan.ceiling:
            give_back_free()
        hidden, device = self.hidden, self.source.device
        previous = hidden.take(("hidden", i), device) if self.index else None
        if self.source.layout.keeps_embeddings:
            embedded = hidden.get(("embedded", i), device)
        else:
            embedded = self.forms[i] if self.index else hidden.take(("embedded", i), device)
        with loop.observing(self.source.model, batch, own, last=last):
            output = self.replay.run_layer(self.index, batch, previous, embedded)
            hidden.put(("hidden", i), output)
