"""Hidden states between two layers, for every batch: in memory while they fit, then on disk."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from calib.errors import InputError, one_line
from calib.files.text import show_size
from calib.layerwise.replay import Output

Key = tuple[str, int]  # a name, and the index of the batch


class HiddenStates:
    """Outputs of every batch: up to `memory_bytes` of them in memory, the rest under `directory`.

    Nothing is left in `directory` when the block ends, however it ends.
    """

    def __init__(self, directory: Path, memory_bytes: int) -> None:
        self._directory = directory
        self._scratch: TemporaryDirectory[str] | None = None
        self._free_bytes = memory_bytes
        self._in_memory: dict[Key, Output] = {}
        self._disk_bytes: dict[Key, int] = {}

    def __enter__(self) -> "HiddenStates":
        return self

    def __exit__(self, *_: object) -> None:
        if self._scratch:
            self._scratch.cleanup()

    def put(self, key: Key, output: Output) -> None:
        """Store `output`, whose tensors, of any shapes, must not change any more."""
        output = map_tensors(output, Tensor.cpu)
        size = nbytes(output)
        if size <= self._free_bytes:
            self._free_bytes -= size
            self._in_memory[key] = output
        else:
            self._write(key, output)
            self._disk_bytes[key] = size

    def get(self, key: Key, device: torch.device) -> Output:
        """Return the output under `key`, its tensors of any shapes on `device`."""
        if key in self._in_memory:
            output = self._in_memory[key]
        else:  # read and not mapped, because mapped pages count as resident memory
            output = torch.load(self._path(key), weights_only=True)
        return map_tensors(output, lambda tensor: tensor.to(device))

    def take(self, key: Key, device: torch.device) -> Output:
        """Return the output under `key`, its tensors of any shapes on `device`, and forget it."""
        output = self.get(key, device)
        if key in self._in_memory:
            self._free_bytes += nbytes(self._in_memory.pop(key))
        else:
            del self._disk_bytes[key]
            self._path(key).unlink()
        return output

    def _path(self, key: Key) -> Path:
        if self._scratch is None:
            self._scratch = TemporaryDirectory(prefix=".fp8kv-hidden-", dir=self._directory)
        return Path(self._scratch.name, f"{key[0]}-{key[1]}")

    def _write(self, key: Key, output: Output) -> None:
        try:
            with self._path(key).open("wb") as file:
                torch.save(map_tensors(output, _drop_gaps), file)
        except (OSError, RuntimeError) as error:
            cause = error.__context__ or error  # torch raises its own error over that of the file
            raise InputError(
                f"cannot store more hidden states than {show_size(sum(self._disk_bytes.values()))} in "
                f"'{self._directory}': {getattr(cause, 'strerror', None) or one_line(cause)}; "
                "set TMPDIR to a larger disk, raise --max-memory or lower --samples"
            ) from None


def _drop_gaps(tensor: Tensor) -> Tensor:
    # torch saves all memory of a view
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def to_meta(output: Output) -> Output:
    """Return the shapes and dtypes of `output`, tensors of any shapes, as meta tensors."""
    return map_tensors(output, lambda tensor: torch.empty_like(tensor, device="meta"))


def nbytes(output: Output) -> int:
    """Return the bytes of all tensors of `output`, of any shapes."""
    parts = output if isinstance(output, tuple) else (output,)
    return sum(part.nbytes for part in parts if part is not None)


def map_tensors(output: Output, function: Callable[[Tensor], Tensor]) -> Output:
    """Return `output` with `function` applied to each of its tensors, of any shape."""
    if isinstance(output, Tensor):
        return function(output)
    return tuple(None if part is None else function(part) for part in output)
