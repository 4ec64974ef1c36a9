"""Find reasons in a compiled kernel's code for it to be slow."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8kv_runtime.kernels import attend, attention
from fp8kv_runtime.kernels.targets import Target
from kernels.offline import Compiled, Launch

# AMD keeps scalar registers in lanes of vector registers: in memory they would be scratch, too.
# NVIDIA's assembler parks what a loop does not need to make room for one more program.
_ALLOWED = {"scalar registers": 2**16, "bytes of stack": 64}
# bytes of a load or store that a thread makes of its own
WIDE = 16

_CP_ASYNC = re.compile(r"cp\.async\.c[ag]\.shared\.global.*, 0x([0-9a-f]+)")
_PTX = re.compile(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.[bfus](\d+)\s")
_GCN = re.compile(r"\b(?:global|buffer|flat)_(load|store)_(dwordx?\d?|[us]?byte|[us]?short)(?:_d16)?")
_GCN_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}

# what FP8 instructions look like: (backend, format) -> pattern
_DECODES = {
    ("cuda", "e4m3fn"): r"cvt\.rn\.f16x2\.e4m3x2",
    ("cuda", "e5m2"): r"cvt\.rn\.f16x2\.e5m2x2",
    ("hip", "e4m3fn"): r"v_cvt_(scalef32_)?(pk_)?(f16|f32)_fp8",
    ("hip", "e4m3fnuz"): r"v_cvt_(pk_)?f32_fp8",
    ("hip", "e5m2"): r"v_cvt_(scalef32_)?(pk_)?(f16|f32)_bf8",
}
_ENCODES = {
    ("cuda", "e4m3fn"): r"cvt\.rn\.satfinite\.e4m3x2\.f32",
    ("cuda", "e5m2"): r"cvt\.rn\.satfinite\.e5m2x2\.f32",
}
_ANY_DECODE = {"cuda": r"cvt\.rn\.f16x2\.e[45]m[23]x2", "hip": r"v_cvt_(\w+_)?f(16|32)_(fp8|bf8)"}
_ANY_ENCODE = {"cuda": r"cvt\.rn\.\S*e[45]m[23]x2\.f\d+", "hip": r"v_cvt_(\w+_)?(fp8|bf8)_f(16|32)"}


@dataclass(frozen=True)
class Finding:
    """A fault of a compiled kernel."""

    found: str
    allowed: str


def findings(launch: Launch, compiled: Compiled, target: Target) -> list[Finding]:
    """All that is wrong with a compiled launch."""
    return [
        *spills(compiled),
        *shared_memory(compiled, target),
        *scaled_tiles(launch, compiled),
        *conversions(launch, compiled, target),
        *narrow_transfers(launch, compiled),
        *overlap(launch, compiled, target),
    ]


def spills(compiled: Compiled) -> Iterator[Finding]:
    """Find registers kept in memory, but for a few that are saved once."""
    for what, amount in compiled.spilled.items():
        if amount > _ALLOWED.get(what, 0):
            yield Finding(f"spills {amount} {what}", str(_ALLOWED.get(what, 0)))


def shared_memory(compiled: Compiled, target: Target) -> Iterator[Finding]:
    """More shared memory than a program may use."""
    if compiled.shared_memory > target.shared_memory:
        yield Finding(f"{compiled.shared_memory} bytes of shared memory", f"at most {target.shared_memory}")


def scaled_tiles(launch: Launch, compiled: Compiled) -> Iterator[Finding]:
    """Multiplication of K or V in the loop: scales belong to scores and output."""
    if launch.kernel != "decode_kernel":
        return
    loaded, multiplied = _traced(compiled.ttir)
    if not loaded:
        yield Finding("no tile of K or V is loaded in a loop", "loads of K and V")
    for line in multiplied:
        yield Finding(f"K or V is multiplied in the loop: {line}", "conversion only")


def conversions(launch: Launch, compiled: Compiled, target: Target) -> Iterator[Finding]:
    """Find FP8 conversions that should be instructions and are not, or the reverse."""
    format, kernel = launch.layer["format"], launch.kernel
    decodes = kernel in ("decode_kernel", "gather_kernel")
    encodes = kernel == "append_kv_kernel" or (kernel == "decode_kernel" and launch.layer["q_fp8"])
    for used, supported, instructions, any_instruction, what in (
        (decodes, format in target.decoded, _DECODES, _ANY_DECODE, "decode"),
        (encodes, format in target.encoded, _ENCODES, _ANY_ENCODE, "encode"),
    ):
        if used and supported:
            wanted = instructions[target.backend, format]
            if not re.search(wanted, compiled.asm):
                yield Finding(f"no instruction to {what} {format}", wanted)
        else:
            for unwanted in {m[0] for m in re.finditer(any_instruction[target.backend], compiled.asm)}:
                yield Finding(f"{unwanted} to {what} {format}", "integer arithmetic")


def narrow_transfers(launch: Launch, compiled: Compiled) -> Iterator[Finding]:
    """Find loads of K and V, or stores of their codes, of less than 16 bytes."""
    transfers = {}
    if launch.kernel in ("decode_kernel", "gather_kernel"):
        transfers["load"] = stream_loads(compiled.asm)
    if launch.kernel in ("append_kv_kernel", "gather_kernel") and launch.layer["head_dim"] % WIDE == 0:
        transfers["store"] = [n for kind, n in _transfers(compiled.asm) if kind == "st"]
    for what, found in transfers.items():
        if not found:
            yield Finding(f"no {what} of K or V", f"{WIDE} bytes per thread")
        for width in sorted(set(found)):
            if width < WIDE:
                yield Finding(f"{what} of K or V of {width} bytes", f"{WIDE} bytes per thread")


def overlap(launch: Launch, compiled: Compiled, target: Target) -> Iterator[Finding]:
    """Find a reduce that cannot start early, or that reads the parts before decode has ended."""
    if not target.overlaps:
        return
    is_followed = launch.kernel == "decode_kernel" and not dict(launch.constants)["WHOLE"]
    if is_followed and _LETS_START not in compiled.asm:
        yield Finding("the reduce cannot start before decode has ended", _LETS_START)
    if launch.kernel == "reduce_kernel":
        before, wait, _ = compiled.asm.partition(_WAITS)
        if not wait:
            yield Finding("the reduce does not wait for decode", _WAITS)
        elif _reads_parts(before):
            yield Finding("the reduce reads parts before it waits", _WAITS)


def _reads_parts(asm: str) -> bool:
    """Whether a load comes from a line of the reduce that loads parts."""
    source, first = attention.reduce_kernel.raw_src, attention.reduce_kernel.starting_line_number
    parts = {first + i for i, line in enumerate(source) if _LOADS_PARTS.search(line)}
    file = Path(attention.__file__).name
    here = False
    for line in asm.splitlines():
        if location := re.search(r"\.loc\s.*// (\S+):(\d+):\d+$", line):
            here = location[1] == file and int(location[2]) in parts
        elif here and re.search(r"\bld\.global", line):
            return True
    return False


def stream_loads(asm: str) -> list[int]:
    """Bytes of each load that comes from the source lines of `load_codes`."""
    source, first = attend.load_codes.fn.__code__, attend.load_codes.starting_line_number
    last = first + len(attend.load_codes.raw_src) - 1
    files = {
        int(n)
        for n, path in re.findall(r"^\s*\.file\s+(\d+) (.*)$", asm, re.MULTILINE)
        if path.replace('" "', "/").strip('"') == source.co_filename
    }
    found = []
    here = inline = False  # within inline assembly lines are counted on, past those of the source
    for line in asm.splitlines():
        if " inline asm" in line:
            inline = "begin" in line
        elif not inline and (location := re.match(r"\s*\.loc\s+(\d+) (\d+) ", line)):
            here = int(location[1]) in files and first <= int(location[2]) <= last
        elif here:
            found += [n for kind, n in _transfers(line) if kind == "ld"]
    return found


def _transfers(asm: str) -> Iterator[tuple[str, int]]:
    """Direction and bytes of each access to global memory."""
    for match in _CP_ASYNC.finditer(asm):
        yield "ld", int(match[1], 16)
    for match in _PTX.finditer(asm):
        yield match[1], int(match[2] or 1) * int(match[3]) // 8
    for match in _GCN.finditer(asm):
        yield match[1][:1] + ("d" if match[1] == "load" else "t"), _GCN_BYTES.get(match[2], 1)


_LOADS_PARTS = re.compile(r"tl\.load\(softmax_|partial = tl\.load\(")
_LETS_START, _WAITS = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
_LOOP = re.compile(r"^( *)(?:%\S+ = )?scf\.for ")
_OPERATION = re.compile(r"^\s*(%\w+)(?::\d+)? = ([\w.]+)(.*)$")
_TILE_LOAD = re.compile(r"tensor<\d+x\d+x!tt\.ptr<[if]\d+>>")


def _traced(ttir: str) -> tuple[int, list[str]]:
    """Tiles of codes loaded in loops, and multiplications of what comes from them.

    What a matrix multiplication returns does not count as coming from its operands.
    """
    loaded, multiplied = 0, []
    codes: set[str] = set()
    loop = None
    for line in ttir.splitlines():
        if loop is None and (match := _LOOP.match(line)):
            loop = match[1] + "}"
        elif loop is not None and line.startswith(loop):
            loop = None
        elif loop is not None and (match := _OPERATION.match(line)):
            result, name, rest = match.groups()
            if name == "tt.load" and _TILE_LOAD.search(rest):
                codes.add(result)
                loaded += 1
            elif name != "tt.dot" and codes & set(re.findall(r"%\w+", rest)):
                codes.add(result)
                if name in ("arith.mulf", "arith.divf", "math.fma"):
                    multiplied.append(f"{name}{rest.split(' loc(')[0]}")
    return loaded, multiplied
