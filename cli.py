"""Command line: `fp8kv` with its commands, `fp8kv-calibrate` and `fp8kv-eval`.

Nothing heavy is imported before a command runs, so `--help` answers at once.
"""

import typer

from calib.commands.bench import bench
from calib.commands.calibrate import calibrate
from calib.commands.compare import compare
from calib.commands.convert import convert, repair, strip
from calib.commands.doctor import doctor
from calib.commands.evaluate import evaluate
from calib.commands.generate import generate
from calib.commands.inspect import inspect
from calib.commands.merge import merge
from calib.commands.plan import plan
from calib.commands.recipes import recipes
from calib.commands.stress import stress
from calib.commands.verify import verify

app = typer.Typer(
    name="fp8kv",
    help="FP8 KV-cache scales for large language models: measure, export, check.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(calibrate)
app.command("eval")(evaluate)
listed = (inspect, verify, convert, strip, repair, compare, plan, merge, generate, stress)
for command in (*listed, bench, recipes, doctor):
    app.command()(command)

calibrate_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
calibrate_app.command()(calibrate)

eval_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
eval_app.command()(evaluate)


def main() -> None:
    """Entry point of `fp8kv`."""
    app()


def calibrate_main() -> None:
    """Entry point of `fp8kv-calibrate`."""
    calibrate_app()


def eval_main() -> None:
    """Entry point of `fp8kv-eval`."""
    eval_app()


if __name__ == "__main__":
    main()
