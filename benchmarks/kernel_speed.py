"""How fast append_kv, decode_attention and extend_attention are on this GPU, if they are right.

    python benchmarks/kernel_speed.py [--quick] [--output DIR]

Every row's launcher is first compared with its reference; one mismatch, and nothing is timed.
Without a GPU that comparison is all: tiny shapes in Triton's interpreter. (Not called kernels.py:
transformers would take that for the package `kernels`, in every script of this directory.)
"""

import argparse
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

# Triton looks when it is imported, and some of torch imports it
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# a checkout is enough: nothing has to be installed
sys.path.insert(0, str(Path(__file__).parent.parent))

import kernel_roofline
from gpu_timer import GpuTimer, Timing
from kernel_paged_peers import fp8_peers, paged_peers, per_tensor
from kernel_peers import Attention, Prepare, dense_peers
from kernel_report import describe_machine, nvidia_smi, write
from kernels.variants import CASES

from calib.bench.kernels import (
    Case,
    Inputs,
    Launchers,
    build,
    call,
    check_cases,
    load_launchers,
    output_error,
    shrink,
)
from fp8kv_runtime.options import AttentionOptions

_COPIES = 16  # bytes of K and V in all forms that exist at once, over their FP8 bytes
_SAME = 1e-2  # largest relative error of another's output: more, and it computed something else


def main() -> None:
    """Check, then measure where there is a GPU."""
    args = _arguments()
    gpu = os.environ.get("TRITON_INTERPRET") != "1"
    # some images turn TF32 on, and the reference would be no reference
    torch.set_float32_matmul_precision("highest")
    launchers = load_launchers()
    cases = tuple(case for case in CASES if case.quick or not args.quick)
    small = args.tiny or not gpu
    with torch.inference_mode():
        cases = shrink(cases) if small else fitting(cases)
        if check_cases(cases, launchers, device(), print):
            sys.exit("a kernel is wrong: nothing was timed")
        if small or args.check:
            print(f"correctness only: {_why_small(gpu) if small else '--check'}, nothing was timed")
        else:
            measure(cases, launchers, GpuTimer(), args.output, args.commit)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="check tiny shapes, time nothing")
    parser.add_argument("--check", action="store_true", help="check all shapes, time nothing")
    parser.add_argument("--quick", action="store_true", help="a few rows of each kernel")
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results, metavar="DIR")
    parser.add_argument("--commit", help="recorded in place of what git says")
    return parser.parse_args()


def _why_small(gpu: bool) -> str:
    if not torch.cuda.is_available():
        return "no GPU here"
    return "tiny shapes" if gpu else "TRITON_INTERPRET=1"


def fitting(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Those that this GPU has memory for, others' float32 and 16-bit copies of K and V included."""
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    found = tuple(case for case in cases if _COPIES * case.num_bytes < memory)
    for case in cases:
        if case not in found:
            needed = f"{_COPIES * case.num_bytes / 2**30:.0f} GiB"
            print(f"{case.kernel:17} {case.name:35} left out: {needed} for K, V and their copies")
    return found


def num_flops(case: Case) -> int:
    """Operations of both matrix products under a causal mask; 0 for append."""
    if case.kernel == "append_kv":
        return 0
    visible = sum(case.new * n - case.new * (case.new - 1) // 2 for n in case.lengths)
    return 4 * case.num_heads * case.head_dim * visible


def device() -> torch.device:
    """Where kernels run."""
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


def measure(
    cases: tuple[Case, ...],
    launchers: Launchers,
    timer: GpuTimer,
    directory: Path,
    commit: str | None,
) -> None:
    """Time all cases; the files are written after each, so a run cut short leaves what it has."""
    facts = describe_machine(commit) | {
        "copy_tb_per_s": timer.copy_bandwidth() / 1e12,
        "floor_us": timer.floor(),
        "repetitions": timer.repetitions,
    }
    rows: list[dict[str, Any]] = []
    for case in cases:
        row = measure_case(case, launchers, timer, facts)
        row["clock_sm"], row["clock_memory"] = nvidia_smi("clocks.sm", "clocks.mem")
        rows.append(row)
        write(directory, facts, rows)
        print(f"{case.kernel:17} {case.name:35} {row['us']:9.1f} us {row['tb_per_s']:6.2f} TB/s")
        torch.cuda.empty_cache()
    print(f"written: {directory / 'kernels.json'} and kernels.md")
    try:
        print(f"written: {kernel_roofline.draw(directory / 'kernels.json')}")
    except ImportError as missing:
        print(f"no picture ({missing}): benchmarks/kernel_roofline.py draws it elsewhere")


def measure_case(case: Case, launchers: Launchers, timer: GpuTimer, facts: dict[str, Any]) -> dict[str, Any]:
    """One row: ours on FP8 and on float16, and others' attention, all in turn."""
    inputs = build(case, device())
    # theirs is the query as it is, never rounded
    plain = replace(inputs, options=AttentionOptions())
    theirs, left_out = _usable(case, plain, dense_peers(case, plain) | paged_peers(case, plain))
    coarse = per_tensor(plain)
    theirs_fp8, left_out_fp8 = _usable(case, coarse, fp8_peers(case, coarse))
    own = {"fp8kv": call(case, inputs, launchers)}
    if not case.q_fp8:
        wide = replace(case, format="float16")
        own["float16"] = call(wide, build(wide, device()), launchers)
    times = timer.measure(own | theirs | theirs_fp8, case.captures)
    ours, same = times.pop("fp8kv"), times.pop("float16", None)
    bandwidth = case.num_bytes / ours.us / 1e6
    peak = facts["peak_tb_per_s"]
    return {
        "kernel": case.kernel,
        "case": case.name,
        "shape": _shape(case),
        **asdict(ours),
        "bytes": case.num_bytes,
        "tb_per_s": bandwidth,
        "of_peak": bandwidth / peak if peak else None,
        "of_copy": bandwidth / facts["copy_tb_per_s"],
        "tflop_per_s": num_flops(case) / ours.us / 1e6,
        "float16": same and asdict(same),
        "sixteen_bit": _peers(times, theirs, left_out),
        "fp8": _peers(times, theirs_fp8, left_out_fp8),
    }


def _usable(
    case: Case, inputs: Inputs, theirs: dict[str, Prepare]
) -> tuple[dict[str, Attention], dict[str, str]]:
    """Those that run and compute the same, and why not the others."""
    usable, left_out = {}, {}
    for name, prepare in theirs.items():
        try:
            run = prepare()
            out = run().reshape(inputs.query.shape)
        except Exception as refusal:  # noqa: BLE001  another's library may raise anything
            left_out[name] = str(refusal).strip().split("\n")[0]
            continue
        error = output_error(out, case, inputs)
        if error <= _SAME:
            usable[name] = run
        else:
            left_out[name] = f"relative error {error:.1e}"
    return usable, left_out


def _peers(
    times: dict[str, Timing], usable: dict[str, Attention], left_out: dict[str, str]
) -> dict[str, Any]:
    reasons = {name: {"left_out": reason} for name, reason in left_out.items()}
    return {name: asdict(times[name]) for name in usable} | reasons


def _shape(case: Case) -> dict[str, Any]:
    shape = asdict(case)
    for name in ("kernel", "name", "quick"):
        del shape[name]
    return shape


if __name__ == "__main__":
    main()
