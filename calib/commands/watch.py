"""`fp8kv watch`."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import typer

from calib.commands import flags
from calib.commands.running import Answer, job_command
from calib.commands.terminal import Block, TextTable, table_text
from calib.errors import InputError
from calib.files.text import parse_condition

if TYPE_CHECKING:
    from calib.evaluate.served.watch_report import WatchReport

_HEADINGS = ("layer", "tokens", "clipped", "95 % interval", "expected", "zeros")
_SHOWN = 12  # rows, of the worst layers


@job_command
def watch(
    source: str = typer.Argument(
        ..., help="The directory that FP8KV_WATCH names, or the address of a vLLM server.", metavar="DIR|URL"
    ),
    fail_if: list[str] = flags.option(
        "Exit with 1 if this surely holds for a layer: clipped>SHARE of tokens, or zero>SHARE of values.",
        default=["clipped>0.01"],
        metavar="CONDITION",
    ),
    model: Path | None = flags.option(
        "Read what was expected in this calibration. Default with DIR: the engine's model.", metavar="MODEL"
    ),
    follow: bool = flags.option(
        "Show it live, until it fails or you press Ctrl-C.", "--follow", default=False
    ),
    every: float = flags.option(
        "With --follow, look again after this many seconds.", default=5.0, min=0.1, max=86400
    ),
) -> Answer:
    """Show whether the scales of a running engine fit its traffic: which layers clip.

    The engine is a vLLM with our plugin, started with FP8KV_WATCH=DIR. The exit status is 1 for a layer whose
    scales are too small.
    """
    from calib.evaluate.served.watch_report import METRICS

    condition = parse_condition(fail_if[-1], METRICS)
    if len(fail_if) > 1 or condition.variant is not None or not condition.compare(2, 1):
        raise InputError(f"--fail-if '{' '.join(fail_if)}': give one condition, clipped>SHARE or zero>SHARE")

    def look() -> "WatchReport":
        from calib.evaluate.served.watch_report import read_expected, read_watched, report_on

        if source.lower().startswith(("http://", "https://")):
            from calib.evaluate.served.client import Server

            return report_on(Server(source).watched(), condition, read_expected(model) if model else {})
        watched = read_watched(Path(source))
        return report_on(watched, condition, read_expected(model or Path(watched.model)))

    report = _follow(look, every) if follow else look()
    failures = report.failures
    if report.alarms:
        directory = '"$FP8KV_WATCH"' if "://" in source else quote(source)
        model_path = quote(report.watched.model)
        advice = f"scales for this traffic: fp8kv repair {model_path} --stats {directory} -o NEW"
        failures[-1] = f"{failures[-1]}; {advice}"
    return Answer(report.to_json(), _blocks(report), failures)


def _follow(look: "Callable[[], WatchReport]", every: float) -> "WatchReport":
    """Show what `look` returns until a layer fails."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    # on stderr: stdout has the answer at the end
    console = Console(stderr=True)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            report = look()
            parts = (table_text(x) if isinstance(x, TextTable) else f"{x}\n" for x in _blocks(report))
            text = Text("".join(parts))
            if console.is_terminal:
                live.update(text, refresh=True)
            else:
                console.print(text)
            if report.alarms:
                return report
            time.sleep(every)


def _blocks(report: "WatchReport") -> Iterator[Block]:
    watched = report.watched
    yield f"{watched.engine}, {watched.model}"
    yield f"{watched.tokens:,} tokens from {watched.since} to {watched.written}"
    if report.rows:
        ordered = sorted(report.rows, key=lambda row: (-row.clipped, row.layer, row.letter))
        cells = [
            (
                f"{row.layer} {row.letter}",
                f"{row.tokens:,}",
                f"{row.clipped:.2%}",
                f"{row.low:.2%} to {row.high:.2%}",
                "-" if row.expected is None else f"{row.expected:.2%}",
                f"{row.zero:.2%}",
            )
            for row in ordered[:_SHOWN]
        ]
        yield TextTable(f"fingerprint {watched.fingerprint}", _HEADINGS, cells)
        if (hidden := len(report.rows) - _SHOWN) > 0:
            yield f"and {hidden} more rows, of which none clips more"
    else:
        yield "the cache is in 16 bits: nothing is clipped, and the statistics have the largest values"
