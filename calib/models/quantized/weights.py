"""Quantised weights, read as the numbers that they stand for, one at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from calib.errors import InputError
from calib.files.model_directory import ModelDirectory
from calib.files.safetensors_header import Entry
from calib.files.tensors import Source, StoredTensor, aligned, stored_tensors
from calib.models.quantized.coded_weight import (
    CHUNK,
    CodedWeight,
    ModuleTensors,
    WeightFormat,
    WeightFormatError,
)

# int64 indices, float32 values, codes and zero points of a chunk
_CHUNK_BYTES = CHUNK * 32
_OF_ACTIVATIONS = (
    *("input_scale", "input_zero_point", "input_global_scale", "input_scale_inv"),
    *("activation_scale", "output_scale"),
)


@dataclass(frozen=True)
class DequantizedTensor(Source):
    """A weight that is decoded when it is read."""

    path: Path  # of the checkpoint
    coded: CodedWeight
    stored: Mapping[str, StoredTensor]  # by the names that decoding gives them

    @property
    def decoding_bytes(self) -> int:
        """Bytes of the codes, and of a chunk of values."""
        return sum(tensor.room for tensor in self.stored.values()) + _CHUNK_BYTES

    def read(self, memory: Tensor | None = None) -> Tensor:
        """Return the weight in its dtype; InputError if it is not finite."""
        memory = torch.empty(self.room, dtype=torch.uint8) if memory is None else memory
        weight = aligned(memory, self.nbytes).view(self.dtype).view(self.shape)
        tensors = {part: tensor.read() for part, tensor in self.stored.items()}
        with naming(_about(self.path)):
            return self.coded.decode(tensors, weight)


def all_weights(
    checkpoint: ModelDirectory, layout: WeightFormat | None, dtype: torch.dtype | None = None
) -> dict[str, Source]:
    """What an unquantised checkpoint of the model would hold, by name.

    Codes of `layout` come in `dtype`, None being that of the first float stored as it is; all else
    comes as it is. InputError, before any value is read, where the files are not what it says.
    """
    stored, coded = stored_tensors(checkpoint), coded_weights(checkpoint, layout)
    spent = consumed_names(coded)
    found: dict[str, Source] = {name: t for name, t in stored.items() if name not in spent}
    floats = (tensor.dtype for tensor in found.values() if tensor.dtype.is_floating_point)
    dtype = dtype or next(floats, torch.bfloat16)
    for weight in coded:
        parts = {part: stored[name] for part, name in weight.parts.items()}
        found[weight.name] = DequantizedTensor(dtype, weight.shape, checkpoint.path, weight, parts)
    return found


def coded_weights(checkpoint: ModelDirectory, layout: WeightFormat | None) -> list[CodedWeight]:
    """The weights that are stored as codes; InputError where files and config do not agree.

    Nothing but headers is read.
    """
    if layout is None:
        return []
    modules: dict[str, dict[str, Entry]] = {}
    for name, entry in checkpoint.entries.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = entry
    with naming(_about(checkpoint.path)):
        found = [w for name, parts in modules.items() for w in layout.weights(ModuleTensors(name, parts))]
        if not found:
            raise WeightFormatError(f"its config says {layout.label}, and no file holds such codes")
        spent = consumed_names(found)
        for weight in found:
            if weight.name in checkpoint.entries.keys() - spent:
                raise WeightFormatError(f"'{weight.name}' is there as it is, and as codes beside it")
    return found


def weight_shapes(checkpoint: ModelDirectory, layout: WeightFormat | None) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, by name; `layout` is that of those stored as codes."""
    coded = coded_weights(checkpoint, layout)
    spent = consumed_names(coded)
    plain = {name: e.shape for name, e in checkpoint.entries.items() if name not in spent}
    return {**plain, **{weight.name: weight.shape for weight in coded}}


def consumed_names(coded: list[CodedWeight]) -> set[str]:
    """Names of the stored tensors that weights are made of, and of scales of their inputs."""
    modules = [weight.name.rpartition(".")[0] for weight in coded]
    named = {f"{module}.{part}" for module in modules for part in _OF_ACTIVATIONS}
    return named | {name for weight in coded for name in weight.parts.values()}


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say in a WeightFormatError what cannot be read."""
    try:
        yield
    except WeightFormatError as error:
        # names come from files, and may be of any length and several lines
        reason = " ".join(str(error).split())[:1000]
        raise InputError(f"{what}: {reason}") from None


def _about(path: Path) -> str:
    return f"the weights of '{path}' are quantised"
