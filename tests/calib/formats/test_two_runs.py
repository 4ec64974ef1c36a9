"""Two runs into one output: the second is refused at once, and nothing is replaced unasked."""

import errno
import fcntl
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from command_line import fp8kv, one_line_error
from engine_fixtures import make_scales

from calib.errors import InputError
from calib.files import atomic
from calib.files.atomic import atomic_directory, claimed
from calib.formats.directory import check_output
from calib.job import run
from calib.progress import Progress
from calib.recipe import load_recipe

SMALL = {"data.dataset": "random", "data.samples": 4, "data.seq_len": 16, "device": "cpu"}


def calibrate(model, out=None, *, at=None, then=lambda: None, seed=1, **options):
    """Calibrate, and call `then` when the stage `at` begins."""
    progress = Progress(lambda name, total, unit: then() if name == at else None)
    recipe = load_recipe(None, {**SMALL, "data.seed": seed})
    return run(str(model), recipe, out, progress=progress, **options)


def seed_of(out):
    return json.loads((out / "fp8kv_calibration.json").read_text())["recipe"]["data"]["seed"]


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_second_run_is_refused_before_it_measures(overwrite, tiny_directory, tmp_path):
    out = tmp_path / "out"
    if overwrite:
        calibrate(tiny_directory, out, seed=7)

    def second():
        with pytest.raises(InputError, match=f"another run is writing '{out}'; wait for it"):
            calibrate(tiny_directory, out, seed=2, overwrite=overwrite)

    calibrate(tiny_directory, out, at="calibrate", then=second, overwrite=overwrite)
    assert seed_of(out) == 1
    assert names(tmp_path) == ["out", "tiny-llama"]


def test_a_second_run_in_place_is_refused(tiny_directory, tmp_path):
    def second():
        with pytest.raises(InputError, match="another run is writing"):
            calibrate(tiny_directory, seed=2, in_place=True)

    calibrate(tiny_directory, at="calibrate", then=second, in_place=True)
    assert seed_of(tiny_directory) == 1
    assert names(tmp_path) == ["tiny-llama", "tiny-llama.before-fp8kv"]


def test_the_progress_of_the_first_run_stays(tiny_directory, tmp_path):
    saved = tmp_path / ".out.rank0.progress"

    def second(_tokens):
        before = saved.exists() and saved.read_bytes()
        with pytest.raises(InputError, match="another run is writing"):
            calibrate(tiny_directory, tmp_path / "out", seed=2)
        seen.append(before == (saved.exists() and saved.read_bytes()) and bool(before))

    seen = []
    each = {"data.batch_size": 1, "save_minutes": 0}
    recipe = load_recipe(None, {**SMALL, **each})
    run(str(tiny_directory), recipe, tmp_path / "out", progress=Progress(on_advance=second))
    assert seen[-1]


@pytest.mark.parametrize("locks", [True, False])
def test_what_appears_meanwhile_is_left_as_it_is(locks, tiny_directory, tmp_path, monkeypatch):
    out = tmp_path / "out"
    if not locks:
        without_locks(monkeypatch)

    def another():
        out.mkdir()
        (out / "thesis.txt").write_text("x")

    with pytest.raises(InputError, match=f"'{out}' was written by another program"):
        calibrate(tiny_directory, out, at="write", then=another)
    assert names(out) == ["thesis.txt"]
    assert names(tmp_path) == ["out", "tiny-llama"]


@pytest.mark.parametrize("swaps", [True, False])
def test_overwriting_replaces_what_it_was_asked_to_and_nothing_newer(
    swaps, tiny_directory, tmp_path, monkeypatch
):
    without_locks(monkeypatch)
    if not swaps:
        monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    out = tmp_path / "out"
    calibrate(tiny_directory, out, seed=7)

    def second():
        calibrate(tiny_directory, out, seed=2, overwrite=True)

    with pytest.raises(InputError, match="was written by another program"):
        calibrate(tiny_directory, out, at="calibrate", then=second, overwrite=True)
    assert seed_of(out) == 2
    assert names(tmp_path) == ["out", "tiny-llama"]


def test_a_run_killed_between_two_renames_loses_nothing(tmp_path, monkeypatch):
    out, gone = tmp_path / "out", 2**22 + 1  # no process has that number
    old = tmp_path / f".out.{socket.gethostname()}-{gone}.old"
    old.mkdir()
    (old / "kept").touch()
    with claimed(out, overwrite=True):
        assert names(out) == ["kept"]


def test_a_rename_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    out, rename = tmp_path / "out", Path.rename
    out.mkdir()
    (out / "kept").touch()

    def failing(self, target):
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with (
        pytest.raises(InputError, match="Input/output error"),
        atomic_directory(out, overwrite=True),
    ):
        pass
    assert names(out) == ["kept"]


def without_locks(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)


def test_an_output_that_was_removed_meanwhile_is_written(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("x")
    with atomic_directory(out, overwrite=True) as scratch:
        (out / "old").unlink()
        out.rmdir()
        (scratch / "new").write_text("x")
    assert names(out) == ["new"]


def test_a_failure_leaves_no_parents_behind_and_a_success_keeps_them(tmp_path):
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "a" / "b" / "out"):
        raise KeyboardInterrupt
    assert names(tmp_path) == []
    with atomic_directory(tmp_path / "a" / "b" / "out"):
        pass
    assert names(tmp_path / "a" / "b") == ["out"]


def test_a_lock_that_went_while_it_was_waited_for_is_taken_anew(tmp_path, monkeypatch):
    lock, real = tmp_path / ".out.lock", fcntl.flock
    taken = []

    def flock(descriptor, operation):
        if not taken:  # its holder ends between our opening and our locking it
            lock.unlink()
        taken.append(real(descriptor, operation))

    monkeypatch.setattr(fcntl, "flock", flock)
    with claimed(tmp_path / "out"):
        assert len(taken) == 2
        assert lock.exists()
        with pytest.raises(InputError, match="another run"), claimed(tmp_path / "out"):
            pass
    assert names(tmp_path) == []


def test_a_link_to_an_output_is_that_output(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with (
        claimed(tmp_path / "real"),
        pytest.raises(InputError, match="another run"),
        claimed(tmp_path / "link"),
    ):
        pass
    with atomic_directory(tmp_path / "link") as scratch:
        (scratch / "new").write_text("x")
    assert names(tmp_path / "real") == ["new"]
    assert names(tmp_path) == ["link", "real"]


@pytest.mark.parametrize("place", ["file/out", "dangling", "loop", "/proc/out", "file"])
def test_where_nothing_can_be_written_is_known_at_once(place, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    out = tmp_path / place
    with pytest.raises(InputError, match=f"cannot write '{out}'") as caught, claimed(out):
        pass
    assert "choose another" in str(caught.value)
    assert names(tmp_path) == ["dangling", "file", "loop"]


def test_a_name_that_no_file_may_have_is_one_line(tmp_path):
    out = tmp_path / ("x" * 300)
    with pytest.raises(InputError, match="File name too long; choose another -o"):
        check_output(out, tmp_path / "source", overwrite=False)
    with pytest.raises(InputError, match="File name too long; choose another"), claimed(out):
        pass


def test_processes_that_need_the_same_model_wait_for_it(tmp_path):
    steps = []

    def second():
        with claimed(tmp_path / "out", wait=True):
            steps.append("second")

    waiting = threading.Thread(target=second)
    with claimed(tmp_path / "out"):
        waiting.start()
        waiting.join(timeout=0.5)  # longer than a run is patient that does not wait
        assert waiting.is_alive()
        steps.append("first")
    waiting.join(timeout=30)
    assert steps == ["first", "second"]


def test_the_lock_of_a_killed_run_holds_up_nobody(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from calib.files.atomic import claimed\n"
        "with claimed(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "out"])
    assert done.returncode == -signal.SIGKILL
    assert names(tmp_path) == [".out.lock"]
    with claimed(tmp_path / "out"):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("place", ["file/out", "dangling"])
@pytest.mark.parametrize("command", ["calibrate", "eval", "stress", "convert --to json", "strip"])
def test_every_command_knows_it_before_it_loads(command, place, tiny_directory, tmp_path, monkeypatch):
    for module in ("job", "evaluate.run", "rescale.proof"):
        monkeypatch.setattr(f"calib.{module}.load_model", lambda *_: pytest.fail("it was loaded"))
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("gone")
    monkeypatch.setattr("calib.transfer.convert.existing_scales", lambda *_: (make_scales(), ()))
    done = fp8kv(*command.split(), tiny_directory, "-o", tmp_path / place)
    one_line_error(done, f"cannot write '{tmp_path / place}'", "choose another output")
    assert names(tmp_path) == ["dangling", "file", "tiny-llama"]
