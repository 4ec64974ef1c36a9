"""vLLM's Triton attention kernel beside ours, in Triton's interpreter: the same numbers.

Shows that `make bench-kernels`, where vLLM is installed, times the same work; that two kernels
written apart agree on FP8 blocks, on prompts and on decode; and that `--attention vllm_triton` and
`vllm_triton_fp8` round as the kernel does.
"""

import os
from pathlib import Path
from types import SimpleNamespace

# Triton looks when it is imported
os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import simulated_triton
import torch
from kernel_paged_peers import fp8_peers, paged_peers, per_tensor
from kernel_table import CASES
from outputs import report
from triton.backends import backends

from fp8kv_runtime.bench import correctness
from fp8kv_runtime.bench.cases import build, call, load_launchers, shrink

PEERS = {"vLLM Triton": paged_peers, "vLLM Triton, FP8": fp8_peers}


def main() -> None:
    """Compare every tiny case, in 16 bits and in FP8."""
    # vLLM's build for CPUs asks for a backend that the interpreter does not need
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))
    from vllm.v1.attention.ops import triton_unified_attention

    cpu, worst, problems = torch.device("cpu"), {"ours": 0.0} | dict.fromkeys(PEERS, 0.0), []
    cases = [c for c in shrink(CASES) if c.kernel != "append_kv" and not c.q_fp8]
    for case in cases:
        inputs = per_tensor(build(case, cpu))
        runs = {"ours": call(case, inputs, load_launchers())}
        runs |= {name: found(case, inputs)[name]() for name, found in PEERS.items()}
        for name, run in runs.items():
            error = correctness.output_error(run().reshape(inputs.query.shape), case, inputs)
            worst[name] = max(worst[name], error)
            if not error <= correctness.TOLERANCE:
                problems.append(f"{name} on {case.kernel} {case.name}: relative error {error:.1e}")
    errors = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    report(Path("triton_unified_attention"), problems, f"{len(cases)} shapes; errors: {errors}")
    problems, worst = simulated_triton.problems(triton_unified_attention)
    shares = ", ".join(f"{name} {share:.1e}" for name, share in worst.items())
    report(Path("simulated"), problems, f"{len(simulated_triton.CASES)} cases; differ: {shares}")


if __name__ == "__main__":
    main()
