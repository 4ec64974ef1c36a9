"""Predict the limit of a compiled kernel from its code: memory, latency, issue or matrices.

Counted on the loop that moves most bytes, or on the whole kernel where none does. All of it assumes
that everything overlaps, and that what the code says runs: no speed, but what speed cannot exceed.
"""

import re
from dataclasses import dataclass

from kernels.offline import Compiled
from kernels.processors import Processor

# from a load to its value with the memory busy; Hopper's, unloaded, is about 0.6
LATENCY_US = 0.8
_MANY = 2**31  # programs: more than run at once

_SASS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?(\S+)\s*(.*?) ?;")
_SASS_MOVES = re.compile(r"^(LDG|STG|LDGSTS)\b(.*)$")
_SASS_MATRIX = re.compile(r"^([HQ])(?:MMA\.(16)(8)(16|32)|GMMA\.(\d+)x(\d+)x(\d+))")
# Blackwell's, of a whole program: sizes are bits of a descriptor (PTX ISA, tcgen05.mma)
_SASS_TENSOR = re.compile(r"^UTC([HQ])MMA$")
_SASS_CONSTANT = re.compile(r"(UR\d+), 0x([0-9a-f]+)$")
_SASS_SLOW = re.compile(r"^(F2FP|F2F|F2I|I2F|I2FP|MUFU|SHFL|POPC)\b")  # two cycles or more
_GCN_LINE = re.compile(r"^\s+([sv]_\w+|ds_\w+|(?:global|buffer|flat)_\w+)\b(.*)$")
_GCN_LABEL = re.compile(r"^(\.LBB\w+):")
_GCN_MOVES = re.compile(r"^(?:global|buffer|flat)_(?:load|store)_(dwordx?\d?|\w*byte|\w*short)")
_GCN_MATRIX = re.compile(r"^v_mfma_\w+?_(\d+)x(\d+)x(\d+)")
_GCN_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


@dataclass(frozen=True)
class Instruction:
    """One, as a warp executes it."""

    cycles: int  # of its scheduler
    moved: int = 0  # bytes to or from memory, of one lane
    flops: float = 0  # in float16's rate: FP8 is twice as fast
    jumps_to: int | None = None  # index of the instruction that a branch goes back to


@dataclass(frozen=True)
class Bound:
    """Where a kernel ends on one GPU."""

    programs: int  # at once on a processor
    occupancy: float  # of its warps
    kb_in_flight: float  # on a processor
    kb_needed: float  # to hide LATENCY_US at the memory's bandwidth
    cycles_per_kb: float  # of every scheduler, for a kilobyte moved
    limit: str  # memory, latency, issue or matrix
    of_memory: float  # share of the memory's bandwidth that this limit leaves
    of_matrix: float  # and of the matrix instructions' rate


def predict(compiled: Compiled, processor: Processor, launched: int = _MANY) -> Bound:
    """Upper bound on a kernel's speed, with `launched` programs per processor."""
    loop = hottest_loop(parse(compiled))
    warps = compiled.num_warps
    programs = processor.programs_at_once(compiled.registers, compiled.shared_memory, warps)
    programs = min(programs, launched)
    moved = max(sum(each.moved for each in loop) * processor.lanes, 1)  # bytes of a warp
    flight = programs * warps * moved * tiles_in_flight(compiled.asm) / 1024
    needed = processor.tb_per_s * LATENCY_US * 1e6 / processor.count / 1024
    # cycles of a processor for what a warp's iteration moves, each as if alone
    cycles = {
        "memory": moved / processor.bytes_per_cycle,
        "latency": moved / processor.bytes_per_cycle * needed / max(flight, 1e-9),
        "issue": sum(each.cycles for each in loop) / processor.schedulers,
        "matrix": sum(each.flops for each in loop) / processor.flops_per_cycle,
    }
    limit = max(cycles, key=lambda name: cycles[name])
    return Bound(
        programs=programs,
        occupancy=programs * warps / processor.warps,
        kb_in_flight=flight,
        kb_needed=needed,
        cycles_per_kb=1024 * cycles["issue"] / moved,
        limit=limit,
        of_memory=cycles["memory"] / cycles[limit],
        of_matrix=cycles["matrix"] / cycles[limit],
    )


def parse(compiled: Compiled) -> list[Instruction]:
    """SASS or amdgcn as instructions."""
    if "/*0000*/" in compiled.code:
        return _parse_sass(compiled.code, compiled.num_warps)
    return _parse_gcn(compiled.code)


def hottest_loop(code: list[Instruction]) -> list[Instruction]:
    """Return the loop that moves most bytes, the shortest of several; all of the code without one."""
    loops = [code[at.jumps_to : i + 1] for i, at in enumerate(code) if at.jumps_to is not None]
    moving = [loop for loop in loops if any(each.moved for each in loop)]
    return min(moving, key=lambda loop: (-sum(i.moved for i in loop), len(loop)), default=code)


def tiles_in_flight(asm: str) -> float:
    """Count iterations whose loads are on their way while one is computed with."""
    waits = [int(n) for n in re.findall(r"cp\.async\.wait_group\s+(?:0x)?(\d+)", asm)]
    if not waits or max(waits) == 0:
        return 1.0
    # in the loop each iteration commits a group for K, one for V and one for the block's number
    return max(waits) / _groups_per_iteration(asm)


def _groups_per_iteration(asm: str) -> int:
    loops = re.findall(r"^(\$L\w+):(.*?)bra(?:\.uni)?\s+\1;", asm, re.MULTILINE | re.DOTALL)
    return max((body.count("cp.async.commit_group") for _, body in loops), default=0) or 1


def _parse_sass(text: str, num_warps: int) -> list[Instruction]:
    lines = _SASS.findall(text)
    at = {int(address, 16): i for i, (address, _, _) in enumerate(lines)}
    code = []
    constants: dict[str, int] = {}
    for i, (_, name, rest) in enumerate(lines):
        if name == "UMOV" and (constant := _SASS_CONSTANT.match(rest)):
            constants[constant[1]] = int(constant[2], 16)
        jump = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
        target = at.get(int(jump[1], 16)) if jump else None
        code.append(
            Instruction(
                cycles=2 if _SASS_SLOW.match(name) else 1,
                moved=_sass_bytes(name),
                flops=_sass_flops(name) or _tensor_flops(name, rest, constants) / num_warps,
                jumps_to=target if target is not None and target < i else None,
            )
        )
    return code


def _sass_flops(name: str) -> float:
    if not (matrix := _SASS_MATRIX.match(name)):
        return 0
    kind, m, n, k = (each for each in matrix.groups() if each)
    return 2 * int(m) * int(n) * int(k) / (2 if kind == "Q" else 1)


def _tensor_flops(name: str, operands: str, constants: dict[str, int]) -> float:
    """Of a program: 32 bytes of each row, so that FP8 is two of float16 at twice the rate."""
    described = re.search(r"idesc\[(UR\d+)\]", operands)
    if not _SASS_TENSOR.match(name) or not described:
        return 0
    bits = constants.get(described[1], 0)
    return 2 * (bits >> 24 & 31) * 16 * (bits >> 17 & 63) * 8 * 16


def _sass_bytes(name: str) -> int:
    if not _SASS_MOVES.match(name):
        return 0
    for size, bytes_ in ((".128", 16), (".64", 8), ("8", 1), ("16", 2)):
        if size in name.replace(".LTC128B", "").replace(".LTC64B", ""):
            return bytes_
    return 4


def _parse_gcn(text: str) -> list[Instruction]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _GCN_LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _GCN_LINE.match(line):
            name, rest = found.groups()
            moves = _GCN_MOVES.match(name)
            matrix = _GCN_MATRIX.match(name)
            flops = 2 * int(matrix[1]) * int(matrix[2]) * int(matrix[3]) if matrix else 0
            target = labels.get(rest.strip()) if "branch" in name else None
            # a warp of 64 takes a scheduler's 16 lanes four cycles
            cycles = 4 if name.startswith("v_") and not matrix else 1
            moved = _GCN_BYTES.get(moves[1], 1) if moves else 0
            code.append(Instruction(cycles, moved, flops, target))
    return code
