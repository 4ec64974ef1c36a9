"""`fp8kv bench`: whether the kernels are right here, and how fast at a model's shape."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from calib.errors import Fp8kvError, InputError
from calib.progress import SILENT, Progress

if TYPE_CHECKING:
    from fp8kv_runtime.bench.session import Bench
    from fp8kv_runtime.bench.session import Row as Row

Heads = tuple[int, int, int]  # query heads, KV heads, head_dim
Say = Callable[..., None]  # like print


@dataclass(frozen=True)
class BenchResult:
    """Times of the kernels with a cold L2, on caches of FP8 and float16; no rows without a GPU."""

    gpu: str
    heads: Heads
    copy_tb_per_s: float | None
    tuned: str | None  # the file that --tune wrote
    rows: list["Row"]


def parse_heads(text: str) -> Heads:
    """`32/8/128` as numbers; anything else is an InputError."""
    parts = text.split("/")
    numbers = tuple(int(part) for part in parts if part.isdecimal())
    if len(parts) != 3 or len(numbers) != 3 or min(numbers) < 1 or numbers[0] % numbers[1]:
        raise InputError(
            f"--heads is '{text}'; it must be query heads, KV heads and head_dim such as 32/8/128, "
            "the first a multiple of the second"
        )
    return numbers


def run_bench(
    model: str | None,
    heads: str,
    block_size: int,
    *,
    tune: bool,
    trust_remote_code: bool,
    say: Say,
    say_case: Say,
    progress: Progress = SILENT,
) -> BenchResult:
    """Check the kernels, with `tune` find their fastest configs first, and time them.

    Without a GPU they are checked at small shapes, in Triton's interpreter, and nothing is timed.
    Without `model` the shape is `heads`. `say` gets what came of it, `say_case` each case and
    config on its way; both are called like print.
    """
    gpu = torch.cuda.is_available()
    if tune and not gpu:
        raise InputError("--tune times kernels on a GPU, and torch finds none here")
    if not gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton looks when it is imported, now or by others
    if model:
        from calib.plan.shape import attention_heads

        shape = attention_heads(model, trust_remote_code=trust_remote_code)
    else:
        shape = parse_heads(heads)
    try:
        from fp8kv_runtime.bench.session import Bench
    except ImportError as missing:
        raise InputError(f"the kernels need Triton, which is for Linux only ({missing})") from None
    torch.set_float32_matmul_precision("highest")  # TF32 would be no reference
    bench = Bench.of(shape, block_size, torch.device("cuda" if gpu else "cpu"))
    with torch.inference_mode():
        try:
            return _run(bench, shape, progress, tune=tune, say=say, say_case=say_case)
        except ValueError as error:
            say_case()  # ends the line of a case
            raise InputError(str(error)) from None


def _run(
    bench: "Bench", heads: Heads, progress: Progress, *, tune: bool, say: Say, say_case: Say
) -> BenchResult:
    tuned = None
    if tune:
        progress.stage("tune")
        tuned = str(bench.tune(say_case))
        say(f"written: {tuned}")
    if wrong := bench.wrong(say_case, lambda cases: progress.each("check", cases, "cases")):
        raise Fp8kvError(f"wrong on this machine, nothing was timed: {', '.join(wrong)}")
    if bench.device.type != "cuda":
        say("no GPU that torch can use: checked at small shapes, nothing was timed")
        return BenchResult("no GPU", heads, None, tuned, [])
    copy, rows = bench.measure(lambda cases: progress.each("time", cases, "cases"))
    return BenchResult(bench.gpu, heads, copy, tuned, rows)
