"""Barriers in shared memory, by which a program learns that matrix instructions have ended.

Those of Blackwell end one after the other: a barrier that tells of one tells of all before it.
"""

import numpy as np

from virtual_gpu.program import FaultError


def _used(machine, threads, addresses):
    """Program and address of the first, which all of these threads read."""
    machine.shared.load(threads, machine.shared.places(threads, addresses, 8))
    return int(threads[0]) // machine.program.threads, int(addresses[0])


def _written(machine, thread, address):
    """Program and address, where nobody else may be reading."""
    thread, address = np.array([thread]), np.array([address])
    places = machine.shared.places(thread, address, 8)
    machine.shared.store(thread, places, ~machine.shared.data[places])
    return int(thread[0]) // machine.program.threads, int(address[0])


def start_barrier(machine, instruction):
    """`mbarrier.init`, of barriers that one arrival completes; `mbarrier.inval`."""
    address, *count = instruction.operands
    for thread in machine.active().tolist():
        key = _written(machine, thread, machine.addresses(address, "b32")[thread])
        if count and count != [1]:
            raise FaultError("an mbarrier of several arrivals")
        if any(at == key[1] for at, _, _ in machine.tensor_memory.running[key[0]]):
            raise FaultError("an mbarrier's end while a matrix instruction will arrive there")
        if count:
            machine.tensor_memory.barriers[key] = 0
        elif machine.tensor_memory.barriers.pop(key, None) is None:
            raise FaultError("no such mbarrier")


def commit(machine, instruction):
    """`tcgen05.commit`: the barrier completes when all that runs has ended."""
    memory = machine.tensor_memory
    for thread in machine.active().tolist():
        address = machine.addresses(instruction.operands[0], "b32")[thread]
        program, address = key = _used(machine, np.array([thread]), np.array([address]))
        memory.barriers[key] ^= 1
        for one in memory.running[program]:
            one[0] = address if one[0] is None else one[0]


def wait_for_barrier(machine, instruction):
    """`mbarrier.try_wait.parity`: whether the phase of this parity has completed."""
    complete, address, parity = instruction.operands
    memory, done = machine.tensor_memory, np.zeros(machine.num_threads, np.bool_)
    addresses, parity = machine.addresses(address, "b32"), machine.read(parity, "b32") % 2
    for threads in _by_program(machine):
        same = addresses[threads] == addresses[threads[0]], parity[threads] == parity[threads[0]]
        if not np.all(same):
            raise FaultError("a program's threads wait for several mbarriers")
        program, at = key = _used(machine, threads, addresses[threads])
        if key not in memory.barriers:
            raise FaultError("no such mbarrier")
        if memory.barriers[key] == parity[threads[0]]:
            raise FaultError("a wait for an mbarrier that nothing completes")
        done[threads] = True
        running = memory.running[program]
        ended = max((i for i, one in enumerate(running) if one[0] == at), default=-1)
        memory.running[program] = running = running[ended + 1 :]
        machine.shared.matrix_units_done(threads[:1])
        for _, places, _ in running:  # and nothing else
            machine.shared.keep_reading(places)
    machine.write(complete, done)


def _by_program(machine):
    """Numbers of the active threads, program by program."""
    active = machine.active()
    programs = active // machine.program.threads
    return np.split(active, np.flatnonzero(np.diff(programs)) + 1)


HANDLERS = {
    "mbarrier.init": start_barrier, "mbarrier.inval": start_barrier,
    "mbarrier.try_wait.parity": wait_for_barrier, "tcgen05.commit": commit,
}  # fmt: skip
