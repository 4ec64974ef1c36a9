"""What `fp8kv apply` reads and writes: in place, marks, reports, statistics, cards."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from apply_cases import (
    applied,
    calibrated,
    copy,
    refused,
    rescale_values,
    scales,
)
from coded_forms import FORMS
from command_line import fp8kv, one_line_error
from quantized_models import edit_json

from calib.models.sources import find_model
from calib.same_model.marks import Marks
from calib.scales.stats import KVStats
from calib.scales.stats_file import load_stats, save_stats


def test_in_place_keeps_weights_and_backs_up_the_rest(model, measured, tmp_path):
    other = FORMS["compressed-fp8"].quantise(copy(model, tmp_path / "other"), tmp_path / "plain")
    weights = (other / "model.safetensors").stat().st_ino
    done = fp8kv("apply", measured, other, "--in-place")
    assert done.exit_code == 0, done.stderr
    assert scales(other) == scales(measured)
    assert (other / "model-00001-of-00001.safetensors").stat().st_ino == weights
    assert (tmp_path / "other.before-fp8kv" / "config.json").exists()
    one_line_error(fp8kv("apply", measured, other, "--in-place", "-o", tmp_path / "o"), "leave -o")


def test_scales_of_another_strategy_and_from_the_statistics_alone(model, measured, tmp_path):
    other = copy(model, tmp_path / "other")
    out = applied(measured / "fp8kv_stats.safetensors", other, tmp_path / "out", "--strategy", "attn_head")
    expected = calibrated(model, tmp_path / "expected", "--strategy", "attn_head")
    assert scales(out) == scales(expected)
    again = applied(out, other, tmp_path / "again", "--strategy", "tensor", "--format", "tgi")
    assert scales(again) == scales(measured)


def without_marks(measured, path):
    shutil.copytree(measured, path)
    file = path / "fp8kv_calibration.json"
    report = json.loads(file.read_text())
    del report["marks"]
    file.write_text(json.dumps(report))
    return path


def test_an_output_without_marks(model, measured, tmp_path):
    old, other = without_marks(measured, tmp_path / "old"), copy(model, tmp_path / "other")
    assert scales(applied(old, other, tmp_path / "from-its-weights")) == scales(measured)
    (old / "model-00001-of-00001.safetensors").unlink()
    refused(old, other, tmp_path / "out", "neither marks nor weights", "give that model with --base")
    changed = copy(model, tmp_path / "changed", rescale_values, {"rope_theta": 7.0})
    wrong = ("--base", changed)
    for given in (old, measured):
        refused(given, other, tmp_path / "out", "is of another model or revision than", flags=wrong)
    out = applied(old, other, tmp_path / "from-the-base", "--base", model)
    assert scales(out) == scales(measured)
    refused(old, changed, tmp_path / "out", "do not fit", flags=("--base", model))


def edited(measured, path, **changes):
    """A calibration whose report somebody changed."""
    shutil.copytree(measured, path)
    edit_json(path / "fp8kv_calibration.json", **changes)
    return path


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"fp8kv_calibration": 2}, "not of this version of fp8kv"),
        ({"measured_on": {"model": "m"}}, "what was calibrated (measured_on.checkpoint: "),
        ({"warnings": "none"}, "what was calibrated (warnings: "),
        ({"dataset": {}}, "what was calibrated (dataset.source: "),
    ],
)
def test_a_damaged_report(change, phrase, model, measured, tmp_path):
    refused(edited(measured, tmp_path / "broken", **change), model, tmp_path / "out", phrase)


def test_a_recipe_that_the_statistics_do_not_serve(model, measured, tmp_path):
    recipe = json.loads((measured / "fp8kv_calibration.json").read_text())["recipe"]
    recipe["observer"]["name"] = "mse"
    given = edited(measured, tmp_path / "given", recipe=recipe)
    refused(given, model, tmp_path / "out", "hold no histogram; calibrate with observer mse")


def test_statistics_that_somebody_changed(model, measured, tmp_path):
    given = shutil.copytree(measured, tmp_path / "given")
    stats = load_stats(given)
    name, layer = next(iter(stats.layers.items()))
    fields = ("amax", "curve", "positions", "tail")
    v = replace(layer.v, **{field: getattr(layer.v, field) * 2 for field in fields})
    louder = replace(layer, v=v)
    (given / "fp8kv_stats.safetensors").unlink()
    save_stats(KVStats({**stats.layers, name: louder}), given / "fp8kv_stats.safetensors")
    refused(given, model, tmp_path / "out", "are not those that its fp8kv_calibration.json sums up")


def test_a_card_that_steers_no_terminal(model, measured, tmp_path):
    clear, dataset = "\x1b[2J\n# clear", {"source": "\x1b[3J", "samples": 1, "tokens": 1}
    origin = {"model": "a\x1b[4J\nb", "checkpoint": "c"}
    changes = {"warnings": [clear], "dataset": dataset, "measured_on": origin}
    out = applied(edited(measured, tmp_path / "given", **changes), model, tmp_path / "out")
    card = (out / "README.md").read_text()
    assert all(text in card for text in ("[2J\ufffd# clear", "[3J", "[4J\ufffdb"))
    assert "\x1b" not in card


@pytest.mark.parametrize(
    ("flags", "to", "advice"),
    [
        (("--targets", "qkv"), ("--format", "tgi"), "Use --format vllm"),
        (("--strategy", "attn_head"), ("--format", "tgi"), "Use --strategy tensor, or --format"),
        (("--fp8-dtype", "e5m2"), ("--format", "tgi"), "Use --format "),
    ],
)
def test_advice_names_flags_that_apply_has(flags, to, advice, model, tmp_path):
    measured = calibrated(model, tmp_path / "measured", *flags, "--format", "fp8kv")
    done = fp8kv("apply", measured, model, "-o", tmp_path / "out", *to)
    one_line_error(done, advice)
    help = fp8kv("apply", "--help").output
    assert all(flag in help for flag in re.findall(r"--[a-z0-9-]+", done.stderr))


@pytest.mark.parametrize(
    "change",
    [
        {"layers": "3"},
        {"tensors": {}},
        {"version": 1},
        {"tensors": {"a": {"shape": [2], "bits": 16, "values": "?"}}},
        {"tensors": {"a": {"shape": [2], "bits": 16, "values": ""}}},
        {"tensors": {"a": {"shape": [2], "bits": 16, "values": "gH8=" * 64}}},
        {"tensors": {"a": {"shape": [2], "bits": 16, "values": 5}}},
        {"tensors": {"a": {"shape": [2], "bits": 16, "values": None}}},
        {"tensors": {"a": {"shape": [2], "bits": 17, "values": "AAA="}}},
        {"tensors": {"a": {"shape": [2], "bits": 16, "values": "AAA="}}},
    ],
)
def test_damaged_marks(change, model, measured, tmp_path):
    broken = shutil.copytree(measured, tmp_path / "broken")
    file = broken / "fp8kv_calibration.json"
    report = json.loads(file.read_text())
    report["marks"] |= change
    file.write_text(json.dumps(report))
    done = fp8kv("apply", broken, model, "-o", tmp_path / "out")
    one_line_error(done, "the marks", "damaged")
    assert "pydantic" not in done.stderr


def test_weights_with_scales_among_them_are_left_alone(model, measured, tmp_path):
    def edit(tensors):
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.5])

    other = copy(model, tmp_path / "other", edit)
    refused(measured, other, tmp_path / "out", "apply never rewrites weights", "fp8kv strip")


def test_applied_scales_are_not_merged(model, measured, tmp_path):
    out = applied(measured, copy(model, tmp_path / "other"), tmp_path / "out")
    done = fp8kv("merge", out, measured, "-o", tmp_path / "merged")
    one_line_error(done, "were applied, and not measured there", "merge calibrations")


def test_what_is_no_calibration(model, tmp_path):
    refused(model, model, tmp_path / "out", "has no fp8kv_stats.safetensors")
    gone = tmp_path / "gone"
    refused(gone, model, tmp_path / "out", f"cannot read statistics: '{gone}' does not exist")


def test_marks_are_the_same_whatever_files_and_as_json(model, measured):
    saved = json.loads((measured / "fp8kv_calibration.json").read_text())["marks"]
    marks = Marks.from_json(saved, "")
    assert marks.model_dump() == saved
    assert marks.layers == find_model(str(model)).num_layers
