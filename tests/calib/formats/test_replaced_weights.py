"""Weights that change while a command reads them never get the scales of the old ones."""

import os
import shutil
from pathlib import Path

import pytest
from command_line import calibrate, fp8kv, one_line_error, succeeded

from calib import job
from calib.capture import resume
from calib.formats import output
from calib.rescale import pipeline
from calib.transfer import convert, merge, repair, strip


def replaced(file):
    """As a download does it: another file under the same name."""
    copy = file.with_name("copy")
    shutil.copy2(file, copy)
    copy.rename(file)


def rewritten(file):
    """As an editor does it: the same file, at another time."""
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(1, 1))


@pytest.fixture
def after(monkeypatch):
    """Change the weights of a directory once a function has returned."""

    def arrange(module, name, directory, change=replaced):
        original = getattr(module, name)

        def changing(*arguments, **options):
            found = original(*arguments, **options)
            for file in [*directory.glob("model-0*.safetensors"), *directory.glob("model.safetensors")]:
                change(file)
            monkeypatch.setattr(module, name, original)
            return found

        monkeypatch.setattr(module, name, changing)

    return arrange


def refuse(done, out):
    one_line_error(done, "model", "has changed since", "nothing was written")
    assert not out.exists()
    assert not [*out.parent.glob(".*partial")]


@pytest.mark.parametrize(
    ("module", "name", "change", "flags"),
    [
        (job, "_prepare", replaced, ()),
        (job, "_prepare", rewritten, ()),
        (job, "_prepare", Path.unlink, ()),
        (job, "_prepare", replaced, ("--format", "json")),  # without weights in the output
        (job, "calibrate_layerwise", replaced, ("--offload", "layerwise")),
        (resume, "calibrate", replaced, ()),
        (output, "save_stats", replaced, ()),  # at the last moment
    ],
)
def test_calibrate(after, module, name, change, flags, tiny_directory, tmp_path):
    after(module, name, tiny_directory, change)
    refuse(calibrate(tiny_directory, "-o", tmp_path / "out", *flags), tmp_path / "out")


def test_calibrate_in_place(after, tiny_directory, tmp_path):
    after(output, "write_checkpoint", tiny_directory)
    before = sorted(path.name for path in tiny_directory.iterdir())
    done = calibrate(tiny_directory, "--in-place")
    one_line_error(done, "has changed since", "nothing was written")
    assert sorted(path.name for path in tiny_directory.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == [tiny_directory.name]


@pytest.mark.parametrize(
    ("module", "name", "command"),
    [
        (convert, "existing_scales", "convert OLD --to tgi"),
        (convert, "existing_scales", "convert OLD --to json"),
        (strip, "_write_weights", "strip OLD"),
        (repair, "open_calibration", "repair OLD --stats OLD"),
    ],
)
def test_commands_that_rewrite_an_output(after, module, name, command, tiny_directory, tmp_path):
    old = tmp_path / "old"
    calibrate(tiny_directory, "-o", old)
    after(module, name, old)
    words = [old if word == "OLD" else word for word in command.split()]
    refuse(fp8kv(*words, "-o", tmp_path / "out"), tmp_path / "out")


def test_merge(after, tiny_directory, tmp_path):
    for number in "12":
        calibrate(tiny_directory, "-o", tmp_path / number, "--set", f"data.seed={number}")
    after(merge, "_check_counts", tiny_directory)
    refuse(fp8kv("merge", tmp_path / "1", tmp_path / "2", "-o", tmp_path / "out"), tmp_path / "out")


def test_stress(after, tiny_directory, tmp_path):
    after(pipeline, "write_weights", tiny_directory)
    refuse(fp8kv("stress", tiny_directory, "-o", tmp_path / "out"), tmp_path / "out")


def test_other_links_to_the_same_weights_are_no_change(after, tiny_directory, tmp_path):
    after(job, "_prepare", tiny_directory, lambda file: os.link(file, tmp_path / "another"))
    succeeded(calibrate(tiny_directory, "-o", tmp_path / "out"))
