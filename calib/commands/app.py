"""Programs: `fp8kv` with its commands, `fp8kv-calibrate` and `fp8kv-eval`.

Nothing heavy is imported before a command runs, so `--help` answers at once.
"""

import shutil
from collections.abc import Callable
from functools import partial

import typer

from calib.commands import flags
from calib.commands.calibrate import calibrate, recipes
from calib.commands.evaluate import evaluate, recommend
from calib.commands.generate import generate
from calib.commands.inspect import compare, inspect
from calib.commands.machine import bench, doctor
from calib.commands.rescale import bake, stress
from calib.commands.transfer import apply, convert, merge, pack, repair, strip
from calib.commands.verify import verify
from calib.commands.watch import watch

# panels cut the names of flags on a narrow terminal; plain text folds
_Program = partial(
    typer.Typer,
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= 72 else None,
    pretty_exceptions_enable=False,
)

app = _Program(
    name="fp8kv",
    help="Measure, write and check FP8 KV-cache scales of large language models.",
    no_args_is_help=True,
)


@app.callback()
def _options(version: bool = flags.VERSION) -> None:
    pass


app.command()(calibrate)
app.command("eval")(evaluate)
for command in (
    *(inspect, verify, watch, apply, pack, bake, convert, strip, repair),
    *(compare, recommend, merge, generate, stress, bench, recipes, doctor),
):
    app.command()(command)


def _program(command: Callable[..., None]) -> typer.Typer:
    """Return a program that is one command."""
    program = _Program()
    program.command()(command)
    return program


# the entry points
main, calibrate_main, eval_main = app, _program(calibrate), _program(evaluate)
