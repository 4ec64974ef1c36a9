"""Output directories are whole or absent, and one run at a time writes each."""

import errno
import fcntl
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from calib.errors import InputError
from calib.files import atomic
from calib.files.atomic import atomic_directory, claimed, place_shard

NOBODY = 2**22 + 1  # no process has that number


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def write(out, name="new"):
    with atomic_directory(out, overwrite=True) as scratch:
        (scratch / name).write_text("x")


@pytest.mark.parametrize("can_swap", [True, False])
def test_overwriting_replaces_the_whole_directory(can_swap, tmp_path, monkeypatch):
    if not can_swap:  # two names in one step
        monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    out = tmp_path / "out"
    write(out, "stale")
    write(out)
    assert (names(out), names(tmp_path)) == (["new"], ["out"])
    with atomic_directory(out, overwrite=True) as scratch:  # or is gone meanwhile
        (out / "new").unlink()
        out.rmdir()
        (scratch / "newer").write_text("x")
    assert names(out) == ["newer"]


def test_a_failure_leaves_no_parents_or_what_was_there(tmp_path, monkeypatch):
    out = tmp_path / "a" / "b" / "out"
    with pytest.raises(KeyboardInterrupt), atomic_directory(out) as scratch:
        (scratch / "half").write_text("x")
        raise KeyboardInterrupt
    said = r"cannot write '\S+/out': No space left on device; nothing was left behind; choose"
    with pytest.raises(InputError, match=said), atomic_directory(out):
        raise OSError(errno.ENOSPC, "No space left on device", "a", None, "b")
    assert names(tmp_path) == []
    write(out, "kept")
    assert names(out.parent) == ["out"]
    rename = Path.rename

    def failing(self, target):
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(InputError, match="Input/output error"):
        write(out)
    assert names(out) == ["kept"]


def left_behind(directory, process, suffix):
    left = directory / f".out.{socket.gethostname()}-{process}.{suffix}"
    left.mkdir()
    (left / "kept").touch()
    return left


@pytest.mark.parametrize("suffix", ["partial", "old"])
def test_what_a_killed_process_left_behind_goes_with_the_next_and_nothing_is_lost(suffix, tmp_path):
    left_behind(tmp_path, NOBODY, suffix)
    running = left_behind(tmp_path, os.getppid(), suffix)
    with claimed(tmp_path / "out", overwrite=True):
        if suffix == "old":  # it was killed between two renames
            assert names(tmp_path / "out") == ["kept"]
    write(tmp_path / "out")
    assert names(tmp_path) == [running.name, "out"]


def test_a_lock_that_went_while_it_was_waited_for_is_taken_anew(tmp_path, monkeypatch):
    lock, real, taken = tmp_path / ".out.lock", fcntl.flock, []
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")  # which is that output

    def flock(descriptor, operation):
        if not taken:  # its holder ends between our opening and our locking it
            lock.unlink()
        taken.append(real(descriptor, operation))

    monkeypatch.setattr(fcntl, "flock", flock)
    with claimed(tmp_path / "out"):
        assert len(taken) == 2
        assert lock.exists()
        for name in ("out", "link"):
            with pytest.raises(InputError, match="another run"), claimed(tmp_path / name):
                pass
    write(tmp_path / "out")
    write(tmp_path / "link")
    assert (names(tmp_path / "out"), names(tmp_path)) == (["new"], ["link", "out"])


@pytest.mark.parametrize("place", ["file/out", "dangling", "loop", "/proc/out", "file", "x" * 300])
def test_where_nothing_can_be_written_is_known_at_once(place, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    out = tmp_path / place
    with pytest.raises(InputError, match=f"cannot write '{out}'") as caught, claimed(out):
        pass
    assert "choose another" in str(caught.value)
    assert names(tmp_path) == ["dangling", "file", "loop"]


def test_processes_that_need_the_same_model_wait_for_it_and_a_killed_one_holds_up_nobody(tmp_path):
    steps = []

    def second():
        with claimed(tmp_path / "out", wait=True):
            steps.append("second")

    waiting = threading.Thread(target=second)
    with claimed(tmp_path / "out"):
        waiting.start()
        waiting.join(timeout=0.3)  # longer than a run is patient that does not wait
        assert waiting.is_alive()
        steps.append("first")
    waiting.join(timeout=30)
    assert steps == ["first", "second"]
    if (killed := os.fork()) == 0:
        with claimed(tmp_path / "out"):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == -signal.SIGKILL
    assert names(tmp_path) == [".out.lock"]
    with claimed(tmp_path / "out"):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("can_clone", [True, False])
def test_shards_are_cloned_or_sent_and_links_across_file_systems_are_copies(can_clone, tmp_path, monkeypatch):
    (tmp_path / "source").write_bytes(bytes(range(250)))
    sent, told, send = [], [], os.sendfile

    def refuse(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    def clone(read, write, count):
        return os.write(write, os.read(read, count)) if can_clone else refuse()

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "copy_file_range", clone)
    monkeypatch.setattr(os, "sendfile", lambda *given: sent.append(send(*given)) or sent[-1])
    monkeypatch.setattr(atomic, "_CHUNK", 100)
    for how in ("link", "copy"):
        place_shard(tmp_path / "source", tmp_path / how, set(), how, lambda *step: told.append(step))
        assert (tmp_path / how).read_bytes() == bytes(range(250))
    assert sent == [*([0] if can_clone else [100, 100, 50, 0])] * 2
    assert told == [("source", more, 250) for more in (100, 100, 50)] * 2
