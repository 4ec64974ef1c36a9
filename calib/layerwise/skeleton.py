"""The model without its weights: parameters on the meta device, buffers as real as ever.

transformers itself loads it, from promises instead of weights, so names, dtypes, fused experts,
tied embeddings and computed buffers come out as they do for a model in memory.
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from calib.errors import InputError
from calib.files.model_directory import ModelDirectory
from calib.files.tensors import Source
from calib.models.load import load_from, uses_gpu, weight_sources
from calib.models.quantized.detect import is_quantized
from calib.recipe import Recipe


def load_skeleton(checkpoint: ModelDirectory, config: PreTrainedConfig, recipe: Recipe) -> PreTrainedModel:
    """Build the model that `load_model` would load, with every stored weight on the meta device.

    Buffers that are computed are where the layers will be, see `execution_device`.
    """
    if is_quantized(config):
        raise InputError(
            f"the weights of '{checkpoint.path}' are quantised in a way that only transformers "
            "reads, and not layer by layer; use --offload none, or calibrate the model it was "
            "made from"
        )
    sources = weight_sources(checkpoint, config, recipe)
    promises = {name: _Promise(source) for name, source in sources.items()}
    return load_from(promises, checkpoint, config, recipe, {"": execution_device(recipe)})


def execution_device(recipe: Recipe) -> torch.device:
    """The device where layers compute."""
    gpu = uses_gpu(recipe)
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


class _Promise:
    """Does what transformers does to a stored tensor while it loads one, but yields a meta tensor.

    A meta tensor itself cannot be moved to the CPU, where the computed buffers shall be.
    """

    def __init__(self, source: Source) -> None:
        self.dtype = source.dtype
        self._shape = source.shape

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, index: object) -> "_Promise":
        return self

    def to(self, device: object, dtype: torch.dtype | None) -> Tensor:
        return torch.empty(self._shape, dtype=dtype or self.dtype, device="meta")
