"""Writing safetensors files that others may read."""

import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file with the permissions that any new file gets.

    safetensors 0.8 makes its files readable by their owner alone, so that a server running as
    another user could not load them. Tensors are copied, because it refuses shared memory, and
    layers that share a cache share their scales.
    """
    copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, path, metadata)
    share_file(path)


def share_file(path: Path) -> None:
    """Give `path` the permissions of a new file."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)
