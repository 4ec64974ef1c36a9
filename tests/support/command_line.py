"""The command line, as tests call it."""

import json
import sys
from functools import cache

from typer import testing
from typer.testing import CliRunner

from calib.commands.app import app

# typer makes all commands anew for each call, which takes longer than most of them
testing._get_command = cache(testing._get_command)
CLI = [sys.executable, "-m", "calib"]
SMALL = ["--dataset", "random", "--samples", "4", "--seq-len", "32", "--device", "cpu"]


def fp8kv(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def calibrate(*arguments):
    return fp8kv("calibrate", *arguments, *SMALL)


def succeeded(done):
    assert done.exit_code == 0, done.stderr
    return done


def ran(*arguments):
    return succeeded(fp8kv(*arguments))


def json_of(*arguments, status=0):
    """What a command prints with `--json`."""
    done = fp8kv(*arguments, "--json")
    assert done.exit_code == status, done.stderr
    return json.loads(done.stdout)


def one_line_error(done, *phrases, status=2):
    assert done.exit_code == status, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("fp8kv: ")]
    assert len(lines) == 1
    assert "Traceback" not in done.stderr, done.stderr
    assert not lines[0].startswith("fp8kv: fp8kv ")
    for phrase in phrases:
        assert phrase in lines[0], lines[0]
