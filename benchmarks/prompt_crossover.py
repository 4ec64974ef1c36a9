"""From how many tokens on is torch's attention worth its launches? Ours and torch's on the same prompts.

    python benchmarks/prompt_crossover.py [--output FILE]

Needs a GPU. `pairs` of the tuning table is to lie where the two columns cross. Every output is compared with
the reference first. Times are medians with launches in them, on caches with one scale and with one per head.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# a checkout is enough: nothing has to be installed
sys.path.insert(0, str(Path(__file__).parent.parent))

from kernel_report import describe_machine
from machine import write_result
from triton.testing import do_bench

from calib.bench.kernels import TOLERANCE, Case, Inputs, build, call, load_launchers, output_error
from fp8kv_runtime.kernels import attention

HEADS = ((32, 8, 128), (32, 8, 64), (16, 8, 256))  # query heads, KV heads, head_dim
ALONE = (1024, 1536, 2048, 3072, 4096, 6144, 8192, 8000)
AFTER = ((256, 32768), (512, 32768), (1024, 32768), (2048, 34816))  # new tokens, and with those before them
NEVER, ALWAYS = 2**62, 1  # pairs
CALLS = 20


def main() -> None:
    """Measure every prompt and write what was measured so far."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = Path(__file__).parent / "results" / "prompts_gpu.json"
    parser.add_argument("--output", type=Path, default=results, metavar="FILE")
    parser.add_argument("--commit", help="recorded in place of what git says")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU here, so nothing was timed")
    facts, rows = describe_machine(args.commit), []
    with torch.inference_mode():
        for heads in HEADS:
            for new, length in (*((n, n) for n in ALONE), *AFTER):
                rows.append(measure(Case("extend_attention", "prompt", (length,), new, *heads)))
                write_result(args.output, {"machine": facts, "rows": rows})
                print(rows[-1], flush=True)


def measure(case: Case) -> dict[str, Any]:
    """Time one prompt both ways, on scales per head and on one."""
    inputs = build(case, torch.device("cuda"))
    blocks, times = inputs.blocks, {}
    one = replace(blocks, k_scale=blocks.k_scale[:1].clone(), v_scale=blocks.v_scale[:1].clone())
    for scales, each in {"head": blocks, "tensor": one}.items():
        times[scales] = _times(case, replace(inputs, blocks=each))
    return {"heads": (case.num_heads, case.num_kv_heads, case.head_dim), "new": case.new} | {
        "tokens": case.lengths[0],
        **times,
    }


def _times(case: Case, inputs: Inputs) -> dict[str, float]:
    """Return microseconds of our kernel, of torch's attention, and of Python in a call of that."""
    run, config, times = call(case, inputs, load_launchers()), attention.attention_config, {}
    for name, pairs in {"ours": NEVER, "torch": ALWAYS}.items():
        attention.attention_config = lambda *arguments, pairs=pairs: replace(config(*arguments), pairs=pairs)
        try:
            error = output_error(run(), case, inputs)
            if not error <= TOLERANCE:
                sys.exit(f"{name} is wrong by {error:.1e}: nothing was timed")
            times[name] = 1e3 * float(do_bench(run, warmup=10, rep=25, return_mode="median"))
            times["python"] = _python_us(run)
        finally:
            attention.attention_config = config
    return {name: round(us, 1) for name, us in times.items()}


def _python_us(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    end = time.perf_counter()
    torch.cuda.synchronize()
    return 1e6 * (end - start) / CALLS


if __name__ == "__main__":
    main()
