"""Weights that change while a command reads them never get the scales of the old ones."""

import os
import shutil

import pytest
from command_line import calibrate, fp8kv, one_line_error

from calib import job
from calib.capture import resume
from calib.formats import output
from calib.rescale import pipeline
from calib.transfer import convert as rewrite
from calib.transfer import merge
from calib.transfer import repair as mending
from calib.transfer import strip as stripping


def replaced(file):
    """As a download does it: another file under the same name."""
    copy = file.with_name("copy")
    shutil.copy2(file, copy)
    copy.rename(file)


def rewritten(file):
    """As an editor does it: the same file, at another time."""
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(1, 1))


def gone(file):
    file.unlink()


@pytest.fixture
def after(monkeypatch):
    """Change the weights of a directory once a function has returned."""

    def arrange(module, name, directory, change=replaced):
        original = getattr(module, name)

        def changing(*arguments, **options):
            found = original(*arguments, **options)
            for file in directory.glob("model-0*.safetensors"):
                change(file)
            for file in directory.glob("model.safetensors"):
                change(file)
            monkeypatch.setattr(module, name, original)
            return found

        monkeypatch.setattr(module, name, changing)

    return arrange


def refuse(done, out):
    one_line_error(done, "model", "has changed since", "nothing was written")
    assert not out.exists()
    assert not [*out.parent.glob(".*partial")]


@pytest.mark.parametrize("change", [replaced, rewritten, gone])
@pytest.mark.parametrize("moment", ["load", "measure"])
def test_calibrate(after, moment, change, tiny_directory, tmp_path):
    module, name = {"load": (job, "_prepare"), "measure": (resume, "calibrate")}[moment]
    after(module, name, tiny_directory, change)
    refuse(calibrate(tiny_directory, "-o", tmp_path / "out"), tmp_path / "out")


@pytest.mark.parametrize("name", ["json", "fp8kv"])
def test_calibrate_without_weights_in_the_output(after, name, tiny_directory, tmp_path):
    after(job, "_prepare", tiny_directory)
    done = calibrate(tiny_directory, "-o", tmp_path / "out", "--format", name)
    refuse(done, tmp_path / "out")


def test_calibrate_layer_by_layer(after, tiny_directory, tmp_path):
    after(job, "calibrate_layerwise", tiny_directory)
    done = calibrate(tiny_directory, "-o", tmp_path / "out", "--offload", "layerwise")
    refuse(done, tmp_path / "out")


@pytest.mark.parametrize(("module", "name"), [(output, "summarize"), (output, "save_stats")])
def test_calibrate_at_the_last_moment(after, module, name, tiny_directory, tmp_path):
    after(module, name, tiny_directory)
    refuse(calibrate(tiny_directory, "-o", tmp_path / "out"), tmp_path / "out")


@pytest.mark.parametrize(("module", "name"), [(resume, "calibrate"), (output, "write_checkpoint")])
def test_calibrate_in_place(after, module, name, tiny_directory, tmp_path):
    after(module, name, tiny_directory)
    before = sorted(path.name for path in tiny_directory.iterdir())
    done = calibrate(tiny_directory, "--in-place")
    one_line_error(done, "has changed since", "nothing was written")
    assert sorted(path.name for path in tiny_directory.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == [tiny_directory.name]


def test_merge(after, tiny_directory, tmp_path):
    for number in "12":
        calibrate(tiny_directory, "-o", tmp_path / number, "--set", f"data.seed={number}")
    after(merge, "_check_counts", tiny_directory)
    done = fp8kv("merge", tmp_path / "1", tmp_path / "2", "-o", tmp_path / "out")
    refuse(done, tmp_path / "out")


@pytest.mark.parametrize("to", ["tgi", "json"])
def test_convert(after, to, tiny_directory, tmp_path):
    calibrate(tiny_directory, "-o", tmp_path / "old")
    after(rewrite, "existing_scales", tmp_path / "old")
    refuse(fp8kv("convert", tmp_path / "old", "--to", to, "-o", tmp_path / "out"), tmp_path / "out")


def test_strip(after, tiny_directory, tmp_path):
    calibrate(tiny_directory, "-o", tmp_path / "old")
    after(stripping, "_write_weights", tmp_path / "old")
    refuse(fp8kv("strip", tmp_path / "old", "-o", tmp_path / "out"), tmp_path / "out")


def test_repair(after, tiny_directory, tmp_path):
    old = tmp_path / "old"
    calibrate(tiny_directory, "-o", old)
    after(mending, "open_calibration", old)
    done = fp8kv("repair", old, "--stats", old, "-o", tmp_path / "out")
    refuse(done, tmp_path / "out")


def test_stress(after, tiny_directory, tmp_path):
    after(pipeline, "write_weights", tiny_directory)
    refuse(fp8kv("stress", tiny_directory, "-o", tmp_path / "out"), tmp_path / "out")


def test_a_link_to_weights_that_now_leads_elsewhere(after, tiny_directory, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for name in ("old", "new"):
        shutil.copy2(tiny_directory / "model.safetensors", blobs / name)

    def point(file, name):
        file.unlink()
        file.symlink_to(blobs / name)

    point(tiny_directory / "model.safetensors", "old")
    after(job, "_prepare", tiny_directory, lambda file: point(file, "new"))
    refuse(calibrate(tiny_directory, "-o", tmp_path / "out"), tmp_path / "out")


def test_other_links_to_the_same_weights_are_no_change(after, tiny_directory, tmp_path):
    after(job, "_prepare", tiny_directory, lambda file: os.link(file, tmp_path / "another"))
    done = calibrate(tiny_directory, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
