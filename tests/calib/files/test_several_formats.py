"""A directory that holds no scales itself: the error says where they are, or what to do."""

import json
import shutil

import pytest
from command_line import calibrate, fp8kv, one_line_error
from families import save_model, tiny_model

from calib.files.stored_scales import read_scales


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tiny_model("llama"), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def several(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("calibrated") / "several"
    formats = ("--format", "vllm", "--format", "tgi", "--format", "json")
    assert calibrate(model, "-o", out, *formats).exit_code == 0
    return out


@pytest.mark.parametrize(
    "command",
    [
        "inspect DIR",
        "verify DIR",
        "verify ONE --against DIR",
        "compare DIR ONE",
        "compare ONE DIR",
        "merge ONE DIR -o OUT",
        "merge DIR ONE -o OUT",
        "repair DIR --stats ONE -o OUT",
        "repair ONE --stats DIR -o OUT",
        "convert DIR --to tgi -o OUT",
        "strip DIR -o OUT",
        "generate DIR w5",
        "generate MODEL w5 --scales DIR",
        "eval MODEL --scales DIR",
        "calibrate DIR -o OUT",
    ],
)
def test_the_directories_of_several_formats_are_named(command, several, model, tmp_path):
    places = {"DIR": several, "ONE": several / "vllm", "OUT": tmp_path / "out", "MODEL": model}
    done = fp8kv(*(places.get(word, word) for word in command.split()))
    inside = [f"'{several / name}'" for name in ("vllm", "tgi", "json")]
    one_line_error(done, f"'{several}' ", "several formats", f"give {', '.join(inside)}")
    assert not (tmp_path / "out").exists()


def test_a_directory_of_directories_that_are_no_calibrations_names_none(tmp_path):
    (tmp_path / "vllm").mkdir()
    done = fp8kv("inspect", tmp_path)
    one_line_error(done, "holds no model")
    assert "formats" not in done.stderr


@pytest.mark.parametrize("layout", ["json", "fp8kv"])
@pytest.mark.parametrize("command", ["convert", "repair", "strip"])
def test_scales_without_weights_are_told_from_no_model(command, layout, model, tmp_path):
    out = tmp_path / "out"
    assert calibrate(model, "-o", out, "--format", layout).exit_code == 0
    flags = {"convert": ("--to", "vllm"), "repair": ("--stats", out)}.get(command, ())
    done = fp8kv(command, out, *flags, "-o", tmp_path / "new")
    one_line_error(
        done,
        f"'{out}' holds a calibration and no model",
        f"fp8kv calibrate MODEL --recipe {out}/fp8kv_calibration.json --format",
    )
    # and so it is
    flags = ("--format", "vllm", "--device", "cpu")
    again = ("calibrate", model, "--recipe", out / "fp8kv_calibration.json", *flags)
    assert fp8kv(*again, "-o", tmp_path / "new").exit_code == 0


def test_a_json_file_alone_is_converted_beside_a_model(model, several, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(several / "json" / "kv_cache_scales.json", alone)
    done = fp8kv("convert", alone, "--to", "tgi", "-o", tmp_path / "out")
    one_line_error(done, "holds kv_cache_scales.json and no model", "copy of the model's directory")
    # and so it is
    shutil.copytree(model, tmp_path / "both")
    shutil.copy(alone / "kv_cache_scales.json", tmp_path / "both")
    done = fp8kv("convert", tmp_path / "both", "--to", "tgi", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    found = read_scales(tmp_path / "out").layers
    factors = json.loads((alone / "kv_cache_scales.json").read_text())["kv_cache"]
    assert [layer.k[0] for layer in found] == [
        pytest.approx(scale) for scale in factors["scaling_factor"]["0"].values()
    ]


def test_a_directory_with_neither_is_no_model(tmp_path):
    done = fp8kv("convert", tmp_path, "--to", "tgi", "-o", tmp_path.parent / "out")
    one_line_error(done, f"'{tmp_path}' has no config.json: it is not a model directory")
