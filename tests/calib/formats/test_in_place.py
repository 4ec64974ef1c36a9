"""Scales added to a model's own directory: all or nothing, and what is replaced is kept."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from calib.errors import InputError
from calib.files.names import SCALES_SHARD, STATS_FILE
from calib.formats import output
from calib.job import run
from calib.recipe import load_recipe

SMALL = {"data.dataset": "random", "data.samples": 4, "data.seq_len": 16, "device": "cpu"}
PLACED = "model-00001-of-00001.safetensors"


def calibrate_in_place(directory, out=None, **changes):
    return run(str(directory), load_recipe(None, {**SMALL, **changes}), out, in_place=True)


def contents(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


@pytest.fixture
def model(tiny_directory):
    """With a file in a hidden directory, and one that no output of ours would have."""
    for name in (".git/HEAD", "pytorch_model.bin"):
        (tiny_directory / name).parent.mkdir(exist_ok=True)
        (tiny_directory / name).write_text("x")
    return tiny_directory


def test_scales_are_those_of_an_output_elsewhere_and_what_is_replaced_is_kept(model, tmp_path):
    run(str(model), load_recipe(None, SMALL), tmp_path / "out")
    before, weights = contents(model), (model / "model.safetensors").stat().st_ino
    first = calibrate_in_place(model)
    after, kept = contents(model), contents(first.backup)
    assert after[SCALES_SHARD] == contents(tmp_path / "out")[SCALES_SHARD]
    index = json.loads(after["model.safetensors.index.json"])
    assert set(index["weight_map"].values()) == {PLACED, SCALES_SHARD}
    assert first.backup == model.parent / f"{model.name}.before-fp8kv"
    assert kept == {name: before[name] for name in ("config.json", "model.safetensors")}
    added = {"README.md", SCALES_SHARD, STATS_FILE, "fp8kv_calibration.json", "fp8kv_source/config.json"}
    added |= {"model.safetensors.index.json", PLACED}
    assert after.keys() == before.keys() - {"model.safetensors"} | added
    assert {name: after[name] for name in before.keys() - kept.keys()}.items() <= before.items()
    assert (model / PLACED).stat().st_ino == weights
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["out", model.name, first.backup.name])
    # a second time keeps both backups
    second = calibrate_in_place(model, **{"data.seed": 7})
    assert second.backup == model.parent / f"{model.name}.before-fp8kv-2"
    assert "quantization_config" not in json.loads((first.backup / "config.json").read_text())
    assert "fp8kv_calibration.json" in contents(second.backup)


def test_a_linked_shard_stays_a_link(model, tmp_path):
    stored = tmp_path / "stored.safetensors"
    (model / "model.safetensors").rename(stored)
    (model / "model.safetensors").symlink_to("../stored.safetensors")
    calibrate_in_place(model)
    placed = model / PLACED
    assert placed.is_symlink()
    assert placed.samefile(stored)


def test_a_failure_changes_nothing(model, monkeypatch):
    before = contents(model.parent)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(output, "back_up", Mock(side_effect=full))
    with pytest.raises(InputError, match="No space left on device; nothing was left behind"):
        calibrate_in_place(model)
    assert contents(model.parent) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"export.formats": ["vllm", "modelopt"]}, "one format that is a checkpoint, not vllm, mo"),
        ({"export.formats": ["json"]}, "one format that is a checkpoint, not json"),
        ({"export.weights": "none"}, "leaves the weights where they are; 'none' needs -o"),
        ({"out": Path("elsewhere")}, "leave -o, --overwrite away"),
    ],
)
def test_what_cannot_be_in_place_is_refused(changes, message, model):
    with pytest.raises(InputError, match=message):
        calibrate_in_place(model, **changes)
    with pytest.raises(InputError, match="which 'builtin:smollm2' is not; use -o"):
        calibrate_in_place("builtin:smollm2")
