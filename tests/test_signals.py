"""A command ends in one line however often it is told to, and so does what it forks, at once."""

import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import typer
from command_line import CLI, calibrate

from calib.capture.resume import Share
from calib.commands import running
from calib.commands.running import run
from calib.errors import InputError
from calib.files.atomic import atomic_directory


def heed_interrupts():
    # a shell's background jobs, this test among them, are told to ignore SIGINT
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupt_in_the_middle_leaves_nothing_behind(tiny_directory, tmp_path):
    endless = ("--samples", "20000", "--seq-len", "64", "--batch-size", "1", "--dataset", "random")
    screen, stderr = pty.openpty()  # the bar is drawn on terminals only
    command = [*CLI, "calibrate", str(tiny_directory), "-o", str(tmp_path / "out"), *endless]
    running = subprocess.Popen(command, stderr=stderr, preexec_fn=heed_interrupts)
    os.close(stderr)  # so that reading ends, with EIO, when the process does
    shown = b""
    while b"tokens/s" not in shown:
        shown += os.read(screen, 4096)
    running.send_signal(signal.SIGINT)
    with suppress(OSError):
        while chunk := os.read(screen, 4096):
            shown += chunk
    running.wait(timeout=60)
    assert running.returncode == 130
    assert b"interrupted; nothing was written" in shown.splitlines()[-1]
    assert b"Traceback" not in shown
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama"]


def test_sigterm_in_the_middle_leaves_nothing_behind(tiny_directory, tmp_path, monkeypatch):
    read = Share.read

    def stopped(share):
        read(share, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Share, "read", stopped)
    done = calibrate(tiny_directory, "-o", tmp_path / "out", "--batch-size", "1")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == "fp8kv: terminated; nothing was written"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_dies_of_sigterm_whenever_it_comes():
    ends = []

    def work():
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            # as early as can be: often before the child's interpreter is ready
            os.kill(child, signal.SIGTERM)
            ends.append(os.waitpid(child, 0)[1])

    run(work)
    assert ends == [signal.SIGTERM] * 10


@pytest.mark.parametrize(
    ("first", "more", "status", "said"),
    [
        (signal.SIGTERM, signal.SIGINT, 2, "terminated"),
        (signal.SIGINT, signal.SIGTERM, 130, "interrupted"),
    ],
)
def test_a_stopped_run_cleans_up_undisturbed_and_says_what_it_wrote(
    first, more, status, said, tmp_path, capsys, monkeypatch
):
    written, done = running._written, []

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
        assert ended.value.exit_code == status
        assert done.pop() == "cleaned up"
        assert capsys.readouterr().err == f"fp8kv: {said}; {names}\n"


def test_a_command_that_lost_its_exception_can_still_be_ended():
    code = (
        "import os, signal, time\n"
        "from calib.commands.running import run\n"
        "class Deaf:\n"
        "    def __del__(self): os.kill(os.getpid(), signal.SIGTERM)\n"
        "def work():\n"
        "    Deaf()\n"  # Python drops what is raised there
        "    for _ in range(9): os.kill(os.getpid(), signal.SIGTERM)\n"
        "run(work)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGTERM


def test_sigterm_while_an_error_is_told_is_one_line_too(monkeypatch):
    fail = running._fail
    told = []

    def tell(message, status):
        told.append(message)
        if len(told) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        fail(message, status)

    def work():
        raise InputError("this cannot be")

    monkeypatch.setattr(running, "_fail", tell)
    with pytest.raises(typer.Exit) as ended:
        run(work)
    assert ended.value.exit_code == 2
    assert told == ["this cannot be", "terminated; nothing was written"]


def test_a_command_leaves_the_handlers_as_they_were():
    before = signal.getsignal(signal.SIGTERM)
    run(lambda: None)
    assert signal.getsignal(signal.SIGTERM) is before
    with suppress(typer.Exit):
        run(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is before
