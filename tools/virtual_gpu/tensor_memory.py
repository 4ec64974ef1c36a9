"""Blackwell's tensor memory: 128 lanes of 512 columns of 32 bits, and what multiplies into it.

Matrix instructions run until an mbarrier that tells of them, or of a later one, was waited for.
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
    def __init__(self, programs):
        self.data = np.full((programs, 128, _COLUMNS), 0xFFFFFFFF, np.uint32)
        # the warp that loads or stores, until it waits; then -2 less the number of barriers passed,
        # times 32, and the warp. Registers are there when they are used
        self.loading, self.storing = np.full((2, programs, 128, _COLUMNS), _NEVER, np.int32)
        self.barriers = {}  # phase by program and address
        self.running = {program: [] for program in range(programs)}  # [barrier, places, cells]

    def check(self, program, cells):
        written = np.zeros((128, _COLUMNS), np.bool_)
        for _, _, those in self.running[program]:
            written[those] = True
        if written[cells].any():
            raise FaultError("access to tensor memory that a matrix instruction writes")

    def read(self, cells, program, warp, epoch):
        stored = self.storing[program][cells]
        if (stored == _NEVER).any():
            raise FaultError("read of tensor memory that was never written")
        if _goes_on(stored, warp, epoch):
            raise FaultError("read of tensor memory that is still stored to")
        return self.data[program][cells]

    def check_write(self, cells, program, warp, epoch):
        if _goes_on(self.loading[program][cells], warp, epoch):
            raise FaultError("write to tensor memory that is still loaded from")


def _goes_on(last, warp, epoch):
    """Whether an access was not waited for, or by another warp since the last barrier."""
    recent = (-2 - last) // 32 == epoch
    return ((last >= 0) | (recent & ((-2 - last) % 32 != warp))).any()


def _warps(machine):
    """Whole warps that are here: program, number within it, barriers passed, and threads."""
    for warp in machine.whole_groups().tolist():
        program, number = divmod(warp, machine.program.threads // 32)
        yield program, number, machine.shared.epoch(program), slice(32 * warp, 32 * warp + 32)


def _accesses(machine, instruction, address, count, apart=0):
    """Of each warp its number, its threads, and the lanes [32, 1] and columns [32, count] of its access."""
    found = re.search(r"sync\.aligned\.(32x32b|16x32bx2)\.x(\d+)\.b32$", instruction.op)
    if found is None or int(found[2]) != count:
        raise FaultError("unknown access to tensor memory")
    for program, number, epoch, threads in _warps(machine):
        given = machine.addresses(address, "b32")[threads]
        if (given != given[0]).any():
            raise FaultError("a warp's threads give several addresses of tensor memory")
        lane, column, thread = int(given[0]) >> 16, int(given[0]) & 0xFFFF, np.arange(32)[:, None]
        columns = column + np.arange(count) + 0 * thread
        if found[1] == "16x32bx2":
            columns, thread = columns + apart * (thread // 16), thread % 16
        cells = lane + thread, columns
        if (cells[0] // 32 != number % 4).any() or (columns >= _COLUMNS).any():
            raise FaultError("tensor memory that the warp cannot reach")
        machine.tensor_memory.check(program, cells)
        yield (program, number, epoch), threads, cells


def load(machine, instruction):
    registers, address, *apart = instruction.operands
    loaded = np.zeros((machine.num_threads, len(registers)), np.uint32)
    for place, threads, cells in _accesses(machine, instruction, address, len(registers), *apart):
        loaded[threads] = machine.tensor_memory.read(cells, *place)
        machine.tensor_memory.loading[place[0]][cells] = place[1]
    for i, register in enumerate(registers):
        machine.write(register, np.ascontiguousarray(loaded[:, i]))


def store(machine, instruction):
    address, *apart, registers = instruction.operands
    values = np.stack([machine.read(register, "b32") for register in registers], 1)
    memory = machine.tensor_memory
    for place, threads, cells in _accesses(machine, instruction, address, len(registers), *apart):
        memory.check_write(cells, *place)
        memory.data[place[0]][cells] = values[threads]
        memory.storing[place[0]][cells] = place[1]


def wait(machine, instruction):
    memory, of_loads = machine.tensor_memory, instruction.parts[1] == "wait::ld"
    for program, number, epoch, _ in _warps(machine):
        accessed = (memory.loading if of_loads else memory.storing)[program]
        accessed[accessed == number] = -2 - (32 * epoch + number)


def allocate(machine, instruction):
    """`tcgen05.alloc`: from column 0 on, whose address goes to shared memory."""
    for *_, threads in _warps(machine):
        first = machine.threads[threads][:1]
        address = machine.addresses(instruction.operands[0], "b32")[first]
        machine.shared.store(first, machine.shared.places(first, address, 4), np.zeros((1, 4), np.uint8))


def multiply(machine, instruction):
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
    program, within = divmod(thread, machine.program.threads)
    memory, place = machine.tensor_memory, (program, within // 32, machine.shared.epoch(program))
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
    memory.data[program][cells] = product.astype(np.float32).view(np.uint32)
    memory.storing[program][cells] = -2  # known to all who waited: nobody else gets here
    memory.running[program].append([None, places, cells])


def _in_shared(machine, thread, descriptor, rows, across, kind):
    bits = int(machine.read(descriptor, "b64")[thread])
    if bits >> 46 & 7 != 1 or bits >> 61 not in _WIDTHS:
        raise FaultError("unknown descriptor")
    return matrices.matrix_in_shared(machine, thread, bits, _WIDTHS[bits >> 61], rows, across == 1, kind)


def _cells_of(machine, thread, address, rows, columns):
    at = int(machine.addresses(address, "b32")[thread])
    row = np.arange(rows)[:, None]
    lanes = (at >> 16) + (row if rows == 128 else row // 16 * 32 + row % 16)
    return lanes, (at & 0xFFFF) + np.arange(columns) + 0 * row


def _used(machine, threads, addresses):
    """Program and address of the first mbarrier, which all of these threads read."""
    machine.shared.load(threads, machine.shared.places(threads, addresses, 8))
    return int(threads[0]) // machine.program.threads, int(addresses[0])


def start_barrier(machine, instruction):
    """`mbarrier.init`, of barriers that one arrival completes; `mbarrier.inval`."""
    address, *count = instruction.operands
    memory, addresses = machine.tensor_memory, machine.addresses(address, "b32")
    for thread in machine.active().tolist():
        here, key = np.array([thread]), (thread // machine.program.threads, int(addresses[thread]))
        places = machine.shared.places(here, addresses[here], 8)
        machine.shared.store(here, places, ~machine.shared.data[places])  # nobody else may be reading
        if count and count != [1]:
            raise FaultError("an mbarrier of several arrivals")
        if any(at == key[1] for at, _, _ in memory.running[key[0]]):
            raise FaultError("an mbarrier's end while a matrix instruction will arrive there")
        if count:
            memory.barriers[key] = 0
        elif memory.barriers.pop(key, None) is None:
            raise FaultError("no such mbarrier")


def commit(machine, instruction):
    addresses = machine.addresses(instruction.operands[0], "b32")
    for thread in np.split(machine.active(), len(machine.active())):
        program, address = key = _used(machine, thread, addresses[thread])
        machine.tensor_memory.barriers[key] ^= 1
        for one in machine.tensor_memory.running[program]:
            one[0] = address if one[0] is None else one[0]


def wait_for_barrier(machine, instruction):
    """`mbarrier.try_wait.parity`: whether the phase of this parity has completed."""
    complete, address, parity = instruction.operands
    memory, active = machine.tensor_memory, machine.active()
    addresses, parity = machine.addresses(address, "b32"), machine.read(parity, "b32") % 2
    programs = active // machine.program.threads
    for threads in np.split(active, np.flatnonzero(np.diff(programs)) + 1):
        if len({*zip(addresses[threads].tolist(), parity[threads].tolist(), strict=True)}) > 1:
            raise FaultError("a program's threads wait for several mbarriers")
        program, at = key = _used(machine, threads, addresses[threads])
        if key not in memory.barriers:
            raise FaultError("no such mbarrier")
        if memory.barriers[key] == parity[threads[0]]:
            raise FaultError("a wait for an mbarrier that nothing completes")
        running = memory.running[program]
        ended = max((i for i, one in enumerate(running) if one[0] == at), default=-1)
        memory.running[program] = running = running[ended + 1 :]
        machine.shared.matrix_units_done(threads[:1])
        for _, places, _ in running:  # and nothing else
            machine.shared.keep_reading(places)
    machine.write(complete, np.ones(machine.num_threads, np.bool_))


HANDLERS = {
    "tcgen05.ld": load, "tcgen05.st": store, "tcgen05.mma": multiply, "tcgen05.alloc": allocate,
    "tcgen05.wait::ld": wait, "tcgen05.wait::st": wait, "tcgen05.commit": commit,
    "mbarrier.init": start_barrier, "mbarrier.inval": start_barrier,
    "mbarrier.try_wait.parity": wait_for_barrier,
}  # fmt: skip
