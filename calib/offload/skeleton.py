"""The model without its weights: parameters on the meta device, buffers as real as ever.

transformers itself loads it, from promises instead of weights, so names, dtypes, fused experts,
tied embeddings and computed buffers come out as they do for a model in memory.
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from calib.errors import InputError
from calib.model.checkpoint import Checkpoint
from calib.model.config import build_on_meta
from calib.model.load import check_complete, loading, requested_dtype, uses_gpu
from calib.model.quantized import is_quantized
from calib.offload.weights import StoredTensor, stored_tensors
from calib.recipe import Recipe


def load_skeleton(
    checkpoint: Checkpoint, config: PreTrainedConfig, recipe: Recipe
) -> PreTrainedModel:
    """Build the model that `load_model` would load, with every stored weight on the meta device.

    Buffers that are computed are where the layers will be, see `execution_device`.
    """
    if is_quantized(config):
        raise InputError(
            f"the weights of '{checkpoint.path}' are quantised, and only plain ones can be read "
            "layer by layer; use --offload none, or calibrate the model it was made from"
        )
    promises = {name: _Promise(tensor) for name, tensor in stored_tensors(checkpoint).items()}
    with loading(f"'{checkpoint.path}'"):
        model_class = type(build_on_meta(config, trust_remote_code=recipe.trust_remote_code))
        if not isinstance(config, model_class.config_class):
            config = config.get_text_config(decoder=True)
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=promises,
            dtype=requested_dtype(recipe),
            device_map={"": execution_device(recipe)},
            output_loading_info=True,
        )
    check_complete(checkpoint, info)
    return model.eval()


def execution_device(recipe: Recipe) -> torch.device:
    """The device where layers compute."""
    gpu = uses_gpu(recipe)
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


class _Promise:
    """Does what transformers does to a stored tensor while it loads one, but yields a meta tensor.

    A meta tensor itself cannot be moved to the CPU, where the computed buffers shall be.
    """

    def __init__(self, stored: StoredTensor) -> None:
        self.dtype = stored.dtype
        self._shape = stored.shape

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, index: object) -> "_Promise":
        return self

    def to(self, device: object, dtype: torch.dtype | None) -> Tensor:
        return torch.empty(self._shape, dtype=dtype or self.dtype, device="meta")
