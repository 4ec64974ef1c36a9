"""Loads, stores, copies and barriers."""

import numpy as np

from virtual_gpu.numbers import TYPES
from virtual_gpu.program import FaultError

_HINTS = ("ca", "cg", "L1::evict_last", "L1::evict_first", "L1::no_allocate", "nc")


def _known(instruction, *known):
    """All between the opcode's dots is understood."""
    unknown = set(instruction.parts[1:-1]) - {*known, *_HINTS, "v2", "v4"}
    if unknown:
        raise FaultError(f"unknown modifiers {sorted(unknown)}")


def _access(machine, instruction, registers, address):
    """Registers, the bytes of each, threads that are here, and where: addresses, or shared places."""
    _known(instruction, "global", "shared", "shared::cta")
    registers = registers if isinstance(registers, tuple) else (registers,)
    size, threads = np.dtype(TYPES[instruction.parts[-1]]).itemsize, machine.active()
    if instruction.parts[1] == "global":
        places = machine.addresses(address, "b64")[threads]
        _aligned_vector(places, size * len(registers))
    else:
        addresses = machine.addresses(address, "b32")[threads]
        places = machine.shared.places(threads, addresses, size * len(registers))
    return registers, size, threads, places


def _aligned_vector(addresses, size):
    if (addresses % np.uint64(size)).any():
        raise FaultError(f"global access of {size} bytes that is not aligned")


def load(machine, instruction):
    """`ld.global` and `ld.shared`, of up to four registers."""
    registers, size, threads, places = _access(machine, instruction, *instruction.operands)
    if instruction.parts[1] == "global":
        offsets = (np.arange(len(registers)) * size).astype(np.uint64)
        values = [machine.memory.load(places + offset, size) for offset in offsets]
    else:
        values = np.ascontiguousarray(machine.shared.load(threads, places)).view(f"u{size}").T
    for register, value in zip(registers, values, strict=True):
        loaded = np.zeros(machine.num_threads, f"u{size}")
        loaded[threads] = value
        machine.write(register, loaded)


def store(machine, instruction):
    """`st.global` and `st.shared`."""
    registers, size, threads, places = _access(machine, instruction, *reversed(instruction.operands))
    values = [machine.read(register, f"b{8 * size}")[threads] for register in registers]
    if instruction.parts[1] == "global":
        for i, value in enumerate(values):
            machine.memory.store(places + np.uint64(i * size), value)
    else:
        machine.shared.store(threads, places, np.stack(values, 1).view(np.uint8))


def load_param(machine, instruction):
    """`ld.param`."""
    to, address = instruction.operands
    size = np.dtype(TYPES[instruction.parts[-1]]).itemsize
    at = machine.addresses(address, "b32").astype(np.int64)
    if (at % size).any() or (at + size > len(machine.params)).any():
        raise FaultError("no such parameter")
    value = np.ascontiguousarray(machine.params[at[:, None] + np.arange(size)])
    machine.write(to, value.view(TYPES[instruction.parts[-1]])[:, 0])


def add_global(machine, instruction):
    """`atom.global.add`."""
    _known(instruction, "global", "gpu", "acq_rel", "relaxed", "add")
    to, address, operand = instruction.operands
    threads, kind = machine.active(), instruction.parts[-1]
    before = np.zeros(machine.num_threads, TYPES[kind])
    addresses = machine.addresses(address, "b64")[threads]
    before[threads] = machine.memory.add(addresses, machine.read(operand, kind)[threads])
    machine.write(to, before)


def copy_async(machine, instruction):
    """`cp.async`: of its bytes only the first are read, the others are zeros."""
    _known(instruction, "async", "shared", "shared::cta", "global")
    to, source, size, *read = instruction.operands
    threads = machine.active()
    wanted = machine.read(read[0] if read else size, "u32")[threads].astype(np.int64)
    addresses = machine.addresses(source, "b64")[threads]
    reading = wanted > 0
    if ((wanted != size) & reading).any():
        raise FaultError("a copy of part of its bytes")
    _aligned_vector(addresses[reading], size)
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
