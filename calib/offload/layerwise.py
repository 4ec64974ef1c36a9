"""`calib.measure.loop`, one layer at a time: the same statistics, bit for bit."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from calib.data import Batch
from calib.measure.accumulate import RunningLayer
from calib.measure.loop import (
    blame,
    first_non_finite,
    observing,
    results,
    running_layers,
    singles,
    to_device,
)
from calib.offload.budget import MemoryPlan, plan_memory, statistics_bytes
from calib.offload.hidden import HiddenStates, Key, form_of
from calib.offload.memory import give_back_free, resident_bytes
from calib.offload.probe import Layout
from calib.offload.replay import Output, Replay, replaying
from calib.offload.stages import Stages
from calib.offload.weights import LayerWeights, WeightLoader
from calib.progress import library_bars_hidden
from calib.recipe import Recipe
from calib.scales.stats import KVStats


@dataclass(frozen=True)
class Step:
    """What has just been computed, counted from 0."""

    layer: int
    num_layers: int
    batch_index: int
    num_batches: int
    batch: Batch

    @property
    def label(self) -> str:
        """Where the pass is, for a progress bar."""
        layer, batch = self.layer + 1, self.batch_index + 1
        return f"layer {layer} of {self.num_layers}, batch {batch} of {self.num_batches}"


@dataclass(frozen=True)
class LayerwiseModel:
    """A model whose weights stay in its checkpoint; see `calib.offload.entry`."""

    model: PreTrainedModel  # on the meta device
    device: torch.device  # where layers compute
    layout: Layout
    stages: Stages
    loader: WeightLoader


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
    that do not fit lie under `directory` meanwhile. `on_step` is called after each batch of each
    layer.

    Raises:
        CalibrationError: K, V or Q held NaN or Inf; names layer, tensor and sample.
        InputError: the memory or the disk is too small, or a weight file is damaged.
    """
    batches = list(batches)
    attention = source.layout.attention
    layers = running_layers(attention, recipe)
    if batches:
        always = resident_bytes() + statistics_bytes(attention, recipe)
        plan = plan_memory(source.model, source.stages, batches, always, limit)
        with library_bars_hidden():
            found = _pass(source, plan, directory, batches, layers, on_step)
            if found:
                whole = batches[found[0]]
                alone, again = singles(whole), running_layers(attention, recipe)
                first = _pass(source, plan, directory, alone, again, on_step)
                raise blame(first[1], alone[first[0]]) if first else blame(None, whole)
    return results(layers, attention)


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
        replay = stack.enter_context(replaying(source.model.get_decoder(), source.layout.layers))
        hidden = stack.enter_context(HiddenStates(directory, plan.hidden_bytes))
        stack.enter_context(source.loader.held(stages.resident))
        with source.loader.held(stages.embeddings):
            for i, batch in enumerate(batches):
                embedded = replay.run_embeddings(to_device(batch, source.device))
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
        self,
        batches: list[Batch],
        layers: dict[str, RunningLayer],
        on_step: Callable[[Step], None],
    ) -> _NonFinite | None:
        """Add `batches` to those of `layers` that are here, up to one that is not finite."""
        prefix = f"{self.source.layout.names[self.index]}."
        own = {name: layer for name, layer in layers.items() if name.startswith(prefix)}
        for i, batch in enumerate(batches):
            self._compute(i, to_device(batch, self.source.device), own, last=list(layers)[-1])
            where = first_non_finite(own)
            if where:
                return i, where
            on_step(Step(self.index, len(self.source.stages.layers), i, len(batches), batch))
        return None

    def _compute(self, i: int, batch: Batch, own: dict[str, RunningLayer], *, last: str) -> None:
        if resident_bytes() > self.plan.ceiling:
            give_back_free()
        previous = self._take(("hidden", i)) if self.index else None
        embedded = self._embedded(i)
        with observing(self.source.model, batch, own, last=last):
            output = self.replay.run_layer(self.index, batch, previous, embedded)
            self.hidden.put(("hidden", i), output)

    def _embedded(self, i: int) -> Output:
        if self.source.layout.keeps_embeddings:
            return self.hidden.get(("embedded", i), self.source.device)
        return self.forms[i] if self.index else self._take(("embedded", i))

    def _take(self, key: Key) -> Output:
        output = self.hidden.get(key, self.source.device)
        self.hidden.drop(key)
        return output
