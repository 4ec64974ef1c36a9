"""Programs: `fp8kv` with its commands, `fp8kv-calibrate` and `fp8kv-eval`.

Nothing heavy is imported before a command runs, so `--help` answers at once.
"""

from collections.abc import Callable

import typer

from calib.commands.apply import apply
from calib.commands.bake import bake
from calib.commands.bench import bench
from calib.commands.calibrate import calibrate
from calib.commands.compare import compare
from calib.commands.convert import convert, repair, strip
from calib.commands.doctor import doctor
from calib.commands.evaluate import evaluate
from calib.commands.flags import Version
from calib.commands.generate import generate
from calib.commands.inspect import inspect
from calib.commands.merge import merge
from calib.commands.pack import pack
from calib.commands.recipes import recipes
from calib.commands.recommend import recommend
from calib.commands.stress import stress
from calib.commands.verify import verify

app = typer.Typer(
    name="fp8kv",
    help="FP8 KV-cache scales for large language models: measure, export, check.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(version: Version = False) -> None:
    pass


app.command()(calibrate)
app.command("eval")(evaluate)
of_scales = (inspect, verify, apply, pack, bake, convert, strip, repair)
others = (compare, recommend, merge, generate, stress, bench, recipes, doctor)
for each in (*of_scales, *others):
    app.command()(each)


def _alone(command: Callable[..., None]) -> typer.Typer:
    alone = typer.Typer(pretty_exceptions_enable=False)
    alone.command()(command)
    return alone


# the entry points
main, calibrate_main, eval_main = app, _alone(calibrate), _alone(evaluate)
