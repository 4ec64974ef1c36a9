"""A screen that is full, closed, narrow or no terminal at all; words that are not UTF-8."""

import io
import os
import re
import shlex
import subprocess
import sys

import pytest
from command_line import CLI, SMALL, calibrate, fp8kv, one_line_error, succeeded
from rich.console import Console

from calib import choices
from calib.commands.app import app
from calib.commands.progress_bar import progress_bar
from calib.commands.terminal import TextTable, table_text
from calib.progress import Progress
from calib.rescale.stress import write_stress_card


def shell(line, **options):
    """Run a command line with `fp8kv` in it."""
    line = line.replace("fp8kv", " ".join(CLI))
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, errors="surrogateescape", **options
    )


@pytest.fixture(scope="module")
def output(model, tmp_path_factory):
    home = tmp_path_factory.mktemp("calibrated")
    done = calibrate(model, "-o", home / "out", "--quiet")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    return home / "out"


def test_a_full_screen_is_one_line_that_says_what_was_written(tiny_directory, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        arguments = ["calibrate", str(tiny_directory), "-o", str(out), *SMALL]
        assert app(arguments, standalone_mode=False) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fp8kv: ")]
    assert told == [f"fp8kv: cannot print: No space left on device; written: '{out}'"]
    assert (out / "config.json").exists()


@pytest.mark.parametrize("line", ["verify --engine tgi {} > /dev/full", "inspect --json {} >&-"])
def test_a_command_says_that_it_cannot_print(line, output):
    done = shell(f"fp8kv {line.format(output)}")
    assert done.returncode == 2
    assert done.stderr.startswith("fp8kv: cannot print: ")
    assert done.stderr.endswith("; nothing was written\n")
    assert done.stderr.count("\n") == 1


def test_a_closed_screen_is_none_of_the_business_of_what_prints_nothing():
    program = "from calib.commands.running import run; run(lambda: None)"
    done = shell(f"{sys.executable} -c '{program}' >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_has_seen_enough_changes_nothing(output):
    done = shell(f"fp8kv verify --engine lmdeploy {output} | true; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize("line", [r"generate x $'caf\xe9'", r"calibrate x --set $'a=\xff'"])
def test_an_argument_that_is_not_utf_8_is_one_line(line):
    done = shell(f"fp8kv {line}")
    assert done.returncode == 2
    assert re.fullmatch(r"fp8kv: '.*\\xe9.*|fp8kv: 'a=\\xff.*", done.stderr.strip())
    assert "is not UTF-8" in done.stderr


def test_a_name_that_is_too_long_for_a_file_is_one_line(output):
    for arguments in (("verify", "x" * 5000), ("apply", "x" * 5000, output)):
        one_line_error(fp8kv(*arguments), "xxx...' is too long for the name of a file")


def test_what_the_screen_cannot_spell_is_escaped(output, tmp_path):
    (tmp_path / "out-é").symlink_to(output)
    done = shell(f"PYTHONIOENCODING=ascii fp8kv inspect {tmp_path}/out-é")
    assert (done.returncode, done.stderr) == (0, "")
    assert r"out-\xe9" in done.stdout


def test_calibrating_without_a_terminal_draws_no_bar(tiny_directory, tmp_path):
    done = calibrate(tiny_directory, "-o", tmp_path / "out")
    assert done.stderr.splitlines() == ["load", "calibrate", "write"]


@pytest.mark.parametrize("form", ["auto", "json"])
def test_a_progress_that_nobody_can_read_stops_nothing(form, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    with progress_bar(form) as progress:
        assert isinstance(progress, Progress)
        progress.stage("load")


HEADINGS = ("layer", "K amax", "V amax", "K scale", "V scale", "range used")
ROWS = [(str(i), *(f"{i}.{'1234567'[:5]}" for _ in range(5))) for i in range(2)]


def shown(width):
    return table_text(TextTable("Scales", HEADINGS, ROWS), Console(file=io.StringIO(), width=width))


def test_a_narrow_screen_gets_a_line_for_every_value():
    lines = shown(40).splitlines()
    assert lines[:4] == ["Scales", "", "layer: 0", "K amax: 0.12345"]
    assert len(lines) == 2 + 2 * len(HEADINGS) + 1
    assert "│ 1.12345" in shown(80)
    widest = {line.rindex("│") for line in shown(60).splitlines() if "│" in line}
    assert len(widest) == 1
    assert max(widest) < 60


@pytest.mark.parametrize("command", ["verify", "compare", "doctor"])
def test_at_40_columns_no_word_is_broken(command, output, monkeypatch):
    arguments = {"doctor": [], "compare": [output, output], "verify": [output]}[command]
    wide = fp8kv(command, *arguments)
    monkeypatch.setenv("COLUMNS", "40")
    narrow = fp8kv(command, *arguments)
    assert narrow.exit_code == wide.exit_code
    words = set(re.findall(r"\w[\w.+-]*", wide.stdout))
    assert words
    assert words <= set(re.findall(r"\w[\w.+-]*", narrow.stdout))


def test_without_a_terminal_or_a_width_nothing_is_folded(output, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    done = shell(f"fp8kv verify {output}", env=dict(os.environ))
    rows = [line for line in done.stdout.splitlines() if "│" in line]
    assert rows
    assert all(re.search(r"\w", line.split("│")[1]) for line in rows), "a cell was folded"


def test_serve_lines_are_quoted_for_the_shell(tiny_directory, tmp_path):
    out = tmp_path / "it's out; rm"
    formats = [f"--format={name}" for name in choices.FORMATS if name != "fp8kv"]
    done = succeeded(calibrate(tiny_directory, "-o", out, *formats))
    assert commands_in(done.stdout, "vllm serve") == [
        str(out / name) for name in ("vllm", "modelopt", "vllm-nvfp4")
    ]
    for name in ("vllm", "aphrodite", "sglang", "tgi", "json", "trtllm", "sglang-nvfp4"):
        card = (out / name / "README.md").read_text()
        [command] = re.findall(r"```bash\n(.*?)\n```", card, re.DOTALL)
        assert any(str(out / name) in word for word in shlex.split(command))


def test_the_commands_of_a_twin_are_quoted(tmp_path):
    amax = {"k_amax": {"source": 1.0, "twin": 256.0}, "v_amax": {"source": 1.0, "twin": 0.5}}
    facts = {"model": "m", "output": "a b", "dtype": "float32", "latent": False, "tokens_compared": 24}
    twin = facts | amax | {"k_factor": 256.0, "v_factor": 0.5, "kl": 0.0, "rounded": [], "changed": []}
    write_stress_card(twin, None, [], tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert commands_in(card, "vllm serve") == ["a b", "a b-fp8kv"]
    assert "fp8kv-calibrate 'a b' -o 'a b-fp8kv'" in card


def commands_in(text, start):
    return [
        shlex.split(line, comments=True)[2] for line in text.splitlines() if line.strip().startswith(start)
    ]
