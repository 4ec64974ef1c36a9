"""Stages of a pass: the stored tensors of each, and the weights that they become."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
from calib.offload.replay import embeddings_of
from calib.offload.shards import StoredTensor


@dataclass(frozen=True)
class Stage:
    """Weights that come and go together."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # name in the model -> meta tensor
    sources: dict[str, StoredTensor] = field(default_factory=dict)  # by name in the checkpoint
    unchanged: set[str] = field(default_factory=set)  # sources that are weights as they are stored

    @property
    def nbytes(self) -> int:
        """Bytes of its weights in memory."""
        return sum({id(tensor): tensor.nbytes for tensor in self.tensors.values()}.values())

    @property
    def slab_bytes(self) -> int:
        """Bytes of the stored tensors that become weights without conversion."""
        return sum(self.sources[name].room for name in self.unchanged)

    @property
    def held_bytes(self) -> int:
        """Bytes of its weights, or of their slab, which alignment makes a little larger."""
        return max(self.nbytes, self.slab_bytes)

    @property
    def converted_bytes(self) -> int:
        """Bytes of the sources that transformers converts to new tensors."""
        return sum(s.nbytes for name, s in self.sources.items() if name not in self.unchanged)


@dataclass(frozen=True)
class Stages:
    """The weights that a decoder needs always, first, and then one layer at a time.

    The LM head, a vision tower and layers behind the last that caches K and V are in none.
    """

    resident: Stage
    embeddings: Stage
    layers: list[Stage]


def named_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters and buffers, each under all of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def get_tensor(module: nn.Module, name: str) -> Tensor:
    """The parameter or buffer `name` of `module`."""
    owner, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(owner), attribute)
    return tensor


def replace_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put `tensor` in the place of the parameter or buffer `name` of `module`."""
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, tensor)


def plan_stages(
    model: PreTrainedModel,
    layers: list[nn.Module],
    unused: Iterable[nn.Module],
    stored: Mapping[str, StoredTensor],
    mapping: list[Any],
) -> Stages:
    """Assign every tensor that `layers` of the decoder need to a stage; `unused` ones are not run.

    `stored` holds the tensors of the checkpoint, `mapping` transformers' conversions of them.

    Raises:
        UnsupportedModelError: two stages share a weight.
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
    model: PreTrainedModel, stored: Mapping[str, StoredTensor], mapping: list[Any]
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
