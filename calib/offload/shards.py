"""What a checkpoint's safetensors files hold and where, and plain reads of single tensors.

A mapped file's pages count as resident memory for as long as it stays open, so none is mapped here.
"""

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from calib.errors import InputError
from calib.model.checkpoint import Checkpoint

_ALIGNMENT = 64
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes that reading it needs."""
        return self.nbytes + _ALIGNMENT

    def read(self, memory: Tensor | None = None) -> Tensor:
        """Return the tensor, in `memory` [room] uint8 where given.

        Raises:
            InputError: the file ends early.
        """
        memory = torch.empty(self.room, dtype=torch.uint8) if memory is None else memory
        # where it would lie in a mapped file: rounding in some CPU kernels depends on alignment
        place = self.offset if self.offset % self.dtype.itemsize == 0 else 0
        start = (place - memory.data_ptr()) % _ALIGNMENT
        piece = memory[start : start + self.nbytes]
        _read_into(piece.numpy().data, self.path, self.offset)
        return piece.view(self.dtype).view(self.shape)


def stored_tensors(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Every tensor of the files, by its name in the checkpoint.

    Raises:
        InputError: a tensor has a dtype that plain weights never have.
    """
    found = {}
    for name, entry in checkpoint.entries.items():
        path = checkpoint.path / checkpoint.weight_map[name]
        if entry.dtype not in _DTYPES:
            raise InputError(
                f"'{path}' holds '{name}' as {entry.dtype}, which cannot be read layer by layer; "
                "use --offload none"
            )
        found[name] = StoredTensor(path, _DTYPES[entry.dtype], entry.shape, entry.begin)
    return found


def _read_into(memory: memoryview, path: Path, offset: int) -> None:
    with path.open("rb", buffering=0) as file:
        while memory.nbytes:
            # one call reads at most 2 GiB, and lets other threads run meanwhile
            count = os.preadv(file.fileno(), [memory], offset)
            if not count:
                raise InputError(f"'{path}' ends early; download the model again")
            memory, offset = memory[count:], offset + count
