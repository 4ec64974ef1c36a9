"""Command line: `fp8kv` with its commands, `fp8kv-calibrate` and `fp8kv-eval`.

Nothing heavy is imported before a command runs, so `--help` answers at once.
"""

import typer

from commands.bench import bench
from commands.calibrate import calibrate
from commands.compare import compare
from commands.convert import convert, repair, strip
from commands.doctor import doctor
from commands.evaluate import evaluate
from commands.generate import generate
from commands.inspect import inspect
from commands.merge import merge
from commands.plan import plan
from commands.recipes import recipes
from commands.stress import stress
from commands.verify import verify

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
