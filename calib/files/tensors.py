"""Tensors of safetensors files, read when they are needed.

Files are read, not mapped: mapped pages count as resident memory for as long as a file stays open.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from calib.errors import InputError
from calib.files.model_directory import ModelDirectory

ALIGNMENT = 64
DTYPES = {
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
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class Source(ABC):
    """A tensor that is read when it is needed."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes of memory that `read` wants."""
        return self.nbytes + ALIGNMENT

    @property
    def decoding_bytes(self) -> int:
        """Bytes that reading it takes beside its values."""
        return 0

    @abstractmethod
    def read(self, memory: Tensor | None = None) -> Tensor:
        """Read the tensor, of `shape`, into `memory` [room] uint8 if there is one.

        Raises an InputError for a file that ends early, or values that are not finite.
        """


@dataclass(frozen=True)
class StoredTensor(Source):
    """A tensor of a safetensors file, as it is there."""

    path: Path
    offset: int  # of its first byte in the file

    def read(self, memory: Tensor | None = None) -> Tensor:
        """Read the tensor, of `shape`, into `memory` [room] uint8; an InputError if the file ends early."""
        memory = torch.empty(self.room, dtype=torch.uint8) if memory is None else memory
        # where it would lie in a mapped file: rounding in some CPU kernels depends on alignment
        place = self.offset if self.offset % self.dtype.itemsize == 0 else 0
        piece = aligned(memory, self.nbytes, place)
        unread, offset = piece.numpy().data, self.offset
        with self.path.open("rb", buffering=0) as file:
            while unread.nbytes:
                # one call reads at most 2 GiB, and lets other threads run meanwhile
                count = os.preadv(file.fileno(), [unread], offset)
                if not count:
                    raise InputError(f"'{self.path}' ends early; download the model again")
                unread, offset = unread[count:], offset + count
        return piece.view(self.dtype).view(self.shape)


def aligned(memory: Tensor, nbytes: int, place: int = 0) -> Tensor:
    """Take [nbytes] of `memory` [room] uint8 that lie as the byte `place` of a mapped file would."""
    start = (place - memory.data_ptr()) % ALIGNMENT
    return memory[start : start + nbytes]


def stored_tensors(checkpoint: ModelDirectory) -> dict[str, StoredTensor]:
    """Return every tensor of the files, by its name in the checkpoint."""
    tensors = {}
    for name, entry in checkpoint.entries.items():
        path = checkpoint.path / checkpoint.weight_map[name]
        if entry.dtype not in DTYPES:
            problem = f"'{path}' holds '{name}' as {entry.dtype}, which cannot be read layer by layer"
            raise InputError(f"{problem}; use --offload none")
        tensors[name] = StoredTensor(DTYPES[entry.dtype], entry.shape, path, entry.begin)
    return tensors
