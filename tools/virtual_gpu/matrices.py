"""Instructions of whole warps: exchanges, and matrices, multiplied in float64 and rounded once to float32."""

import re

import numpy as np

from virtual_gpu.arithmetic import decode_fp8
from virtual_gpu.program import FaultError

_WIDTHS = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row, by a descriptor's last two bits


def unpacked(bits, kind):
    """Packed registers [..., n] uint32 as float64 [..., n, values]."""
    bits = np.ascontiguousarray(bits)
    values = bits.view(np.float16) if kind == "f16" else decode_fp8(bits.view(np.uint8), f"{kind}x2")
    return values.astype(np.float64).reshape(*bits.shape, -1)


def _gather(machine, registers, warps):
    return np.stack([machine.read(r, "b32").reshape(-1, 32)[warps] for r in registers], 2)


# of a fragment's lanes 8 have rows (columns, of B) and 4 divide the others


def _matrix_a(values):
    """[warps, 32, 4, e] as [warps, 16, 8 e]."""
    e = values.shape[3]
    return values.reshape(-1, 8, 4, 2, 2, e).transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 8 * e)


def _matrix_c(bits):
    """[warps, 32, n / 2] as [warps, 16, n], float32."""
    values = np.ascontiguousarray(bits).view(np.float32).reshape(len(bits), 8, 4, -1, 2, 2)
    return values.transpose(0, 4, 1, 3, 2, 5).reshape(len(bits), 16, -1)


def _write_c(write, machine, registers, warps, product):
    parts = product.astype(np.float32).reshape(len(warps), 2, 8, -1, 4, 2).transpose(0, 2, 4, 3, 1, 5)
    fragments = parts.reshape(len(warps), 32, -1)
    for i, register in enumerate(registers):
        value = np.zeros((machine.num_threads // 32, 32), np.float32)
        value[warps] = fragments[:, :, i]
        write(register, value.reshape(-1).view(np.uint32))


def multiply(machine, instruction):
    form = re.fullmatch(r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.f32\.(\w+)\.(\w+)\.f32", instruction.op)
    if form is None or (form[1], form[2]) not in (("16", "f16"), ("32", "e4m3"), ("32", "e5m2")):
        raise FaultError("unknown matrix instruction")
    to, a, b, c = instruction.operands
    warps = machine.whole_groups()
    a = _matrix_a(unpacked(_gather(machine, a, warps), form[2]))
    b = unpacked(_gather(machine, b, warps), form[3])  # [warps, 32, 2, e]
    b = b.reshape(len(warps), 8, 4, 2, -1).transpose(0, 3, 2, 4, 1).reshape(len(warps), -1, 8)
    _write_c(machine.write, machine, to, warps, a @ b + _matrix_c(_gather(machine, c, warps)))


def matrix_in_shared(machine, thread, descriptor, width, rows, across, kind):
    """A matrix [rows, k] float64 in shared memory, 32 bytes a row, rows along n (or m), and its places.

    K lies along a row, in pieces of `width` bytes; or, with `across`, the rows do, of 16 bits.
    """
    start, leading, stride = (((descriptor >> at) & 0x3FFF) << 4 for at in (0, 16, 32))
    if (descriptor >> 49) & 7:
        raise FaultError("a descriptor with a base offset")
    row, byte = np.arange(rows)[:, None], np.arange(32)[None]
    if across:
        k, inside = byte // 2, (2 * row) % width + byte % 2
        place = start + 2 * row // width * leading + k // 8 * stride + k % 8 * width + inside
    elif width == 16:
        place = start + byte // 16 * leading + row // 8 * stride + row % 8 * 16 + byte % 16
    else:
        place = start + row // 8 * stride + row % 8 * width + byte
    place = place ^ (((place >> 7) & (width // 16 - 1)) << 4)
    threads = np.full(place.size, thread)
    places = machine.shared.places(threads, place.reshape(-1), 1)
    data = machine.shared.read_by_matrix_unit(threads, places).reshape(place.shape)
    return unpacked(data.view(np.uint32), kind).reshape(rows, -1), places


def multiply_group(machine, instruction):
    """`wgmma.mma_async`, the left matrix in registers, the right one in shared memory."""
    form = re.fullmatch(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(16|32)\.f32\.(\w+)\.(\w+)", instruction.op
    )
    to, a, descriptor, accumulates, *signs = instruction.operands
    if form is None or not isinstance(a, tuple) or signs[:2] != [1, 1] or any(signs[3:]):
        raise FaultError("unknown matrix instruction")
    groups = machine.whole_groups(128)
    warps = (4 * groups[:, None] + np.arange(4)).reshape(-1)
    a = _matrix_a(unpacked(_gather(machine, a, warps), form[3]))
    descriptors, b = machine.read(descriptor, "b64"), []
    for first in (128 * groups).tolist():
        bits = int(descriptors[first])
        width, across = _WIDTHS[bits >> 62], signs[2:3] == [1]
        b.append(matrix_in_shared(machine, first, bits, width, int(form[1]), across, form[4])[0])
    product = a @ np.repeat(np.stack(b), 4, 0).transpose(0, 2, 1)
    adds = machine.read(accumulates, "pred").reshape(-1, 32)[warps, 0]
    product = np.where(adds[:, None, None], product + _accumulators(machine, to, warps), product)
    # sums of FP8 products are read before the wait: the assembler then waits for each (C7518)
    write = machine.defer if form[3] == "f16" else machine.write
    _write_c(write, machine, to, warps, product)


def _accumulators(machine, registers, warps):
    """What was added up so far, [warps, 16, n]: it need not have been waited for."""
    values = []
    for register in registers:
        value = machine.read(register, "b32")
        arriving, where = machine.arriving.get(register, (value, False))
        values.append(np.where(where, arriving, value).reshape(-1, 32)[warps])
    return _matrix_c(np.stack(values, 2))


def wait_for_groups(machine, instruction):
    """`wgmma.wait_group 0`: results arrive, and what was read may be written again."""
    if instruction.operands[0] != 0:
        raise FaultError("a wait for some matrix instructions")
    machine.deliver()
    machine.shared.matrix_units_done(machine.active(), known_to_all=False)


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
    address, registers = instruction.operands
    warps, count, threads, places = _matrices(machine, instruction, address)
    pairs = np.stack([machine.read(each, "b32").reshape(-1, 32)[warps] for each in registers], 1)
    rows = _turned(instruction, pairs.view(np.uint16).reshape(len(warps), count, 8, 8))
    machine.shared.store(threads, places, rows.view(np.uint8).reshape(len(threads), 16))


HANDLERS = {"mma": multiply, "wgmma.mma_async": multiply_group, "wgmma.wait_group": wait_for_groups}
HANDLERS |= {
    "shfl.sync": shuffle, "redux.sync": reduce, "elect.sync": elect, "ldmatrix": load_matrix,
    "stmatrix": store_matrix, "bar.warp.sync": meet,
}  # fmt: skip
