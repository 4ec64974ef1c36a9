"""Weights that change while a command reads them never get the scales of the old ones."""

import os
import shutil
from pathlib import Path

import pytest
from command_line import SMALL, calibrate, fp8kv, one_line_error, succeeded

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


@pytest.mark.parametrize(
    ("module", "name", "change", "command"),
    [
        (job, "_prepare", replaced, "calibrate MODEL"),
        (job, "_prepare", rewritten, "calibrate MODEL"),
        (job, "_prepare", Path.unlink, "calibrate MODEL"),
        (job, "_prepare", replaced, "calibrate MODEL --format json"),  # without weights in the output
        (job, "calibrate_layerwise", replaced, "calibrate MODEL --offload layerwise"),
        (resume, "calibrate", replaced, "calibrate MODEL"),
        (output, "save_stats", replaced, "calibrate MODEL"),  # at the last moment
        (pipeline, "write_weights", replaced, "stress MODEL"),
        (convert, "existing_scales", replaced, "convert OLD --to tgi"),
        (convert, "existing_scales", replaced, "convert OLD --to json"),
        (strip, "_write_weights", replaced, "strip OLD"),
        (repair, "open_calibration", replaced, "repair OLD --stats OLD"),
        (merge, "_check_counts", replaced, "merge OLD OTHER"),
    ],
)
def test_nothing_is_written(after, module, name, change, command, tiny_directory, tmp_path):
    places = {"MODEL": tiny_directory, "OLD": tmp_path / "old", "OTHER": tmp_path / "other"}
    for seed, name_of_output in enumerate(places.keys() & {*command.split()} - {"MODEL"}):
        calibrate(tiny_directory, "-o", places[name_of_output], "--set", f"data.seed={seed}")
    after(module, name, places["OLD"] if "OLD" in command and module is not merge else tiny_directory, change)
    small = SMALL if command.startswith("calibrate") else ()
    done = fp8kv(*(places.get(word, word) for word in command.split()), "-o", tmp_path / "out", *small)
    one_line_error(done, "model", "has changed since", "nothing was written")
    assert not [*tmp_path.glob("out"), *tmp_path.glob(".*partial")]


def test_nothing_is_written_in_place(after, tiny_directory, tmp_path):
    after(output, "write_checkpoint", tiny_directory)
    before = sorted(path.name for path in tiny_directory.iterdir())
    one_line_error(calibrate(tiny_directory, "--in-place"), "has changed since", "nothing was written")
    assert sorted(path.name for path in tiny_directory.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == [tiny_directory.name]


def test_other_links_to_the_same_weights_are_no_change(after, tiny_directory, tmp_path):
    after(job, "_prepare", tiny_directory, lambda file: os.link(file, tmp_path / "another"))
    succeeded(calibrate(tiny_directory, "-o", tmp_path / "out"))
