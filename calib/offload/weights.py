"""Weights that come from the checkpoint when they are needed, and go again."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from calib.errors import UnsupportedModelError
from calib.offload.shards import StoredTensor
from calib.offload.stages import Stage, get_tensor, replace_tensor


class WeightLoader:
    """Puts the weights of a stage into the model, as transformers does, and takes them out."""

    def __init__(self, model: PreTrainedModel, mapping: list[Any], device: torch.device) -> None:
        self._model = model
        self._config = LoadStateDictConfig(
            device_map={"": device}, dtype=model.dtype, weight_mapping=mapping
        )

    def load(self, stage: Stage, slab: Tensor | None = None) -> None:
        """Read `stage`; weights that stay as they are stored go into `slab`, where given.

        Raises:
            InputError: a file ends early.
            UnsupportedModelError: transformers could not make one of the weights.
        """
        pending = {name: _Pending(source) for name, source in stage.sources.items()}
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
        now = {name: get_tensor(self._model, name) for name in stage.tensors}
        loaded = {id(stage.tensors[n]): tensor for n, tensor in now.items() if not tensor.is_meta}
        for name, meta in stage.tensors.items():
            if id(meta) not in loaded:
                raise UnsupportedModelError(
                    f"{type(self._model).__name__}: transformers made no '{name}' of what is "
                    "stored; use --offload none"
                )
            replace_tensor(self._model, name, loaded[id(meta)])


class _Pending:
    """A stored tensor; transformers reads it by taking all of its elements."""

    def __init__(self, source: StoredTensor) -> None:
        self._source = source
        self.memory: Tensor | None = None

    def __getitem__(self, index: object) -> Tensor:
        return self._source.read(self.memory)


class LayerWeights:
    """The weights of one layer at a time, the next read meanwhile where memory allows."""

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
