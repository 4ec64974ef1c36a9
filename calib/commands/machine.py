"""`fp8kv bench` and `fp8kv doctor`: what this machine can do."""

import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import typer

from calib import choices
from calib.commands import flags
from calib.commands.progress_bar import progress_bar
from calib.commands.running import Answer, job_command
from calib.commands.terminal import TextTable

if TYPE_CHECKING:
    from calib.bench import BenchResult

_HEADINGS = ("kernel", "sequences", "FP8, µs", "TB/s", "of a copy", "float16, µs", "float16 / FP8")


@job_command
def bench(
    model: str | None = typer.Argument(
        None,
        help="Take the shape of this model: a config.json, a model directory, a Hub id, or "
        "`builtin:smollm2`.",
        metavar="MODEL",
    ),
    heads: str = flags.option(
        "Without MODEL, use this many query heads and KV heads, of this size.",
        metavar="H/K/D",
        default="32/8/128",
    ),
    block_size: int = flags.option("Store this many tokens in a block of the cache.", min=1, default=64),
    trust_remote_code: bool = flags.TRUST_REMOTE_CODE,
    progress: choices.ProgressForm = flags.PROGRESS,
) -> Answer:
    """Check the kernels against their references, then time them on this GPU at a model's shape."""
    from calib.doctor import interpret_without_gpu

    interpret_without_gpu()
    from calib.bench import run_bench

    # a line for each case is progress enough, and would tear a bar
    has_lines, say = progress == "auto", partial(print, file=sys.stderr)
    with progress_bar(progress, hidden=has_lines) as stages:
        result = run_bench(
            model, heads, block_size, trust_remote_code=trust_remote_code,
            say=say, say_case=say if has_lines else lambda *words, **options: None, progress=stages,
        )  # fmt: skip
    return Answer(asdict(result), [_bench_table(result)] if result.rows else [])


def _bench_table(result: "BenchResult") -> TextTable:
    shape = "/".join(map(str, result.heads))
    rows = []
    for row in result.rows:
        share = row.tb_per_s / result.copy_tb_per_s if result.copy_tb_per_s else 0.0
        times = (f"{row.us:.1f}", f"{row.tb_per_s:.2f}", f"{share:.0%}", f"{row.float16_us:.1f}")
        rows.append((row.kernel, row.case, *times, f"{row.float16_us / row.us:.2f}x"))
    return TextTable(f"{result.gpu}: {shape} query heads / KV heads / head_dim", _HEADINGS, rows)


@job_command
def doctor() -> Answer:
    """Show what this machine can run: GPU, FP8 support, Triton, and versions."""
    from calib.doctor import examine

    facts = examine()
    return Answer(dict(facts), [TextTable("This machine", ("what", "found"), facts)])
