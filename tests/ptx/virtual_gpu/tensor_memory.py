"""Blackwell's tensor memory: 128 lanes of 512 columns of 32 bits, and what multiplies into it.

A warp reaches the 32 lanes of its number modulo 4. Matrix instructions run until their mbarrier was
waited for: until then nobody may touch their result, nor write what they read. Products as in
`matrices.py`.
"""

import re

import numpy as np

from virtual_gpu import matrices
from virtual_gpu.program import FaultError

_COLUMNS, _NEVER = 512, -1
_WIDTHS = {0: 16, 2: 128, 4: 64, 6: 32}  # bytes of a row, by a descriptor's last three bits
# of an instruction's descriptor: types, transposition, and size
_KNOWN_BITS = 0x3 << 4 | 0x3F << 7 | 0x3 << 15 | 0x3F << 17 | 0x1F << 24
_KINDS = {("f16", 0): "f16", ("f8f6f4", 0): "e4m3", ("f8f6f4", 1): "e5m2"}


class TensorMemory:
    """The memory of all programs, their mbarriers, and matrix instructions that still run."""

    def __init__(self, programs: int):
        self.data = np.full((programs, 128, _COLUMNS), 0xFFFFFFFF, np.uint32)
        # the warp that loads or stores, until it waits; then -2 less the number of barriers passed,
        # times 32, and the warp. Registers are there when they are used
        self.loading, self.storing = np.full((2, programs, 128, _COLUMNS), _NEVER, np.int32)
        self.barriers = {}  # phase by program and address
        self.running = {program: [] for program in range(programs)}  # [barrier, places, cells]

    def check(self, program, lanes, columns):
        """Nothing that runs writes these cells."""
        written = np.zeros((128, _COLUMNS), np.bool_)
        for _, _, cells in self.running[program]:
            written[cells] = True
        if written[lanes, columns].any():
            raise FaultError("access to tensor memory that a matrix instruction writes")

    def read(self, cells, program, warp, epoch):
        """Cells that were written, and whose stores this warp knows to have ended."""
        stored = self.storing[program][cells]
        if (stored == _NEVER).any():
            raise FaultError("read of tensor memory that was never written")
        if _goes_on(stored, warp, epoch):
            raise FaultError("read of tensor memory that is still stored to")
        return self.data[program][cells]

    def check_write(self, cells, program, warp, epoch):
        """Loads from these cells have ended, as this warp knows."""
        if _goes_on(self.loading[program][cells], warp, epoch):
            raise FaultError("write to tensor memory that is still loaded from")


def _goes_on(last, warp, epoch):
    """Whether an access was not waited for, or by another warp since the last barrier."""
    recent = (-2 - last) // 32 == epoch
    return ((last >= 0) | (recent & ((-2 - last) % 32 != warp))).any()


def _warps(machine):
    """Whole warps that are here: program, number within it, and threads."""
    per_program = machine.program.threads // 32
    for warp in machine.whole_groups().tolist():
        yield warp // per_program, warp % per_program, slice(32 * warp, 32 * warp + 32)


def _cells(machine, address, number, threads, shape, count, apart):
    """Lanes [32, 1] and columns [32, count] of a warp's load or store."""
    given = machine.addresses(address, "b32")[threads]
    if (given != given[0]).any():
        raise FaultError("a warp's threads give several addresses of tensor memory")
    lane, column = int(given[0]) >> 16, int(given[0]) & 0xFFFF
    thread = np.arange(32)[:, None]
    if shape == "16x32bx2":
        lanes, columns = lane + thread % 16, column + apart * (thread // 16) + np.arange(count)
    else:
        lanes, columns = lane + thread, column + np.arange(count) + 0 * thread
    if (lanes // 32 != number % 4).any() or (columns >= _COLUMNS).any():
        raise FaultError("tensor memory that the warp cannot reach")
    return lanes, columns


def _form(instruction):
    found = re.search(r"sync\.aligned\.(32x32b|16x32bx2)\.x(\d+)\.b32$", instruction.op)
    if found is None:
        raise FaultError("unknown access to tensor memory")
    return found[1], int(found[2])


def load(machine, instruction):
    """`tcgen05.ld`."""
    registers, address, *apart = instruction.operands
    shape, count = _form(instruction)
    loaded = np.zeros((machine.num_threads, count), np.uint32)
    memory = machine.tensor_memory
    for program, number, threads in _warps(machine):
        lanes, columns = _cells(machine, address, number, threads, shape, count, *(apart or [0]))
        memory.check(program, lanes, columns)
        place = program, number, machine.shared.epoch(program)
        loaded[threads] = memory.read((lanes, columns), *place)
        memory.loading[program, lanes, columns] = number
    for i, register in enumerate(registers):
        machine.write(register, np.ascontiguousarray(loaded[:, i]))


def store(machine, instruction):
    """`tcgen05.st`."""
    address, *apart, registers = instruction.operands
    shape, count = _form(instruction)
    values = np.stack([machine.read(register, "b32") for register in registers], 1)
    memory = machine.tensor_memory
    for program, number, threads in _warps(machine):
        lanes, columns = _cells(machine, address, number, threads, shape, count, *(apart or [0]))
        memory.check(program, lanes, columns)
        memory.check_write((lanes, columns), program, number, machine.shared.epoch(program))
        memory.data[program, lanes, columns] = values[threads]
        memory.storing[program, lanes, columns] = number


def wait(machine, instruction):
    """`tcgen05.wait::ld` and `wait::st`."""
    memory, of_loads = machine.tensor_memory, instruction.parts[1] == "wait::ld"
    for program, number, _ in _warps(machine):
        accessed = (memory.loading if of_loads else memory.storing)[program]
        accessed[accessed == number] = -2 - (32 * machine.shared.epoch(program) + number)


def allocate(machine, instruction):
    """`tcgen05.alloc`: from column 0 on, whose address goes to shared memory."""
    for _, _, threads in _warps(machine):
        first = machine.threads[threads][:1]
        address = machine.addresses(instruction.operands[0], "b32")[first]
        places = machine.shared.places(first, address, 4)
        machine.shared.store(first, places, np.zeros((1, 4), np.uint8))


def multiply(machine, instruction):
    """`tcgen05.mma` of one thread for its program."""
    kind = re.fullmatch(r"tcgen05\.mma\.cta_group::1\.kind::(f16|f8f6f4)", instruction.op)
    if kind is None:
        raise FaultError("unknown matrix instruction")
    *operands, form, accumulates = instruction.operands
    forms, adds = machine.read(form, "b32"), machine.read(accumulates, "pred")
    for thread in machine.active().tolist():
        form = int(forms[thread])
        kinds = [_KINDS.get((kind[1], form >> at & 7)) for at in (7, 10)]
        if None in kinds or form & ~_KNOWN_BITS or form >> 4 & 3 != 1:
            raise FaultError("unknown form of matrices")
        _multiply(machine, thread, operands, form, kinds, adds[thread])


def _multiply(machine, thread, operands, form, kinds, adds):
    to, left, right = operands
    m, n = (form >> 24 & 31) * 16, (form >> 17 & 63) * 8
    memory, place = machine.tensor_memory, _place(machine, thread)
    b, places = _in_shared(machine, thread, right, n, form >> 16 & 1, kinds[1])
    if isinstance(left, str):
        a, more = _in_shared(machine, thread, left, m, form >> 15 & 1, kinds[0])
        places = np.concatenate([places, more])
    else:
        bits = memory.read(_cells_of(machine, thread, left, m, 8), *place)
        a = matrices.unpacked(bits, kinds[0]).reshape(m, -1)
    cells = _cells_of(machine, thread, to, m, n)
    memory.check_write(cells, *place)
    product = a @ b.T
    if adds:
        product += memory.read(cells, *place).view(np.float32)
    memory.data[place[0]][cells] = product.astype(np.float32).view(np.uint32)
    memory.storing[place[0]][cells] = -2  # known to all who waited: nobody else gets here
    memory.running[place[0]].append([None, places, cells])


def _in_shared(machine, thread, descriptor, rows, across, kind):
    """A matrix [rows, k] and the places it was read from."""
    bits = int(machine.read(descriptor, "b64")[thread])
    if bits >> 46 & 7 != 1 or bits >> 61 not in _WIDTHS:
        raise FaultError("unknown descriptor")
    addresses = matrices.descriptor_places(bits, _WIDTHS[bits >> 61], rows, 32, across == 1)
    return matrices.matrix_in_shared(machine, thread, addresses, kind)


def _cells_of(machine, thread, address, rows, columns):
    """Lanes [rows, 1] and columns [rows, columns]; of 64 rows each warp has 16."""
    at = int(machine.addresses(address, "b32")[thread])
    row = np.arange(rows)[:, None]
    lanes = (at >> 16) + (row if rows == 128 else row // 16 * 32 + row % 16)
    return lanes, (at & 0xFFFF) + np.arange(columns) + 0 * row


def _place(machine, thread):
    """Program, warp, and how many barriers the program has passed."""
    program, within = divmod(thread, machine.program.threads)
    return program, within // 32, machine.shared.epoch(program)


HANDLERS = {
    "tcgen05.ld": load, "tcgen05.st": store, "tcgen05.mma": multiply,
    "tcgen05.wait::ld": wait, "tcgen05.wait::st": wait,
    "tcgen05.alloc": allocate,
}  # fmt: skip
