"""Weights that stay in the checkpoint: which belong to which layer, read for it, dropped after it."""

import heapq
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from calib.choices import Device, DType
from calib.errors import InputError, UnsupportedModelError
from calib.files.model_directory import ModelDirectory
from calib.files.tensors import Source
from calib.layerwise.replay import find_embeddings
from calib.models.load import LazyWeight, load_from, uses_gpu, weight_sources
from calib.models.quantized.detect import is_quantized

_READ_AT_ONCE = 4  # threads with which transformers loads


def load_skeleton(
    checkpoint: ModelDirectory,
    config: PreTrainedConfig,
    dtype: DType = "auto",
    device: Device = "auto",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the model that `load_model` would load, with every stored weight on the meta device.

    transformers itself loads it, from meta tensors instead of weights, so names, dtypes, fused experts
    and tied embeddings are those of a model in memory. Buffers that are computed are as real as ever.
    Raises an InputError for quantised weights that only transformers reads.
    """
    if is_quantized(config):
        raise InputError(
            f"the weights of '{checkpoint.path}' are quantised in a way that only transformers reads, "
            "and not layer by layer; use --offload none, or calibrate the model it was made from"
        )
    sources = weight_sources(checkpoint, config, dtype)
    weights = {name: _MetaWeight(source) for name, source in sources.items()}
    return load_from(weights, checkpoint, config, dtype, {"": execution_device(device)}, trust_remote_code)


def execution_device(device: Device) -> torch.device:
    """Return the device where layers compute."""
    return torch.device("cuda", torch.cuda.current_device()) if uses_gpu(device) else torch.device("cpu")


class _MetaWeight(LazyWeight):
    """A stored weight that becomes a meta tensor where transformers moves it.

    A meta tensor itself cannot be moved to the CPU, where the computed buffers shall be.
    """

    def __getitem__(self, index: object) -> Any:
        return self

    def to(self, device: object, dtype: torch.dtype | None) -> Tensor:
        """Return a meta tensor of the weight's shape, [...]."""
        return torch.empty(self.source.shape, dtype=dtype or self.dtype, device="meta")


@dataclass(frozen=True)
class Stage:
    """Weights that come and go together."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # name in the model -> meta tensor of any shape
    sources: dict[str, Source] = field(default_factory=dict)  # by name in the checkpoint
    unchanged: set[str] = field(default_factory=set)  # sources that are weights as they are read

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in memory."""
        return sum({id(tensor): tensor.nbytes for tensor in self.tensors.values()}.values())

    @property
    def slab_bytes(self) -> int:
        """Bytes of the sources that become weights without conversion."""
        return sum(self.sources[name].room for name in self.unchanged)

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the weights, or of their slab where alignment makes that larger."""
        return max(self.nbytes, self.slab_bytes)

    @property
    def converted_bytes(self) -> int:
        """Bytes of the sources that transformers converts to new tensors, and of decoding."""
        decoding = [source.decoding_bytes for source in self.sources.values()]
        converted = sum(s.nbytes for name, s in self.sources.items() if name not in self.unchanged)
        return converted + sum(heapq.nlargest(_READ_AT_ONCE, decoding))


@dataclass(frozen=True)
class Stages:
    """Weights of a decoder by when they are needed: always, for the embeddings, for each layer.

    The LM head, a vision tower and layers behind the last that caches K and V are in none.
    """

    resident: Stage
    embeddings: Stage
    layers: list[Stage]


def plan_stages(
    model: PreTrainedModel,
    layers: list[nn.Module],
    unused: Iterable[nn.Module],
    stored: Mapping[str, Source],
    mapping: list[Any],
) -> Stages:
    """Assign every tensor that `layers` of the decoder need to a stage; `unused` ones are not run.

    `stored` has the weights of the checkpoint, `mapping` transformers' conversions of them.
    Stages must share no weight.
    """
    stages = Stages(Stage(), Stage(), [Stage() for _ in layers])
    names = {module: name for name, module in model.named_modules()}
    decoder = model.get_decoder()
    owners: dict[str, Stage | None] = {names[decoder]: stages.resident}
    owners |= {names[module]: stages.embeddings for module in find_embeddings(decoder, layers)}
    owners |= {names[layer]: stage for layer, stage in zip(layers, stages.layers, strict=True)}
    owners |= {names[layer]: None for layer in unused}
    weights = meta_tensors(model)
    by_identity: dict[int, Stage] = {}
    for name, tensor in weights.items():
        parts = name.split(".")
        parents = (".".join(parts[:length]) for length in reversed(range(len(parts))))
        stage = next((owners[parent] for parent in parents if parent in owners), None)
        if stage and by_identity.setdefault(id(tensor), stage) is not stage:
            raise UnsupportedModelError(
                f"{type(model).__name__}: '{name}' is shared between decoder layers, so each layer "
                "cannot come and go with its own weights; use --offload none"
            )
    for name, tensor in weights.items():
        # with its other names, such as that of a tied LM head
        if stage := by_identity.get(id(tensor)):
            stage.tensors[name] = tensor
    for source, target, is_converted in _match_names(model, stored, mapping):
        if target in weights and (stage := by_identity.get(id(weights[target]))):
            stage.sources[source] = stored[source]
            if not is_converted and stored[source].dtype == weights[target].dtype:
                stage.unchanged.add(source)
    return stages


def _match_names(
    model: PreTrainedModel, stored: Iterable[str], mapping: list[Any]
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


def meta_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return what is on the meta device, parameters and buffers of any shape, under all of its names."""
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {name: tensor for name, tensor in (*parameters, *buffers) if tensor.is_meta}


def replace_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put `tensor`, of any shape, in the place of the parameter or buffer `name` of `module`."""
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, tensor)


class WeightLoader:
    """Puts the weights of a stage into the model, as transformers does, and takes them out."""

    def __init__(self, model: PreTrainedModel, mapping: list[Any], device: torch.device) -> None:
        self._model = model
        self._config = LoadStateDictConfig(device_map={"": device}, dtype=model.dtype, weight_mapping=mapping)

    def load(self, stage: Stage, slab: Tensor | None = None) -> None:
        """Read the weights of `stage`, unconverted ones into `slab` [slab_bytes or more] uint8 if given.

        Raises an UnsupportedModelError where transformers cannot put them into the model.
        """
        pending = {name: LazyWeight(source) for name, source in stage.sources.items()}
        if slab is not None:
            start = 0
            for name in stage.unchanged:
                end = start + stage.sources[name].room
                pending[name].memory, start = slab[start:end], end
        convert_and_load_state_dict_in_model(self._model, pending, self._config)
        # a tensor that has several names was loaded under the one that it is stored by
        now = {name: self._model.get_parameter_or_buffer(name) for name in stage.tensors}
        loaded = {id(stage.tensors[n]): tensor for n, tensor in now.items() if not tensor.is_meta}
        for name, meta in stage.tensors.items():
            if id(meta) not in loaded:
                raise UnsupportedModelError(
                    f"{type(self._model).__name__}: transformers could not build '{name}' from the "
                    "stored tensors; use --offload none"
                )
            replace_tensor(self._model, name, loaded[id(meta)])

    def unload(self, stage: Stage) -> None:
        """Leave nothing of `stage` but its names and shapes."""
        for name, tensor in stage.tensors.items():
            replace_tensor(self._model, name, tensor)

    @contextmanager
    def loaded(self, stage: Stage) -> Iterator[None]:
        """Keep the weights of `stage` in the model inside the block."""
        self.load(stage)
        try:
            yield
        finally:
            self.unload(stage)


def load_in_turn(
    loader: WeightLoader, stages: list[Stage], *, reads_ahead: bool
) -> Generator[int, None, None]:
    """Yield the index of each stage while its weights are in the model, and no others.

    With `reads_ahead` the next stage is read meanwhile. Close the iterator to stop early.
    """
    # memory is reused: the system takes longer to give new pages than to read into old ones
    size = max(stage.slab_bytes for stage in stages)
    slabs = [torch.empty(size, dtype=torch.uint8) for _ in range(1 + reads_ahead)]
    reading: dict[int, Future[None]] = {}
    with ThreadPoolExecutor(1, thread_name_prefix="fp8kv-weights") as reader:
        try:
            for index, stage in enumerate(stages):
                for i in range(index, min(index + 1 + reads_ahead, len(stages))):
                    if i not in reading:
                        reading[i] = reader.submit(loader.load, stages[i], slabs[i % len(slabs)])
                reading[index].result()
                yield index
                loader.unload(stage)
                del reading[index]
        finally:
            reader.shutdown(cancel_futures=True)
            for index in reading:
                loader.unload(stages[index])
