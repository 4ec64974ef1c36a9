"""`fp8kv bench`."""

import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from calib.commands.flags import AsJson, Debug, Flag, ProgressFlag, TrustRemoteCode
from calib.commands.running import command, print_json, print_table

if TYPE_CHECKING:
    from calib.bench import KernelTime

_HEADINGS = ("kernel", "sequences", "FP8, µs", "TB/s", "of a copy", "float16, µs", "float16 / FP8")


@command
def bench(
    model: Annotated[
        str | None,
        typer.Argument(help="A config.json, a model directory, a Hub id, builtin:smollm2."),
    ] = None,
    heads: Annotated[
        str, Flag("Without MODEL: query heads, KV heads, head_dim.", metavar="H/K/D")
    ] = "32/8/128",
    block_size: Annotated[int, Flag("Tokens per block.", min=1)] = 64,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    progress: ProgressFlag = "auto",
    debug: Debug = False,
) -> None:
    """Check the kernels against their references, then time them on this GPU at a model's shape."""
    from calib.bench import run_bench
    from calib.commands.progress_bar import progress_bar

    # a line for each case is progress enough, and would tear a bar
    own, say = progress == "auto", partial(print, file=sys.stderr)
    with progress_bar(progress, quiet=own) as reported:
        result = run_bench(
            model, heads, block_size, trust_remote_code=trust_remote_code,
            say=say, say_case=say if own else _unsaid, progress=reported,
        )  # fmt: skip
    if as_json:
        print_json(asdict(result))
    elif result.rows:
        shape = "/".join(map(str, result.heads))
        title = f"{result.gpu}: {shape} query heads / KV heads / head_dim"
        print_table(title, _HEADINGS, [_cells(row, result.copy_tb_per_s) for row in result.rows])


def _unsaid(*words: str, **how: object) -> None:
    """Print nothing."""


def _cells(row: "KernelTime", copy: float | None) -> tuple[str, ...]:
    share = row.tb_per_s / copy if copy else 0.0
    times = (f"{row.us:.1f}", f"{row.tb_per_s:.2f}", f"{share:.0%}", f"{row.float16_us:.1f}")
    return (row.kernel, row.case, *times, f"{row.float16_us / row.us:.2f}x")
