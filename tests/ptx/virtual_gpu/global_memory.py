"""Global memory: the tensors' own, as far as the kernel was given them."""

import ctypes

import numpy as np

from virtual_gpu.program import FaultError


class GlobalMemory:
    """What lies between the first and the last value of each tensor."""

    def __init__(self, tensors):
        ranges = sorted({_extent(tensor) for tensor in tensors if tensor.numel()})
        self._starts = np.array([start for start, _ in ranges], np.uint64)
        self._ends = np.array([end for _, end in ranges], np.uint64)
        self._views = {}

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Unsigned integers of `size` bytes."""
        self._check(addresses, size, "load")
        return self._memory(size)[self._places(addresses, size)]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Store unsigned integers; threads that write to one place must agree."""
        size = values.dtype.itemsize
        self._check(addresses, size, "store")
        memory, places = self._memory(size), self._places(addresses, size)
        memory[places] = values
        if (memory[places] != values).any():
            raise FaultError("threads store different values to one place in global memory")

    def add(self, addresses: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Add one thread after the other; returns what was there before."""
        size = values.dtype.itemsize
        self._check(addresses, size, "atomic")
        memory, before = self._memory(size), np.empty_like(values)
        for i, place in enumerate(self._places(addresses, size).tolist()):
            before[i] = memory[place]
            memory[place] += values[i]
        return before

    def _check(self, addresses, size, what):
        if not len(addresses):
            return
        if (addresses % np.uint64(size)).any():
            raise FaultError(f"global {what} of {size} bytes that is not aligned")
        at = np.searchsorted(self._starts, addresses, "right").astype(np.int64) - 1
        inside = (at >= 0) & (addresses + np.uint64(size) <= self._ends[at])
        if not inside.all():
            raise FaultError(f"global {what} of {size} bytes beyond every tensor")

    def _memory(self, size):
        """All addresses as an array of this type: what is used was checked."""
        if size not in self._views:
            kind = getattr(ctypes, f"c_uint{8 * size}") * (2**50 // size)
            self._views[size] = np.frombuffer(kind.from_address(4096), f"u{size}")
        return self._views[size]

    def _places(self, addresses, size):
        return ((addresses - np.uint64(4096)) // np.uint64(size)).astype(np.int64)


def _extent(tensor):
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
