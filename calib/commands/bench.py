"""`fp8kv bench`."""

import json
import sys
from functools import partial
from typing import Annotated

import typer

from calib.commands.flags import AsJson, Debug, Flag, TrustRemoteCode
from calib.commands.running import command, print_table


@command
def bench(
    model: Annotated[
        str | None,
        typer.Argument(help="A config.json, a model directory, a Hub id, builtin:smollm2."),
    ] = None,
    heads: Annotated[
        str, Flag(metavar="H/K/D", help="Without MODEL: query heads, KV heads, head_dim.")
    ] = "32/8/128",
    block_size: Annotated[int, Flag(min=1, help="Tokens per block.")] = 64,
    tune: Annotated[
        bool, Flag("--tune", help="First find the fastest configs on this GPU and keep them.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check the kernels against their references, then time them on this GPU at a model's shape."""
    from calib.bench import HEADINGS, run_bench

    result = run_bench(
        model,
        heads,
        block_size,
        tune=tune,
        trust_remote_code=trust_remote_code,
        say=partial(print, file=sys.stderr),
    )
    if as_json:
        print(json.dumps(result.to_json()))
    elif result.rows:
        print_table(result.title, HEADINGS, [*map(result.cells, result.rows)])
