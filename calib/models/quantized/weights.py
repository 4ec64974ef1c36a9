"""The weights of a model, quantised or not, read as numbers one at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from calib.files.model_directory import ModelDirectory
from calib.files.safetensors_header import Entry
from calib.files.tensors import Source, StoredTensor, aligned, stored_tensors
from calib.models.quantized.coded_weight import CHUNK, CodedWeight, ModuleTensors, WeightFormat
from calib.models.quantized.config import FormatError, name_subject

# int64 indices, float32 values, codes and zero points of a chunk
_CHUNK_BYTES = CHUNK * 32
_SCALES_OF_INPUTS = (
    *("input_scale", "input_zero_point", "input_global_scale", "input_scale_inv"),
    *("activation_scale", "output_scale"),
)


@dataclass(frozen=True)
class DequantizedTensor(Source):
    """A weight that is decoded when it is read."""

    path: Path  # of the model
    coded: CodedWeight
    stored: Mapping[str, StoredTensor]  # by role, as `coded.parts`

    @property
    def decoding_bytes(self) -> int:
        """Bytes of the codes, and of a chunk of values."""
        return sum(tensor.room for tensor in self.stored.values()) + _CHUNK_BYTES

    def read(self, memory: Tensor | None = None) -> Tensor:
        """Return the weight in its dtype; InputError if it is not finite."""
        memory = torch.empty(self.room, dtype=torch.uint8) if memory is None else memory
        weight = aligned(memory, self.nbytes).view(self.dtype).view(self.shape)
        tensors = {part: tensor.read() for part, tensor in self.stored.items()}
        with name_subject(f"the weights of '{self.path}' are quantised"):
            return self.coded.decode(tensors, weight)


def all_weights(
    directory: ModelDirectory, weight_format: WeightFormat | None, dtype: torch.dtype | None = None
) -> dict[str, Source]:
    """Return the weights of an unquantised version of the model, by name.

    Codes of `weight_format` come in `dtype`, None being that of the first float stored as it is; all else
    comes as it is. InputError, before any value is read, where the files do not fit their config.
    """
    stored, coded = stored_tensors(directory), coded_weights(directory, weight_format)
    consumed = consumed_names(coded)
    weights: dict[str, Source] = {name: t for name, t in stored.items() if name not in consumed}
    floats = (tensor.dtype for tensor in weights.values() if tensor.dtype.is_floating_point)
    dtype = dtype or next(floats, torch.bfloat16)
    for weight in coded:
        parts = {part: stored[name] for part, name in weight.parts.items()}
        weights[weight.name] = DequantizedTensor(dtype, weight.shape, directory.path, weight, parts)
    return weights


def weight_shapes(
    directory: ModelDirectory, weight_format: WeightFormat | None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of an unquantised version of the model, by name."""
    coded = coded_weights(directory, weight_format)
    consumed = consumed_names(coded)
    plain = {name: entry.shape for name, entry in directory.entries.items() if name not in consumed}
    return plain | {weight.name: weight.shape for weight in coded}


def coded_weights(directory: ModelDirectory, weight_format: WeightFormat | None) -> list[CodedWeight]:
    """Return the weights that are stored as codes, from headers; InputError where files and config differ."""
    if weight_format is None:
        return []
    modules: dict[str, dict[str, Entry]] = {}
    for name, entry in directory.entries.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = entry
    with name_subject(f"the weights of '{directory.path}' are quantised"):
        tensors = [ModuleTensors(name, parts) for name, parts in modules.items()]
        weights = [weight for module in tensors for weight in weight_format.weights(module)]
        if not weights:
            raise FormatError(f"its config says {weight_format.label}, and no file holds such codes")
        plain = directory.entries.keys() - consumed_names(weights)
        for weight in weights:
            if weight.name in plain:
                raise FormatError(f"'{weight.name}' is there as numbers, and as codes beside it")
    return weights


def consumed_names(weights: list[CodedWeight]) -> set[str]:
    """Return the names of the stored tensors of `weights`, and of scales of their inputs."""
    modules = [weight.name.rpartition(".")[0] for weight in weights]
    inputs = {f"{module}.{part}" for module in modules for part in _SCALES_OF_INPUTS}
    return inputs | {name for weight in weights for name in weight.parts.values()}
