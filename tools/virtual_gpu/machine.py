"""All threads of all programs of one launch, as numpy arrays; those with the lowest program counter first."""

import numpy as np

from virtual_gpu import arithmetic, matrices, memory_access, tensor_memory
from virtual_gpu.arithmetic import TYPES
from virtual_gpu.program import FaultError
from virtual_gpu.shared_memory import SharedMemory
from virtual_gpu.tensor_memory import TensorMemory

STORED = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}  # registers by their bits
_HANDLERS = memory_access.HANDLERS | matrices.HANDLERS | tensor_memory.HANDLERS
# launches follow one another, and memory of no one needs no end; the order is checked on assembly
_NOTHING = (
    "griddepcontrol", "wgmma.fence", "wgmma.commit_group", "tcgen05.dealloc",
    "tcgen05.relinquish_alloc_permit",
)  # fmt: skip
_MOST_STEPS = 200_000
_POISON = {np.bool_: np.bool_(True)} | {t: t(-1 % 2**n) for n, t in STORED.items() if n > 1}


class Machine:
    def __init__(self, program, grid, param_bytes, global_memory, shared_size):
        count = int(np.prod(grid))
        self.program, self.params, self.memory = program, param_bytes, global_memory
        self.num_threads = count * program.threads
        self.threads = np.arange(self.num_threads)
        self.lanes = self.threads % 32
        self.shared = SharedMemory(count, shared_size, program.threads)
        self.tensor_memory = TensorMemory(count)
        self.arriving = {}  # what was not waited for, and where, by register
        self.registers = dict(self._special(grid, count))
        self.mask = np.ones(self.num_threads, np.bool_)
        self.full = True
        self._waiting, self._parked, self._constants = {0: self.mask}, [], {}  # parked at a barrier
        if not program.steps:
            program.steps = [step_of(instruction) for instruction in program.instructions]

    def run(self):
        steps = 0
        with np.errstate(all="ignore"):
            while self._waiting:
                at = min(self._waiting)
                mask = self._waiting.pop(at)
                while mask is not None:
                    instruction = self.program.instructions[at]
                    try:
                        mask = self._execute(at, instruction, mask)
                    except FaultError as error:
                        raise FaultError(f"{error}: {instruction.text[:150]}") from None
                    at, steps = at + 1, steps + 1
                    if at in self._waiting and mask is not None:
                        mask = mask | self._waiting.pop(at)
                if steps > _MOST_STEPS:
                    raise FaultError("it does not end")
        if self._parked:
            raise FaultError("a barrier that not all threads of a program reach")

    def _execute(self, at, instruction, mask):
        active = mask
        if instruction.guard is not None:
            name, wanted = instruction.guard
            active = mask & (self.registers[name] == wanted)
        base = instruction.parts[0]
        if base in ("bra", "ret", "bar", "barrier") and instruction.op != "bar.warp.sync":
            if base == "bra":
                self._queue(instruction.operands[0], active)
            self._queue(at + 1, mask & ~active)
            if base in ("bar", "barrier"):
                if instruction.op not in ("bar.sync", "barrier.sync") or instruction.operands != (0,):
                    raise FaultError("unknown barrier")
                self._parked.append((at + 1, active))
                self._release()
            return None
        if instruction.guard is None or active.any():
            self.mask, self.full = active, bool(active.all())
            self.program.steps[at](self)
        return mask

    def _release(self):
        """Let programs go on of which all threads have come to a barrier, any of its own."""
        arrived = np.logical_or.reduce([mask for _, mask in self._parked])
        met = arrived.reshape(-1, self.program.threads).all(1)
        self.shared.barrier(np.flatnonzero(met))
        released, parked = np.repeat(met, self.program.threads), self._parked
        self._parked = [(at, mask & ~released) for at, mask in parked if (mask & ~released).any()]
        for at, mask in parked:
            self._queue(at, mask & released)

    def _queue(self, at, mask):
        if mask.any():
            self._waiting[at] = self._waiting.get(at, False) | mask

    def _special(self, grid, count):
        programs = np.repeat(np.arange(count, dtype=np.uint32), self.program.threads)
        yield "%tid.x", (self.threads % self.program.threads).astype(np.uint32)
        yield "%tid.y", np.zeros(self.num_threads, np.uint32)
        for axis, size in zip("xyz", grid, strict=True):
            yield f"%ctaid.{axis}", programs % np.uint32(size)
            yield f"%nctaid.{axis}", np.full(self.num_threads, size, np.uint32)
            programs = programs // np.uint32(size)

    def read(self, operand, kind):
        if isinstance(operand, int):
            if (operand, kind) not in self._constants:
                self._constants[operand, kind] = self._constant(operand, kind)
            return self._constants[operand, kind]
        size, value = np.dtype(TYPES[kind]).itemsize, self.registers.get(operand)
        if value is None:  # compilers fill up pairs with what was never written: poison
            return self.read(-1, kind)
        if value.itemsize > size:  # memory takes the lowest bits
            value = value.astype(f"u{size}")
        if value.itemsize < size:
            raise FaultError(f"{operand} is too small for {kind}")
        return value.view(TYPES[kind])

    def _constant(self, operand, kind):
        if kind == "pred":
            return np.full(self.num_threads, operand != 0)
        size = np.dtype(TYPES[kind]).itemsize
        return np.full(self.num_threads, operand & (256**size - 1), f"u{size}").view(TYPES[kind])

    def write(self, register, value):
        """Put a value where threads are active: its bits, wider where the register is."""
        stored = STORED[self.program.widths[register]]
        if value.dtype != stored and np.bool_ not in (value.dtype, stored):
            same_size = value.itemsize == np.dtype(stored).itemsize
            value = np.ascontiguousarray(value).view(stored) if same_size else value
        value = value.astype(stored, copy=False)
        if not self.full:
            value = np.where(self.mask, value, self.registers.get(register, _POISON[stored]))
        self.registers[register] = value

    def write_some(self, register, threads, values):
        value = np.zeros(self.num_threads, values.dtype)
        value[threads] = values
        self.write(register, value)

    def defer(self, register, value):
        before, pending = self.arriving.get(register, (value, np.zeros_like(self.mask)))
        self.arriving[register] = np.where(self.mask, value, before), pending | self.mask
        self.write(register, self.read(-1, "b32"))

    def deliver(self):
        waiting, full = self.mask, self.full
        for register, (value, pending) in list(self.arriving.items()):
            self.mask = waiting & pending
            self.full = bool(self.mask.all())
            self.write(register, value)
            self.arriving[register] = value, pending & ~waiting
        self.mask, self.full = waiting, full

    def active(self):
        return self.threads if self.full else np.flatnonzero(self.mask)

    def addresses(self, address, kind):
        """What an address comes to in every thread; shared memory's have 32 bits."""
        if address.base is None:
            return np.full(self.num_threads, address.offset, TYPES[kind])
        return self.read(address.base, kind) + np.array(address.offset).astype(TYPES[kind])

    def whole_groups(self, size=32):
        """Numbers of the warps, or groups of `size`, that are here, each as a whole."""
        here = self.mask.reshape(-1, size)
        if (here.any(1) != here.all(1)).any():
            raise FaultError("an instruction of whole warps that not all threads reach")
        return np.flatnonzero(here[:, 0])


def step_of(instruction):
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
