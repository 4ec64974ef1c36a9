"""What launching our kernels costs Python: no GPU runs or is needed, so nothing else is in it.

    python benchmarks/launch_cost.py [--rounds 40]

Kernels are compiled for an H200 that is not here, and the last call of every launch, into the
driver, is left out. Beside it the same launchers with Triton's own launch, in turn.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
from kernels.offline import pretend
from kernels.variants import VARIANTS
from machine import machine, write_result
from triton.compiler import CompiledKernel

from fp8kv_runtime.kernels.append_kv import append_kv
from fp8kv_runtime.kernels.attention import decode_attention
from fp8kv_runtime.kernels.launch import Launcher
from fp8kv_runtime.kernels.targets import TARGETS

_CALLS = 100
_OURS = Launcher.__call__


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results / "launch_cost.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    _leave_the_driver_out()
    with pretend(TARGETS["sm_90"]), torch.inference_mode():
        rows = {name: _measure(call, args.rounds) for name, call in _calls().items()}
    write_result(args.output, {"machine": machine(), "rounds": args.rounds, "us": rows})
    for name, us in rows.items():
        print(
            f"{name:16} {us['ours']:6.1f} us, by Triton's own launch {us['triton']:6.1f} us: "
            f"{us['triton'] / us['ours']:.1f}x"
        )


def _calls() -> dict[str, Callable[[], object]]:
    """One token of a sequence: 32 query heads, 8 KV heads, head_dim 128."""
    variant = next(v for v in VARIANTS if v.name == "plain-128")
    blocks, sequences = variant.blocks(TARGETS["sm_90"]), variant.sequences(1)
    query, new = torch.zeros(1, 32, 128).half(), torch.zeros(1, 8, 128).half()
    slots = torch.zeros(1, dtype=torch.int64)
    return {
        "append": lambda: append_kv(new, new, blocks, slots),
        "decode + reduce": lambda: decode_attention(query, blocks, sequences),
    }


def _measure(call: Callable[[], object], rounds: int) -> dict[str, float]:
    """Microseconds of a call, the median round of each way, which take turns."""
    ways = {"ours": _OURS, "triton": _by_triton}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            Launcher.__call__ = way
            call()
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            times[name].append((time.perf_counter() - start) / _CALLS * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def _by_triton(self: Launcher, target: object, grid: tuple, blocks: object, given: tuple,
               arguments: tuple) -> None:  # fmt: skip
    self.kernel[grid](*arguments, **self.constants, **self.options)


def _leave_the_driver_out() -> None:
    CompiledKernel.run = property(lambda self: lambda *arguments: None)
    CompiledKernel._init_handles = lambda self: None
    CompiledKernel.launch_metadata = lambda self, *arguments: None
    CompiledKernel.function = None


if __name__ == "__main__":
    main()
