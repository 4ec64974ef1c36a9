"""Loads, stores and copies, and global memory: the tensors' own, as far as the kernel was given them."""

import ctypes

import numpy as np

from virtual_gpu.arithmetic import TYPES
from virtual_gpu.program import FaultError

_HINTS = {"ca", "cg", "L1::evict_last", "L1::evict_first", "L1::no_allocate", "nc", "v2", "v4"}


class GlobalMemory:
    """What lies between the first and the last value of each tensor."""

    def __init__(self, tensors):
        ranges = set()
        for tensor in (tensor for tensor in tensors if tensor.numel()):
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            ranges.add((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
        self._starts, self._ends = np.array(sorted(ranges), np.uint64).reshape(-1, 2).T
        self._views = {}

    def load(self, addresses, size):
        memory, places = self._memory(addresses, size, "load")
        return memory[places]

    def store(self, addresses, values):
        """Store unsigned integers; threads that write to one place must agree."""
        memory, places = self._memory(addresses, values.dtype.itemsize, "store")
        memory[places] = values
        if (memory[places] != values).any():
            raise FaultError("threads store different values to one place in global memory")

    def add(self, addresses, values):
        """Add one thread after the other; returns what was there before."""
        memory, places = self._memory(addresses, values.dtype.itemsize, "atomic")
        before = np.empty_like(values)
        for i, place in enumerate(places.tolist()):
            before[i] = memory[place]
            memory[place] += values[i]
        return before

    def _memory(self, addresses, size, what):
        """All addresses as an array of this type, and places in it that are inside of tensors."""
        check_alignment(addresses, size)
        at = np.searchsorted(self._starts, addresses, "right").astype(np.int64) - 1
        if len(at) and not ((at >= 0) & (addresses + np.uint64(size) <= self._ends[at])).all():
            raise FaultError(f"global {what} of {size} bytes beyond every tensor")
        if size not in self._views:
            kind = getattr(ctypes, f"c_uint{8 * size}") * (2**50 // size)
            self._views[size] = np.frombuffer(kind.from_address(4096), f"u{size}")
        return self._views[size], ((addresses - np.uint64(4096)) // np.uint64(size)).astype(np.int64)


def check_alignment(addresses, size):
    if (addresses % np.uint64(size)).any():
        raise FaultError(f"global access of {size} bytes that is not aligned")


def _check_known(instruction, *known):
    unknown = set(instruction.parts[1:-1]) - {*known} - _HINTS
    if unknown:
        raise FaultError(f"unknown modifiers {sorted(unknown)}")


def _access(machine, instruction, registers, address):
    """Registers, the bytes of each, threads that are here, and where: addresses, or shared places."""
    _check_known(instruction, "global", "shared", "shared::cta")
    registers = registers if isinstance(registers, tuple) else (registers,)
    size, threads = np.dtype(TYPES[instruction.parts[-1]]).itemsize, machine.active()
    if instruction.parts[1] == "global":
        places = machine.addresses(address, "b64")[threads]
        check_alignment(places, size * len(registers))
    else:
        addresses = machine.addresses(address, "b32")[threads]
        places = machine.shared.places(threads, addresses, size * len(registers))
    return registers, size, threads, places


def load(machine, instruction):
    registers, size, threads, places = _access(machine, instruction, *instruction.operands)
    if instruction.parts[1] == "global":
        values = [machine.memory.load(places + np.uint64(i * size), size) for i in range(len(registers))]
    else:
        values = np.ascontiguousarray(machine.shared.load(threads, places)).view(f"u{size}").T
    for register, value in zip(registers, values, strict=True):
        machine.write_some(register, threads, value)


def store(machine, instruction):
    registers, size, threads, places = _access(machine, instruction, *reversed(instruction.operands))
    values = [machine.read(register, f"b{8 * size}")[threads] for register in registers]
    if instruction.parts[1] == "global":
        for i, value in enumerate(values):
            machine.memory.store(places + np.uint64(i * size), value)
    else:
        machine.shared.store(threads, places, np.stack(values, 1).view(np.uint8))


def load_param(machine, instruction):
    (to, address), dtype = instruction.operands, np.dtype(TYPES[instruction.parts[-1]])
    at = machine.addresses(address, "b32").astype(np.int64)
    if (at % dtype.itemsize).any() or (at + dtype.itemsize > len(machine.params)).any():
        raise FaultError("no such parameter")
    value = np.ascontiguousarray(machine.params[at[:, None] + np.arange(dtype.itemsize)])
    machine.write(to, value.view(dtype)[:, 0])


def add_global(machine, instruction):
    _check_known(instruction, "global", "gpu", "acq_rel", "relaxed", "add")
    to, address, operand = instruction.operands
    threads, addresses = machine.active(), machine.addresses(address, "b64")
    values = machine.read(operand, instruction.parts[-1])[threads]
    machine.write_some(to, threads, machine.memory.add(addresses[threads], values))


def copy_async(machine, instruction):
    """`cp.async`: of its bytes only the first are read, the others are zeros."""
    _check_known(instruction, "async", "shared", "shared::cta", "global")
    to, source, size, *read = instruction.operands
    threads = machine.active()
    wanted = machine.read(read[0] if read else size, "u32")[threads]
    addresses, reading = machine.addresses(source, "b64")[threads], wanted > 0
    if ((wanted != size) & reading).any():
        raise FaultError("a copy of part of its bytes")
    check_alignment(addresses[reading], size)
    values = np.zeros((len(threads), size // 4), np.uint32)
    for i in range(size // 4):
        values[reading, i] = machine.memory.load(addresses[reading] + np.uint64(4 * i), 4)
    places = machine.shared.places(threads, machine.addresses(to, "b32")[threads], size)
    machine.shared.copy(threads, places, values.view(np.uint8))


HANDLERS = {
    "ld.param": load_param, "ld.global": load, "ld.shared": load, "ld.shared::cta": load,
    "st.global": store, "st.shared": store, "st.shared::cta": store, "atom.global": add_global,
    "cp.async": copy_async,
    "cp.async.commit_group": lambda m, _: m.shared.commit(m.active()),
    "cp.async.wait_group": lambda m, i: m.shared.wait(m.active(), i.operands[0]),
    "fence.proxy.async": lambda m, _: m.shared.fence(m.active()),
}  # fmt: skip
