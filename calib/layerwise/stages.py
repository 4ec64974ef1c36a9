"""Stages of a pass: the stored tensors of each, and the weights that they become."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from calib.errors import UnsupportedModelError
from calib.files.tensors import Source
from calib.layerwise.replay import embeddings_of
from calib.layerwise.weights import Stage


@dataclass(frozen=True)
class Stages:
    """Weights of a decoder by when they are needed: always, for the embeddings, for each layer.

    The LM head, a vision tower and layers behind the last that caches K and V are in none.
    """

    resident: Stage
    embeddings: Stage
    layers: list[Stage]


def named_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters and buffers, each under all of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def plan_stages(
    model: PreTrainedModel,
    layers: list[nn.Module],
    unused: Iterable[nn.Module],
    stored: Mapping[str, Source],
    mapping: list[Any],
) -> Stages:
    """Assign every tensor that `layers` of the decoder need to a stage; `unused` ones are not run.

    `stored` holds the weights of the checkpoint, `mapping` transformers' conversions of them.
    Stages must share no weight.
    """
    stages = Stages(Stage(), Stage(), [Stage() for _ in layers])
    names = {module: name for name, module in model.named_modules()}
    decoder = model.get_decoder()
    owners: dict[str, Stage | None] = {names[decoder]: stages.resident}
    owners |= {names[module]: stages.embeddings for module in embeddings_of(decoder, layers)}
    owners |= {names[layer]: stage for layer, stage in zip(layers, stages.layers, strict=True)}
    owners |= {names[layer]: None for layer in unused}
    weights = {name: tensor for name, tensor in named_tensors(model) if tensor.is_meta}
    by_identity: dict[int, Stage] = {}
    for name, tensor in weights.items():
        stage = _owner(name, owners)
        if stage and by_identity.setdefault(id(tensor), stage) is not stage:
            raise UnsupportedModelError(
                f"{type(model).__name__}: '{name}' is shared between decoder layers, so each layer "
                "cannot come and go with its own weights; use --offload none"
            )
    for name, tensor in weights.items():
        # with its other names, such as that of a tied LM head
        if stage := by_identity.get(id(tensor)):
            stage.tensors[name] = tensor
    for source, target, is_converted in _targets(model, stored, mapping):
        if target in weights and (stage := by_identity.get(id(weights[target]))):
            stage.sources[source] = stored[source]
            if not is_converted and stored[source].dtype == weights[target].dtype:
                stage.unchanged.add(source)
    return stages


def _owner(name: str, owners: Mapping[str, Stage | None]) -> Stage | None:
    while name:
        name = name.rpartition(".")[0]
        if name in owners:
            return owners[name]
    return None


def _targets(
    model: PreTrainedModel, stored: Mapping[str, Source], mapping: list[Any]
) -> Iterable[tuple[str, str, bool]]:
    """Yield (name in the checkpoint, name in the model, whether it is converted)."""
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    for source in sorted(stored, key=dot_natural_key):  # the order some renamings count on
        target, pattern = rename_source_key(source, renamings, converters, prefix, state)
        if target not in state and source in state:
            target, pattern = source, None
        yield source, target, pattern is not None
