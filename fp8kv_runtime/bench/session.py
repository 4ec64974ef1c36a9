"""One shape's cases on this machine: checked, then timed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from triton.testing import do_bench

from fp8kv_runtime.bench import correctness
from fp8kv_runtime.bench.cases import Case, Launchers, build, call, shrink, store_as_float16

Say = Callable[..., None]  # like print
Iterate = Callable[[Sequence[Case]], Iterator[Case]]  # goes through cases, and may count them

_K = 1024
_ROUNDS = 3
_DECODED = {
    "1 x 1k": (_K,),
    "1 x 8k": (8 * _K,),
    "1 x 32k": (32 * _K,),
    "8 x 16k": (16 * _K,) * 8,
    "64 x 2k": (2 * _K,) * 64,
}


@dataclass(frozen=True)
class KernelTime:
    """Times of one case on the GPU with a cold L2, on a cache of FP8 and on one of float16."""

    kernel: str
    case: str
    us: float
    tb_per_s: float  # of K and V in FP8
    float16_us: float


def bench_cases(heads: tuple[int, int, int], block_size: int, device: torch.device) -> tuple[Case, ...]:
    """Return decode at lengths from 1k to 32k, a prompt of 8k, and storing: small without a GPU.

    `heads` are query heads, KV heads and head_dim.
    """
    shape = (*heads, block_size)
    cases = (
        Case("append_kv", "1 token of each of 64", (2 * _K,) * 64, 1, *shape),
        *(Case("decode_attention", name, n, 1, *shape) for name, n in _DECODED.items()),
        Case("extend_attention", "prompt of 8k", (8 * _K,), 8 * _K, *shape),
    )
    return cases if device.type == "cuda" else shrink(cases)


def check_cases(
    cases: Sequence[Case], launchers: Launchers, device: torch.device, say: Say, iterate: Iterate = iter
) -> list[str]:
    """Check every case on FP8 and on float16, say a line for each, and return the wrong ones' names."""
    wrong = []
    for case in iterate(cases):
        for form in (case,) if case.q_fp8 else (case, store_as_float16(case)):
            # named first because the kernel may crash
            say(f"{form.kernel:17} {form.name:35} {form.format:7} ", end="", flush=True)
            verdict = correctness.check(form, launchers, device)
            say(f"{'ok   ' if verdict.ok else 'WRONG'} {verdict.text}", flush=True)
            if not verdict.ok:
                wrong.append(f"{form.kernel} {form.name} {form.format}".strip())
    return wrong


def time_cases(
    cases: Sequence[Case], launchers: Launchers, device: torch.device, iterate: Iterate = iter
) -> tuple[float, list[KernelTime]]:
    """Return TB/s of a copy within the GPU's memory, and the times of every case."""
    rows = []
    for case in iterate(cases):
        runs = [call(form, build(form, device), launchers) for form in (case, store_as_float16(case))]
        # in turn, so that clocks that drift hit both alike
        rounds = [[time_on_gpu(run, case.captures) for run in runs] for _ in range(_ROUNDS)]
        us, float16_us = map(median, zip(*rounds, strict=True))
        rows.append(KernelTime(case.kernel, case.name, us, case.num_bytes / us / 1e6, float16_us))
    source, target = torch.zeros(2, 2**30, dtype=torch.uint8, device=device)
    copy_us = time_on_gpu(lambda: target.copy_(source))
    return 2 * source.numel() / copy_us / 1e6, rows


def time_on_gpu(run: Callable[[], object], captures: bool = True) -> float:
    """Return microseconds of `run` on the GPU: the median of a graph's replays, without Python.

    Where it is not to be captured, or cannot be, its launches are in it. `do_bench` empties the L2 before
    each replay; `do_bench_cudagraph` would find K and V there.
    """
    run()  # what is compiled at first use cannot be captured
    replay = run
    if captures:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
            replay = graph.replay
        except RuntimeError:  # it cannot be captured, as where it waits for the GPU
            torch.cuda.synchronize()
    return 1e3 * float(do_bench(replay, return_mode="median"))
