"""A command that cannot go on ends in one line: by a full, closed or narrow screen, a word or a signal."""

import io
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from unittest.mock import Mock

import pytest
import typer
from command_line import CLI, SMALL, calibrate, fp8kv, one_line_error, succeeded

from calib.capture.resume import Share
from calib.commands import running
from calib.commands.app import app
from calib.commands.progress_bar import progress_bar
from calib.commands.running import TextTable, run, table_text
from calib.errors import InputError
from calib.files.atomic import atomic_directory
from calib.formats import FORMATS
from calib.rescale.stress import write_stress_card


def shell(line):
    """Run a command line with `fp8kv` in it."""
    line = re.sub(r"(?<!\S)fp8kv(?!\S)", " ".join(CLI), line)  # a path may hold that name, too
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, errors="surrogateescape")


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
        assert app(["calibrate", str(tiny_directory), "-o", str(out), *SMALL], standalone_mode=False) == 2
    said = f"fp8kv: cannot print: No space left on device; written: '{out}'"
    # without a terminal there is no bar, and nothing is said of a short stage
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert lines == [said]
    assert (out / "config.json").exists()


@pytest.mark.parametrize("line", ["verify --engine tgi {} > /dev/full", "inspect --json {} >&-"])
def test_a_command_says_that_it_cannot_print(line, output):
    done = shell(f"fp8kv {line.format(output)}")
    assert done.returncode == 2
    assert re.fullmatch("fp8kv: cannot print: .*; nothing was written\n", done.stderr)


def test_a_screen_that_is_closed_gone_ascii_or_of_no_width_is_no_mistake(output, tmp_path, monkeypatch):
    program = "from calib.commands.running import run; run(lambda: None)"
    done = shell(f"{sys.executable} -c '{program}' >&-")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell(f"fp8kv verify --engine lmdeploy {output} | true; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == ("1\n", "")
    (tmp_path / "out-é").symlink_to(output)
    done = shell(f"PYTHONIOENCODING=ascii fp8kv inspect {tmp_path}/out-é")
    assert (done.returncode, done.stderr) == (0, "")
    assert r"out-\xe9" in done.stdout
    monkeypatch.delenv("COLUMNS")
    rows = [line for line in shell(f"fp8kv verify {output}").stdout.splitlines() if "│" in line]
    assert rows
    assert all(re.search(r"\w", line.split("│")[1]) for line in rows), "a cell was folded"


@pytest.mark.parametrize("line", [r"generate x $'caf\xe9'", r"calibrate x --set $'a=\xff'"])
def test_an_argument_that_is_not_utf_8_is_one_line(line):
    done = shell(f"fp8kv {line}")
    assert done.returncode == 2
    assert re.fullmatch(r"fp8kv: '(caf\\xe9|a=\\xff)' is not UTF-8; .*\n", done.stderr)


def test_a_name_that_is_too_long_for_a_file_is_one_line(output):
    for arguments in (("verify", "x" * 5000), ("apply", "x" * 5000, output)):
        one_line_error(fp8kv(*arguments), f"'{'x' * 80}...' is too long for the name of a file")


@pytest.mark.parametrize("form", ["auto", "json"])
def test_a_progress_that_nobody_can_read_stops_nothing(form, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    with progress_bar(form) as progress:
        progress.stage("load")


def test_a_narrow_screen_gets_a_line_for_every_value(monkeypatch):
    headings = ("layer", "K amax", "V amax", "K scale", "V scale", "range used")
    table = TextTable("Scales", headings, [(str(i), *[f"{i}.12345"] * 5) for i in range(2)])
    widths = (monkeypatch.setenv("COLUMNS", str(n)) for n in (40, 60, 80))
    narrow, middle, wide = (table_text(table) for _ in widths)
    lines = narrow.splitlines()
    assert lines[:4] == ["Scales", "", "layer: 0", "K amax: 0.12345"]
    assert len(lines) == 2 + 2 * len(headings) + 1
    assert "│ 1.12345" in wide
    (widest,) = {line.rindex("│") for line in middle.splitlines() if "│" in line}
    assert widest < 60


@pytest.mark.parametrize(("command", "directories"), [("verify", 1), ("compare", 2), ("doctor", 0)])
def test_at_40_columns_no_word_is_broken(command, directories, output, monkeypatch):
    wide = fp8kv(command, *[output] * directories)
    monkeypatch.setenv("COLUMNS", "40")
    narrow = fp8kv(command, *[output] * directories)
    assert narrow.exit_code == wide.exit_code
    words, narrow_words = (set(re.findall(r"\w[\w.+-]*", done.stdout)) for done in (wide, narrow))
    assert set() < words <= narrow_words


def test_serve_lines_are_quoted_for_the_shell(tiny_directory, tmp_path):
    out = tmp_path / "it's out; rm"
    formats = [name for name, target in FORMATS.items() if target.serve]
    done = succeeded(calibrate(tiny_directory, "-o", out, *(f"--format={name}" for name in formats)))
    served = [str(out / name) for name in formats if FORMATS[name].serve.startswith("vllm serve")]
    assert commands_in(done.stdout, "vllm serve") == served
    for name in formats:
        card = (out / name / "README.md").read_text()
        [command] = re.findall(r"```bash\n(.*?)\n```", card, re.DOTALL)
        assert any(str(out / name) in word for word in shlex.split(command))
    twin = dict.fromkeys(("model", "output", "dtype"), "a b")  # those of a twin, too
    twin |= dict.fromkeys(("rounded", "changed", "latent"), ())
    twin |= {f"{letter}_amax": {"source": 1.0, "twin": 256.0} for letter in "kv"}
    twin |= dict.fromkeys(("tokens_compared", "k_factor", "v_factor", "kl"), 24)
    write_stress_card(twin, None, [], tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert commands_in(card, "vllm serve") == ["a b", "a b-fp8kv"]
    assert "fp8kv-calibrate 'a b' -o 'a b-fp8kv'" in card


def commands_in(text, start):
    lines = [line for line in text.splitlines() if line.strip().startswith(start)]
    return [shlex.split(line, comments=True)[2] for line in lines]


def test_an_interrupt_in_the_middle_leaves_nothing_behind(tiny_directory, tmp_path):
    endless = ("--samples", "20000", "--seq-len", "64", "--batch-size", "1", "--dataset", "random")
    screen, stderr = pty.openpty()  # the bar is drawn on terminals only
    command = [*CLI, "calibrate", str(tiny_directory), "-o", str(tmp_path / "out"), *endless]
    # a shell's background jobs, this test among them, are told to ignore SIGINT
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=stderr, preexec_fn=heed)
    os.close(stderr)  # so that reading ends, with EIO, when the process does
    shown = b""
    while b"tokens/s" not in shown:
        shown += os.read(screen, 4096)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):
        while chunk := os.read(screen, 4096):
            shown += chunk
    assert process.wait(timeout=60) == 130
    assert b"interrupted; nothing was written" in shown.splitlines()[-1]
    assert b"Traceback" not in shown
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama"]


def test_sigterm_in_the_middle_leaves_nothing_behind(tiny_directory, tmp_path, monkeypatch):
    read = Share.read
    monkeypatch.setattr(Share, "read", lambda share: (read(share, 1), os.kill(os.getpid(), signal.SIGTERM)))
    done = calibrate(tiny_directory, "-o", tmp_path / "out", "--batch-size", "1")
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (2, "fp8kv: terminated; nothing was written")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_dies_of_sigterm_whenever_it_comes():
    def work():
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            # as early as can be: often before the child's interpreter is ready
            os.kill(child, signal.SIGTERM)
            assert os.waitpid(child, 0)[1] == signal.SIGTERM

    run(work)


STOPS = (signal.SIGTERM, signal.SIGINT, 2, "terminated"), (signal.SIGINT, signal.SIGTERM, 130, "interrupted")


@pytest.mark.parametrize(("first", "more", "status", "said"), STOPS)
def test_a_stopped_run_cleans_up_undisturbed(first, more, status, said, tmp_path, capsys, monkeypatch):
    written, before, done = running._written, signal.getsignal(signal.SIGTERM), []

    def stop():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            os.kill(os.getpid(), first)
        finally:
            if first == signal.SIGTERM:
                os.kill(os.getpid(), first)
                os.kill(os.getpid(), more)
            done.append("cleaned up")

    def write_and_stop():
        with atomic_directory(tmp_path / "out"):
            pass
        stop()

    # while the last line is made
    monkeypatch.setattr(running, "_written", lambda: os.kill(os.getpid(), more) or written())
    for work, names in ((write_and_stop, f"written: '{tmp_path / 'out'}'"), (stop, "nothing was written")):
        with pytest.raises(typer.Exit) as ended:
            run(work)
        assert (ended.value.exit_code, done.pop()) == (status, "cleaned up")
        assert capsys.readouterr().err == f"fp8kv: {said}; {names}\n"
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_command_that_lost_its_exception_can_still_be_ended():
    code = """
import os, signal
from calib.commands.running import run
class Deaf:
    def __del__(self): os.kill(os.getpid(), signal.SIGTERM)
def work():
    Deaf()  # Python drops what is raised there
    for _ in range(9): os.kill(os.getpid(), signal.SIGTERM)
run(work)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGTERM


def test_sigterm_while_an_error_is_told_is_one_line_too(monkeypatch):
    fail, told = running._fail, []

    def tell(message, status):
        told.append((message, status))
        if len(told) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        fail(message, status)

    monkeypatch.setattr(running, "_fail", tell)
    with pytest.raises(typer.Exit):
        run(Mock(side_effect=InputError("this cannot be")))
    assert told == [("this cannot be", 2), ("terminated; nothing was written", 2)]
