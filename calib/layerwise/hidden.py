"""Hidden states between two layers, for every batch: in memory while they fit, then on disk."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from calib.errors import InputError
from calib.files.text import show_size
from calib.layerwise.replay import Output

# what it belongs to, and the index of the batch
Key = tuple[str, int]


class HiddenStates:
    """Outputs by key: up to `memory_bytes` of them in memory, and the rest under `directory`.

    Nothing is left in `directory` when the block ends, however it ends.
    """

    def __init__(self, directory: Path, memory_bytes: int) -> None:
        self._directory = directory
        self._scratch: TemporaryDirectory[str] | None = None
        self._room = memory_bytes
        self._memory: dict[Key, Output] = {}
        self._forms: dict[Key, Output] = {}  # meta tensors, of what is on disk

    def __enter__(self) -> "HiddenStates":
        return self

    def __exit__(self, *_: object) -> None:
        if self._scratch:
            self._scratch.cleanup()

    def put(self, key: Key, output: Output) -> None:
        """Store `output`, which must not be changed any more."""
        size = nbytes(output)
        if size <= self._room:
            self._room -= size
            self._memory[key] = _each(output, Tensor.cpu)
        else:
            self._write(key, output)
            self._forms[key] = form_of(output)

    def get(self, key: Key, device: torch.device) -> Output:
        """Return what is stored under `key`, on `device`."""
        output = self._memory[key] if key in self._memory else self._read(key)
        return _each(output, lambda tensor: tensor.to(device))

    def take(self, key: Key, device: torch.device) -> Output:
        """Return what is stored under `key`, on `device`, and forget it."""
        output = self.get(key, device)
        self.drop(key)
        return output

    def drop(self, key: Key) -> None:
        """Forget what is stored under `key`."""
        if key in self._memory:
            self._room += nbytes(self._memory.pop(key))
        else:
            del self._forms[key]
            self._path(key).unlink()

    def _path(self, key: Key) -> Path:
        if self._scratch is None:
            self._scratch = TemporaryDirectory(prefix=".fp8kv-hidden-", dir=self._directory)
        return Path(self._scratch.name, f"{key[0]}-{key[1]}")

    def _write(self, key: Key, output: Output) -> None:
        try:
            _write_output(output, self._path(key))
        except OSError as error:
            held = show_size(sum(map(nbytes, self._forms.values())))
            raise InputError(
                f"cannot keep more hidden states than {held} in '{self._directory}': "
                f"{error.strerror}; set TMPDIR to a larger disk, raise --max-memory or lower "
                "--samples"
            ) from None

    def _read(self, key: Key) -> Output:
        with self._path(key).open("rb") as file:

            def fill(form: Tensor) -> Tensor:
                tensor = torch.empty_like(form, device="cpu")
                file.readinto(_bytes(tensor))
                return tensor

            return _each(self._forms[key], fill)


def form_of(output: Output) -> Output:
    """Shapes and dtypes of `output`, as meta tensors."""
    return _each(output, lambda tensor: torch.empty_like(tensor, device="meta"))


def nbytes(output: Output) -> int:
    """Bytes of all tensors of `output`."""
    return sum(tensor.nbytes for tensor in _tensors(output))


def _write_output(output: Output, path: Path) -> None:
    with path.open("wb") as file:
        for tensor in _tensors(output):
            file.write(_bytes(tensor.cpu()))


def _bytes(tensor: Tensor) -> memoryview:
    # in the order of memory, which comes back with the values: kernels round by it
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        tensor = torch.empty_like(tensor).copy_(tensor)  # with gaps, or with elements used twice
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _tensors(output: Output) -> list[Tensor]:
    parts = output if isinstance(output, tuple) else (output,)
    return [part for part in parts if part is not None]


def _each(output: Output, function: Callable[[Tensor], Tensor]) -> Output:
    if isinstance(output, Tensor):
        return function(output)
    return tuple(None if part is None else function(part) for part in output)
