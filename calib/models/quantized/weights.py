"""The weights of a model, quantised or not, read as numbers one at a time."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from calib.errors import InputError
from calib.files.model_directory import ModelDirectory
from calib.files.names import is_of_cache
from calib.files.safetensors_header import FLOATS, Entry
from calib.files.tensors import Source, StoredTensor, aligned, stored_tensors
from calib.models.quantized.coded_weight import CHUNK, CodedWeight, ModuleTensors, WeightFormat
from calib.models.quantized.config import ADVICE, FormatError, name_subject
from calib.models.quantized.detect import read_formats

# int64 indices, float32 values, codes and zero points of a chunk
_CHUNK_BYTES = CHUNK * 32
# integers are weights' codes under these names only: masks and positions are integers as well
_WEIGHT = re.compile(r"(?:weight|_proj)$")
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
        """Decode the weight, of `shape`, into `memory` [room] uint8; an InputError if it is not finite."""
        memory = torch.empty(self.room, dtype=torch.uint8) if memory is None else memory
        weight = aligned(memory, self.nbytes).view(self.dtype).view(self.shape)
        tensors = {part: tensor.read() for part, tensor in self.stored.items()}
        with name_subject(f"the weights of '{self.path}' are quantised"):
            return self.coded.decode(tensors, weight)


class SplitWeights(NamedTuple):
    """The tensors of a model: weights that are stored as codes, and all that is stored as numbers."""

    label: str | None  # of the format of codes; None: there are none, or transformers decodes them
    coded: list[CodedWeight]
    plain: dict[str, Entry]  # by name


def split_weights(directory: ModelDirectory) -> SplitWeights:
    """Tell codes from numbers, by configs and headers alone; refuse formats that nothing reads."""
    formats = read_formats(directory)
    weight_format = next(iter(formats), None)
    coded = _coded_weights(directory, weight_format) if weight_format else []
    consumed = _consumed_names(coded)
    plain = {name: entry for name, entry in directory.entries.items() if name not in consumed}
    for name, entry in sorted(plain.items()) if weight_format or not formats else ():
        is_integer = entry.dtype == "BOOL" or entry.dtype.startswith(("I", "U"))
        is_harmless = is_of_cache(name) or (is_integer and not _WEIGHT.search(name))
        if entry.dtype not in FLOATS and not is_harmless:
            raise InputError(
                f"'{directory.path / directory.weight_map[name]}' holds '{name}' as {entry.dtype}, "
                f"and no config says how to decode it, {ADVICE}"
            )
    return SplitWeights(weight_format.label if weight_format else None, coded, plain)


def all_weights(directory: ModelDirectory, dtype: torch.dtype | None = None) -> dict[str, Source]:
    """Return the weights of an unquantised version of the model, by name.

    Codes come in `dtype`, None being that of the first float stored as it is; all else comes as it is.
    """
    _, coded, plain = split_weights(directory)
    stored = stored_tensors(directory)
    weights: dict[str, Source] = {name: stored[name] for name in plain}
    floats = (tensor.dtype for tensor in weights.values() if tensor.dtype.is_floating_point)
    dtype = dtype or next(floats, torch.bfloat16)
    for weight in coded:
        parts = {part: stored[name] for part, name in weight.parts.items()}
        weights[weight.name] = DequantizedTensor(dtype, weight.shape, directory.path, weight, parts)
    return weights


def quantization_notes(directory: ModelDirectory) -> list[str]:
    """Return a line on how quantised weights were read; none where they are numbers."""
    label = split_weights(directory).label
    note = "they were dequantised, and activations were not quantised"
    return [f"the weights are quantised ({label}): {note}"] if label else []


def _coded_weights(directory: ModelDirectory, weight_format: WeightFormat) -> list[CodedWeight]:
    modules: dict[str, dict[str, Entry]] = {}
    for name, entry in directory.entries.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = entry
    with name_subject(f"the weights of '{directory.path}' are quantised"):
        tensors = [ModuleTensors(name, parts) for name, parts in modules.items()]
        weights = [weight for module in tensors for weight in weight_format.weights(module)]
        if not weights:
            raise FormatError(f"its config says {weight_format.label}, and no file holds such codes")
        plain = directory.entries.keys() - _consumed_names(weights)
        for weight in weights:
            if weight.name in plain:
                raise FormatError(f"'{weight.name}' is there as numbers, and as codes beside it")
    return weights


def _consumed_names(weights: list[CodedWeight]) -> set[str]:
    """Return the names of the stored tensors of `weights`, and of scales of their inputs."""
    modules = [weight.name.rpartition(".")[0] for weight in weights]
    inputs = {f"{module}.{part}" for module in modules for part in _SCALES_OF_INPUTS}
    return inputs | {name for weight in weights for name in weight.parts.values()}
