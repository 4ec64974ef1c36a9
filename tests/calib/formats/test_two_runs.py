"""Two runs into one output: the second is refused at once, and nothing is replaced unasked."""

import errno
import json

import pytest
from command_line import fp8kv, one_line_error
from engine_fixtures import make_scales

from calib.errors import InputError
from calib.files import atomic
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


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)


@pytest.mark.parametrize("how", ["", "overwrite", "in_place"])
def test_the_second_run_is_refused_before_it_measures(how, tiny_directory, tmp_path):
    options = {how: True} if how else {}
    out, left = (
        (tiny_directory, ["tiny-llama.before-fp8kv"]) if how == "in_place" else (tmp_path / "out", ["out"])
    )
    given = None if how == "in_place" else out
    if how == "overwrite":
        calibrate(tiny_directory, out, seed=7)

    def second():
        with pytest.raises(InputError, match=f"another run is writing '{out}'; wait for it"):
            calibrate(tiny_directory, given, seed=2, **options)

    calibrate(tiny_directory, given, at="calibrate", then=second, **options)
    assert seed_of(out) == 1
    assert names(tmp_path) == sorted(["tiny-llama", *left])


def test_the_progress_of_the_first_run_stays(tiny_directory, tmp_path):
    saved = tmp_path / ".out.rank0.progress"

    def second(_tokens):
        before = saved.exists() and saved.read_bytes()
        with pytest.raises(InputError, match="another run is writing"):
            calibrate(tiny_directory, tmp_path / "out", seed=2)
        seen.append(before == (saved.exists() and saved.read_bytes()) and bool(before))

    seen = []
    recipe = load_recipe(None, {**SMALL, "data.batch_size": 2, "save_minutes": 0})
    run(str(tiny_directory), recipe, tmp_path / "out", progress=Progress(on_advance=second))
    assert seen[-1]


def test_what_appears_meanwhile_is_left_as_it_is(no_locks, tiny_directory, tmp_path):
    out = tmp_path / "out"

    def another():
        out.mkdir()
        (out / "thesis.txt").write_text("x")

    with pytest.raises(InputError, match=f"'{out}' was written by another program"):
        calibrate(tiny_directory, out, at="write", then=another)
    assert names(out) == ["thesis.txt"]
    assert names(tmp_path) == ["out", "tiny-llama"]


@pytest.mark.parametrize("swaps", [True, False])
def test_overwriting_replaces_what_it_was_asked_to_and_nothing_newer(
    swaps, no_locks, tiny_directory, tmp_path, monkeypatch
):
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


@pytest.mark.parametrize("command", ["calibrate", "eval", "stress", "convert --to json", "strip"])
def test_every_command_knows_before_it_loads_where_it_cannot_write(
    command, tiny_directory, tmp_path, monkeypatch
):
    for module in ("job", "evaluate.run", "rescale.proof"):
        monkeypatch.setattr(f"calib.{module}.load_model", lambda *_: pytest.fail("it was loaded"))
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("gone")
    monkeypatch.setattr("calib.transfer.convert.existing_scales", lambda *_: (make_scales(), ()))
    for out in (tmp_path / "file" / "out", tmp_path / "dangling"):
        done = fp8kv(*command.split(), tiny_directory, "-o", out)
        one_line_error(done, f"cannot write '{out}'", "choose another output")
    assert names(tmp_path) == ["dangling", "file", "tiny-llama"]
