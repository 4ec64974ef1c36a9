"""Paths that hold no scales themselves, or lead nowhere: the error says where they are, or what to do."""

import json
import shutil

import pytest
from command_line import calibrate, fp8kv, one_line_error, ran, succeeded

from calib.data.loading import dataset_key
from calib.errors import InputError
from calib.files.cache_folder import cache_folder
from calib.files.stored_scales import read_scales
from calib.formats.directory import local_directory
from calib.transfer.hidden_paths import _spellings

FORMATS = ("vllm", "tgi", "json", "fp8kv")
NOWHERE = "~nobody-of-this-name/x"


@pytest.fixture(scope="module")
def several(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("calibrated") / "several"
    succeeded(calibrate(model, "-o", out, *(f"--format={name}" for name in FORMATS)))
    return out


def test_the_directories_of_several_formats_are_named(several, model, tmp_path):
    places = {"DIR": several, "ONE": several / "vllm", "OUT": tmp_path / "out", "MODEL": model}
    inside = [f"'{several / name}'" for name in FORMATS]
    for command in (
        "inspect DIR",
        "verify ONE --against DIR",
        "compare DIR ONE",
        "merge ONE DIR -o OUT",
        "repair ONE --stats DIR -o OUT",
        "convert DIR --to tgi -o OUT",
        "generate MODEL w5 --scales DIR",
        "eval MODEL --scales DIR",
        "calibrate DIR -o OUT",
    ):
        done = fp8kv(*(places.get(word, word) for word in command.split()))
        one_line_error(done, f"'{several}' ", "several formats", f"give {', '.join(inside)}")
    assert not (tmp_path / "out").exists()


def test_scales_without_weights_are_told_from_no_model(several, model, tmp_path):
    out, new, empty = several / "fp8kv", tmp_path / "new", tmp_path / "empty"
    recipe = out / "fp8kv_calibration.json"
    for command in (("convert", out, "--to", "vllm"), ("repair", out, "--stats", out), ("strip", out)):
        said = f"fp8kv calibrate MODEL --recipe {recipe} --format"
        one_line_error(fp8kv(*command, "-o", new), f"'{out}' holds a calibration and no model", said)
    ran("calibrate", model, "--recipe", recipe, "--format", "vllm", "--device", "cpu", "-o", new)
    empty.mkdir()
    done = fp8kv("convert", empty, "--to", "tgi", "-o", tmp_path / "out")
    one_line_error(done, f"'{empty}' has no config.json: it is not a model directory")
    (empty / "vllm").mkdir()  # no calibration
    done = fp8kv("inspect", empty)
    one_line_error(done, "holds no model")
    assert "formats" not in done.stderr


def test_a_json_file_alone_is_converted_beside_a_model(model, several, tmp_path):
    alone, both = tmp_path / "alone", shutil.copytree(model, tmp_path / "both")
    alone.mkdir()
    for directory in (alone, both):
        shutil.copy(several / "json" / "kv_cache_scales.json", directory)
    done = fp8kv("convert", alone, "--to", "tgi", "-o", tmp_path / "out")
    one_line_error(done, "holds kv_cache_scales.json and no model", "copy of the model's directory")
    ran("convert", both, "--to", "tgi", "-o", tmp_path / "out")  # and so it is
    factors = json.loads((both / "kv_cache_scales.json").read_text())["kv_cache"]["scaling_factor"]["0"]
    found = [layer.k[0] for layer in read_scales(tmp_path / "out").layers]
    assert found == pytest.approx([*factors.values()])


def test_a_user_without_a_home_is_one_line(model, monkeypatch, tmp_path):
    for command in (
        ("calibrate", model, "-o", tmp_path / "out", "--dataset", NOWHERE),
        ("apply", NOWHERE, model, "-o", tmp_path / "out"),
        ("bench", NOWHERE),
        ("eval", model, "-o", tmp_path / "out", "--tasks", f"{NOWHERE}.yaml"),
    ):
        one_line_error(fp8kv(*command), f"'{NOWHERE}", "this user has no home folder; give a full path")
    assert not (tmp_path / "out").exists()
    for function in (dataset_key, local_directory):
        with pytest.raises(InputError, match="this user has no home folder"):
            function(NOWHERE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", NOWHERE)
    assert cache_folder("HF_HUB_CACHE") == tmp_path / NOWHERE
    assert _spellings(NOWHERE) == [NOWHERE]
