"""Programs: `fp8kv` with its commands, `fp8kv-calibrate` and `fp8kv-eval`.

Nothing heavy is imported before a command runs, so `--help` answers at once.
"""

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand

from calib.commands import flags
from calib.commands.calibrate import calibrate, recipes
from calib.commands.checkpoints import apply, bake, convert, merge, pack, repair, stress, strip
from calib.commands.engines import verify, watch
from calib.commands.evaluate import evaluate, recommend
from calib.commands.inspect import compare, inspect
from calib.commands.runtime import bench, doctor, generate

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


# what vLLM and SGLang call our flags of tensor-parallel ranks; help shows one name
_RANKS = ("--tensor-parallel-size", "--tp-size", "--tp", "-tp")


class _Command(TyperCommand):
    def make_parser(self, ctx: Any) -> Any:
        """Take the engines' words for a flag too."""
        parser: Any = super().make_parser(ctx)
        for parameter in self.params:
            if words := {*_RANKS} & {*parameter.opts}:
                parser.add_option(parameter, [*({*_RANKS} - words)], parameter.name)
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse empty arguments; leave out what pydantic puts before the words of an error."""
        empty = next((i for i, x in enumerate(args) if not x or (x[:2] == "--" and x[-1] == "=")), None)
        if empty is not None:
            flag = args[empty].removesuffix("=") or (args[empty - 1] if empty else "")
            place = f"argument after {flag}" if flag else "first argument"
            raise typer.BadParameter(f"the {place} is empty: perhaps a variable is not set")
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


@app.callback()
def _options(version: bool = flags.VERSION) -> None:
    pass


app.command(cls=_Command)(calibrate)
app.command("eval", cls=_Command)(evaluate)
for command in (
    *(inspect, verify, watch, apply, pack, bake, convert, strip, repair),
    *(compare, recommend, merge, generate, stress, bench, recipes, doctor),
):
    app.command(cls=_Command)(command)


def _program(command: Callable[..., None]) -> typer.Typer:
    """Return a program that is one command."""
    program = _Program()
    program.command(cls=_Command)(command)
    return program


# the entry points
main, calibrate_main, eval_main = app, _program(calibrate), _program(evaluate)
