"""Compile every kernel for every GPU, without one, and refuse what would be slow.

    python benchmarks/compile_kernels.py [--target sm_90] [--variant plain-128] [--kernel decode]

Prints a table per target, with what the code allows (benchmarks/kernels/bound.py; no speed is
measured); exits 1 with a line per finding. Worse than before is one: --accept makes it the measure.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

# kernels that an interpreter runs cannot be compiled, and Triton looks when it is imported
os.environ.pop("TRITON_INTERPRET", None)
# what Triton 3.9 warns about where nobody said
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import compiled_before
from kernels.bound import Bound, predict
from kernels.inspect_asm import Finding, findings, stream_loads
from kernels.offline import Launch, compile_launch
from kernels.processors import PROCESSORS
from kernels.variants import VARIANTS
from triton.compiler.errors import CompilationError
from triton.runtime.errors import PTXASError

from fp8kv_runtime.kernels.targets import TARGETS
from fp8kv_runtime.kernels.tuning import find_config

_ROW = "{:11}{:16}{:>5}{:>8}{:>6} {:6}{:>5}{:>6}{:>12}{:>8}{:>8}{:>8} {:8}{}"
_HEADINGS = (
    *("kernel", "variant", "regs", "shared", "spill", "loads"),
    *("at", "warps", "in flight", "cycles", "memory", "matrix", "limit", "verdict"),
)
_UNITS = ("", "", "", "bytes", "", "bytes", "once", "", "KB (needs)", "/ KB", "", "", "", "")


@dataclass(frozen=True)
class Task:
    """One launch of one variant on one target."""

    target: str
    variant: str
    launch: Launch


@dataclass(frozen=True)
class Result:
    """What a task came to."""

    registers: int
    shared_memory: int
    spilled: int
    loads: str  # bytes per thread of the loads of K and V
    bound: Bound | None
    findings: list[Finding]


def main() -> None:
    """Compile, print, exit."""
    parser = argparse.ArgumentParser(description="Compile kernels for GPUs that are not here.")
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--variant", nargs="+", choices=[v.name for v in VARIANTS])
    parser.add_argument("--kernel", nargs="+", choices=["append_kv", "decode", "reduce", "extend", "gather"])
    parser.add_argument("--accept", action="store_true", help="later runs are compared with this")
    arguments = parser.parse_args()

    started = time.monotonic()
    kernels = arguments.kernel and [f"{name}_kernel" for name in arguments.kernel]
    tasks = [
        task
        for task in _tasks(arguments.target, arguments.variant)
        if kernels is None or task.launch.name in kernels
    ]
    with tempfile.TemporaryDirectory() as cache:
        # nothing compiled earlier may stand in for what is here now
        os.environ["TRITON_CACHE_DIR"] = cache
        results = _compile(tasks)
    for target in arguments.target:
        _print_table(target, [row for row in zip(tasks, results, strict=True) if row[0].target == target])
    bad = [
        f"{task.launch.name} {task.variant} {task.target}: {finding.found}; allowed: {finding.allowed}"
        for task, result in zip(tasks, results, strict=True)
        for finding in result.findings
    ]
    if arguments.accept:
        compiled_before.write(
            {_name(task): asdict(r.bound) for task, r in zip(tasks, results, strict=True) if r.bound}
        )
    seconds = time.monotonic() - started
    print(
        f"\n{len(tasks)} kernels for {len(arguments.target)} targets in {seconds:.0f} s, {len(bad)} findings"
    )
    print(*bad, sep="\n", file=sys.stderr, end="\n" if bad else "")
    sys.exit(bool(bad))


def _name(task: Task) -> str:
    return f"{task.target} {task.launch.name} {task.variant}"


def _tasks(targets: list[str], names: list[str] | None) -> list[Task]:
    found: dict[tuple[str, Launch], Task] = {}
    for target in targets:
        for variant in VARIANTS:
            if names is None or variant.name in names:
                for launch in variant.launches(TARGETS[target]):
                    found.setdefault((target, launch), Task(target, variant.name, launch))
    return list(found.values())


def _compile(tasks: list[Task]) -> list[Result]:
    if len(tasks) < 8:  # a process costs more than it saves
        return [_compile_one(task) for task in tasks]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        return list(pool.map(_compile_one, tasks, chunksize=4))


def _compile_one(task: Task) -> Result:
    try:
        compiled = compile_launch(task.launch, TARGETS[task.target])
    except (CompilationError, PTXASError) as error:
        return Result(0, 0, 0, "-", None, [Finding(f"does not compile: {_reason(error)}", "code")])
    found = findings(task.launch, compiled, TARGETS[task.target])
    launched = _launched(task.launch, task.target)
    bound = predict(compiled, PROCESSORS[task.target], *launched)
    found += compiled_before.worse(_name(task), bound, compiled_before.read())
    if launched and launched[0] > bound.programs:
        found.append(Finding(f"{launched[0]} programs launched", f"{bound.programs} run at once"))
    widths = sorted(set(stream_loads(compiled.asm)))
    return Result(
        compiled.registers,
        compiled.shared_memory,
        sum(compiled.spilled.values()),
        "+".join(map(str, widths)) or "-",
        bound,
        found,
    )


def _launched(launch: Launch, target: str) -> tuple[int, ...]:
    """Return decode's programs on a processor; other kernels launch as many as there is work for."""
    if launch.kernel != "decode_kernel" or dict(launch.constants)["EXTENDS"]:
        return ()
    layer, names = launch.layer, (target, TARGETS[target].backend)
    bits, whole = 16 if layer["format"] == "float16" else 8, not layer["splits_query"]
    return (find_config("decode", names, bits, layer["head_dim"], whole).per_processor,)


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().replace("\n", " ")


def _print_table(target: str, rows: list[tuple[Task, Result]]) -> None:
    processor = PROCESSORS[target]
    print(f"\n{target}: {processor.gpu}, {processor.tb_per_s} TB/s, {processor.count} processors")
    print(_ROW.format(*_HEADINGS))
    print(_ROW.format(*_UNITS))
    for task, result in rows:
        print(
            _ROW.format(
                task.launch.name.removesuffix("_kernel"),
                task.variant,
                result.registers,
                result.shared_memory,
                result.spilled,
                result.loads,
                *(_cells(result.bound) if result.bound else [""] * 7),
                "; ".join(finding.found for finding in result.findings) or "ok",
            )
        )


def _cells(bound: Bound) -> tuple[str, ...]:
    return (
        str(bound.programs),
        f"{bound.occupancy:.0%}",
        f"{bound.kb_in_flight:.0f} ({bound.kb_needed:.0f})",
        f"{bound.cycles_per_kb:.0f}",
        f"{bound.of_memory:.0%}",
        f"{bound.of_matrix:.0%}",
        bound.limit,
    )


if __name__ == "__main__":
    main()
