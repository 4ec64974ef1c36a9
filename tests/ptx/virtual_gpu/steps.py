"""What each instruction does to a machine."""

import numpy as np

from virtual_gpu import arithmetic, matrices, memory_access, tensor_memory, warps
from virtual_gpu.arithmetic import TYPES
from virtual_gpu.program import FaultError

STORED = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}  # registers by their bits
_HANDLERS = memory_access.HANDLERS | warps.HANDLERS | matrices.HANDLERS | tensor_memory.HANDLERS
# launches follow one another, and memory of no one needs no end; the order is checked on assembly
_NOTHING = (
    "griddepcontrol", "wgmma.fence", "wgmma.commit_group", "tcgen05.dealloc",
    "tcgen05.relinquish_alloc_permit",
)  # fmt: skip


def step_of(instruction):
    """The function that executes an instruction on a machine."""
    for length in range(len(instruction.parts), 0, -1):
        handler = _HANDLERS.get(".".join(instruction.parts[:length]))
        if handler is not None:
            return lambda machine: handler(machine, instruction)
    if instruction.parts[0] in ("bra", "ret", "bar", "barrier"):
        return None
    if instruction.op.startswith(_NOTHING):
        return lambda machine: None
    if instruction.parts[0] == "mov" and any(isinstance(o, tuple) for o in instruction.operands):
        return lambda machine: _unpack_or_pack(machine, *instruction.operands)
    if instruction.parts[0] == "setp" and instruction.parts[-1] in ("f16x2", "bf16x2"):
        return _compare_halves(instruction)
    kinds, result, function = arithmetic.find(instruction.parts)
    to, *operands = instruction.operands
    if isinstance(function, np.ufunc) and len(operands) != function.nin:
        raise FaultError(f"{len(operands)} operands for {instruction.op}")

    def step(machine):
        value = function(*map(machine.read, operands, kinds))
        dtype = np.dtype(TYPES[result])  # of which numpy may have made a wider one
        machine.write(to, value if value.itemsize == dtype.itemsize else value.astype(dtype))

    return step


def _compare_halves(instruction):
    """`setp` of the lower halves, and of the upper."""
    *parts, kind = instruction.parts
    (half, *_), _, function = arithmetic.find([*parts, kind.removesuffix("x2")])
    lower, upper, *operands = instruction.operands

    def step(machine):
        is_true = function(*(machine.read(operand, "b32").view(TYPES[half]) for operand in operands))
        machine.write(lower, is_true[::2])
        machine.write(upper, is_true[1::2])

    return step


def _unpack_or_pack(machine, to, source):
    """`mov` between a register and the parts of a vector, the lowest first."""
    if isinstance(to, tuple):
        bits = next(machine.program.widths[part] for part in to if part != "_")
        value = machine.read(source, f"b{bits * len(to)}")
        for i, register in enumerate(to):
            if register != "_":
                machine.write(register, (value >> value.dtype.type(bits * i)).astype(STORED[bits]))
        return
    bits = machine.program.widths[to] // len(source)
    parts = [machine.read(part, f"b{bits}") for part in source]
    machine.write(to, np.stack(parts, 1).view(STORED[bits * len(source)])[:, 0])
