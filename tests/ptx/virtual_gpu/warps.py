"""Instructions of whole warps: shuffles, sums, and 8 x 8 matrices of 16 bits in shared memory."""

import numpy as np

from virtual_gpu.program import FaultError

_REDUCE = {"add": np.add, "max": np.fmax, "min": np.fmin}


def _all_lanes(machine, members):
    if (machine.read(members, "u32") != 0xFFFFFFFF).any():
        raise FaultError("an instruction of part of a warp")
    machine.whole_groups()


def shuffle(machine, instruction):
    """`shfl.sync`: each thread gets what another thread of its warp has."""
    to, source, by, clamp, members = instruction.operands
    _all_lanes(machine, members)
    by, mode = machine.read(by, "u32").astype(np.int64), instruction.parts[2]
    other = {"bfly": machine.lanes ^ by, "idx": by, "up": machine.lanes - by}
    chosen = other[mode]
    if clamp != (0 if mode == "up" else 31):
        raise FaultError("a shuffle of part of a warp")
    chosen = np.where((chosen < 0) | (chosen > 31), machine.lanes, chosen)
    machine.write(to, machine.read(source, "b32")[machine.threads - machine.lanes + chosen])


def reduce(machine, instruction):
    """`redux.sync`."""
    to, source, members = instruction.operands
    _all_lanes(machine, members)
    values = machine.read(source, instruction.parts[-1]).reshape(-1, 32)
    reduced = _REDUCE[instruction.parts[2]].reduce(values, 1, dtype=values.dtype)
    machine.write(to, np.repeat(reduced, 32))


def elect(machine, instruction):
    """`elect.sync`: one thread of each warp, here the first."""
    to, chosen, members = instruction.operands
    _all_lanes(machine, members)
    machine.write(to, np.zeros(machine.num_threads, np.uint32))
    machine.write(chosen, machine.lanes == 0)


def meet(machine, instruction):
    """`bar.warp.sync`: the barrier of a program of one warp; of more, memory stays unordered."""
    _all_lanes(machine, *instruction.operands)
    if machine.program.threads == 32:
        machine.shared.barrier(machine.whole_groups())


def _rows(machine, instruction, address, count):
    """Threads that give the addresses of rows, by matrix, and where those rows lie."""
    warps = machine.whole_groups()
    threads = (warps[:, None] * 32 + np.arange(8 * count)).reshape(-1)
    addresses = machine.addresses(address, "b32")[threads]
    return warps, threads, machine.shared.places(threads, addresses, 16)


def _modifiers(instruction):
    """Number of matrices, and whether each is transposed."""
    known = {"sync", "aligned", "m8n8", "shared", "shared::cta", "trans", "x1", "x2", "x4"}
    if set(instruction.parts[1:-1]) - known or instruction.parts[-1] != "b16":
        raise FaultError("unknown matrix access")
    count = next(int(part[1]) for part in instruction.parts if part in ("x1", "x2", "x4"))
    return count, "trans" in instruction.parts


def load_matrix(machine, instruction):
    """`ldmatrix`: a thread has two neighbours of row lane / 4, or of that column."""
    registers, address = instruction.operands
    count, transposed = _modifiers(instruction)
    warps, threads, places = _rows(machine, instruction, address, count)
    rows = np.ascontiguousarray(machine.shared.load(threads, places)).view(np.uint16)
    matrices = rows.reshape(len(warps), count, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 1, 3, 2)
    pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(len(warps), count, 32)
    for i, register in enumerate(registers):
        loaded = np.zeros((machine.num_threads // 32, 32), np.uint32)
        loaded[warps] = pairs[:, i]
        machine.write(register, loaded.reshape(-1))


def store_matrix(machine, instruction):
    """`stmatrix`: the reverse."""
    address, registers = instruction.operands
    count, transposed = _modifiers(instruction)
    warps, threads, places = _rows(machine, instruction, address, count)
    pairs = [machine.read(each, "b32").reshape(-1, 32)[warps] for each in registers]
    matrices = np.stack(pairs, 1).view(np.uint16).reshape(len(warps), count, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 1, 3, 2)
    rows = np.ascontiguousarray(matrices).view(np.uint8).reshape(len(threads), 16)
    machine.shared.store(threads, places, rows)


HANDLERS = {
    "shfl.sync": shuffle, "redux.sync": reduce, "elect.sync": elect, "ldmatrix": load_matrix,
    "stmatrix": store_matrix, "bar.warp.sync": meet,
}  # fmt: skip
