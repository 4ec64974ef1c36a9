"""Weights, read from the checkpoint when they are needed and dropped after use."""

import heapq
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from calib.errors import UnsupportedModelError
from calib.files.tensors import Source
from calib.models.load import Pending

# threads with which transformers loads
_READ_AT_ONCE = 4


@dataclass(frozen=True)
class Stage:
    """Weights that come and go together."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # name in the model -> meta tensor
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
    def held_bytes(self) -> int:
        """Bytes of the weights, or of their slab where alignment makes that larger."""
        return max(self.nbytes, self.slab_bytes)

    @property
    def converted_bytes(self) -> int:
        """Bytes of the sources that transformers converts to new tensors, and of decoding."""
        decoding = [source.decoding_bytes for source in self.sources.values()]
        converted = sum(s.nbytes for name, s in self.sources.items() if name not in self.unchanged)
        return converted + sum(heapq.nlargest(_READ_AT_ONCE, decoding))


def replace_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put `tensor` in the place of the parameter or buffer `name` of `module`."""
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, tensor)


class WeightLoader:
    """Puts the weights of a stage into the model, as transformers does, and takes them out."""

    def __init__(self, model: PreTrainedModel, mapping: list[Any], device: torch.device) -> None:
        self._model = model
        self._config = LoadStateDictConfig(device_map={"": device}, dtype=model.dtype, weight_mapping=mapping)

    def load(self, stage: Stage, slab: Tensor | None = None) -> None:
        """Read the weights of `stage`; unconverted ones go into `slab` if given."""
        pending = {name: Pending(source) for name, source in stage.sources.items()}
        if slab is not None:
            start = 0
            for name in stage.unchanged:
                end = start + stage.sources[name].room
                pending[name].memory, start = slab[start:end], end
        convert_and_load_state_dict_in_model(self._model, pending, self._config)
        self._share(stage)

    def unload(self, stage: Stage) -> None:
        """Leave nothing of `stage` but its names and shapes."""
        for name, tensor in stage.tensors.items():
            replace_tensor(self._model, name, tensor)

    @contextmanager
    def held(self, stage: Stage) -> Iterator[None]:
        """Hold `stage` inside the block."""
        self.load(stage)
        try:
            yield
        finally:
            self.unload(stage)

    def _share(self, stage: Stage) -> None:
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


class LayerWeights:
    """Weights of one layer at a time; with `ahead` the next is read meanwhile."""

    def __init__(self, loader: WeightLoader, stages: list[Stage], *, ahead: bool) -> None:
        self._loader = loader
        self._stages = stages
        self._ahead = ahead
        # memory is kept: the system takes longer to give new pages than to read into old ones
        size = max(stage.slab_bytes for stage in stages)
        self._slabs = [torch.empty(size, dtype=torch.uint8) for _ in range(1 + ahead)]
        self._reading: dict[int, Future[None]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="fp8kv-weights")

    def close(self) -> None:
        """Stop reading, and leave no weights behind."""
        self._reader.shutdown(cancel_futures=True)
        for index in self._reading:
            self._loader.unload(self._stages[index])

    @contextmanager
    def loaded(self, index: int) -> Iterator[None]:
        """Hold layer `index` inside the block, and begin to read the next one."""
        self._read(index)
        self._reading[index].result()
        if self._ahead and index + 1 < len(self._stages):
            self._read(index + 1)
        yield
        self._loader.unload(self._stages[index])
        del self._reading[index]

    def _read(self, index: int) -> None:
        if index not in self._reading:
            slab = self._slabs[index % len(self._slabs)]
            self._reading[index] = self._reader.submit(self._loader.load, self._stages[index], slab)
