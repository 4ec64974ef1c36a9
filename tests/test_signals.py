"""Processes that a command forks end on SIGTERM at once, so nobody waits for them forever."""

import os
import signal

import pytest

from calib.commands.running import run


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


def test_a_command_leaves_the_handlers_as_they_were():
    before = signal.getsignal(signal.SIGTERM)
    run(lambda: None)
    assert signal.getsignal(signal.SIGTERM) is before
