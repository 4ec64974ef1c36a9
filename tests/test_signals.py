"""A command ends in one line however often it is told to, and so does what it forks, at once."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import typer

from calib.commands import running
from calib.commands.running import run
from calib.errors import InputError


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_dies_of_sigterm_whenever_it_comes():
    ends = []

    def work():
        for _ in range(100):
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            # as early as can be: often before the child's interpreter is ready
            os.kill(child, signal.SIGTERM)
            ends.append(os.waitpid(child, 0)[1])

    run(work)
    assert ends == [signal.SIGTERM] * 100


@pytest.mark.parametrize(
    ("first", "status", "said"),
    [(signal.SIGTERM, 2, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
@pytest.mark.parametrize("more", [signal.SIGTERM, signal.SIGINT])
def test_cleaning_up_is_not_disturbed_by_more_signals(first, status, said, more, capsys):
    done = []

    def work():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            os.kill(os.getpid(), first)
        finally:
            if first == signal.SIGTERM:
                os.kill(os.getpid(), more)
            done.append("cleaned up")

    with pytest.MonkeyPatch.context() as patch:
        written = running._written
        # while the last line is made
        patch.setattr(running, "_written", lambda: os.kill(os.getpid(), more) or written())
        with pytest.raises(typer.Exit) as ended:
            run(work)
    assert ended.value.exit_code == status
    assert done == ["cleaned up"]
    assert capsys.readouterr().err == f"fp8kv: {said}; nothing was written\n"


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


def test_sigterm_while_an_error_is_told_is_one_line_too(capsys, monkeypatch):
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
