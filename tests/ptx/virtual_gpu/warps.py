"""Instructions of whole warps: shuffles, sums, and 8 x 8 matrices of 16 bits in shared memory."""

import numpy as np

from virtual_gpu.program import FaultError

_REDUCE = {"add": np.add, "max": np.fmax, "min": np.fmin}


def _all_lanes(machine, members):
    if (machine.read(members, "u32") != 0xFFFFFFFF).any():
        raise FaultError("an instruction of part of a warp")
    return machine.whole_groups()


def shuffle(machine, instruction):
    to, source, by, clamp, members = instruction.operands
    _all_lanes(machine, members)
    by, mode = machine.read(by, "u32").astype(np.int64), instruction.parts[2]
    chosen = {"bfly": machine.lanes ^ by, "idx": by, "up": machine.lanes - by}[mode]
    if clamp != (0 if mode == "up" else 31):
        raise FaultError("a shuffle of part of a warp")
    chosen = np.where((chosen < 0) | (chosen > 31), machine.lanes, chosen)
    machine.write(to, machine.read(source, "b32")[machine.threads - machine.lanes + chosen])


def reduce(machine, instruction):
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
    warps = _all_lanes(machine, *instruction.operands)
    if machine.program.threads == 32:
        machine.shared.barrier(warps)


def _matrices(machine, instruction, address):
    """Warps, number of matrices, threads that give addresses of rows, and where those rows lie."""
    known = {"sync", "aligned", "m8n8", "shared", "shared::cta", "trans", "x1", "x2", "x4"}
    if set(instruction.parts[1:-1]) - known or instruction.parts[-1] != "b16":
        raise FaultError("unknown matrix access")
    count = next(int(part[1]) for part in instruction.parts if part in ("x1", "x2", "x4"))
    warps = machine.whole_groups()
    threads = (warps[:, None] * 32 + np.arange(8 * count)).reshape(-1)
    addresses = machine.addresses(address, "b32")[threads]
    return warps, count, threads, machine.shared.places(threads, addresses, 16)


def _turned(instruction, matrices):
    return np.ascontiguousarray(matrices.swapaxes(2, 3) if "trans" in instruction.parts else matrices)


def load_matrix(machine, instruction):
    """`ldmatrix`: a thread has two neighbours of row lane / 4, or of that column."""
    registers, address = instruction.operands
    warps, count, threads, places = _matrices(machine, instruction, address)
    rows = np.ascontiguousarray(machine.shared.load(threads, places)).view(np.uint16)
    pairs = _turned(instruction, rows.reshape(len(warps), count, 8, 8)).view(np.uint32)
    for register, values in zip(registers, pairs.reshape(len(warps), count, 32).swapaxes(0, 1), strict=True):
        machine.write_some(register, machine.active(), values.reshape(-1))


def store_matrix(machine, instruction):
    """`stmatrix`: the reverse."""
    address, registers = instruction.operands
    warps, count, threads, places = _matrices(machine, instruction, address)
    pairs = np.stack([machine.read(each, "b32").reshape(-1, 32)[warps] for each in registers], 1)
    rows = _turned(instruction, pairs.view(np.uint16).reshape(len(warps), count, 8, 8))
    machine.shared.store(threads, places, rows.view(np.uint8).reshape(len(threads), 16))


HANDLERS = {
    "shfl.sync": shuffle, "redux.sync": reduce, "elect.sync": elect, "ldmatrix": load_matrix,
    "stmatrix": store_matrix, "bar.warp.sync": meet,
}  # fmt: skip
