"""What `fp8kv apply` makes of calibrations that are old, damaged, edited, or none."""

import json
import shutil
from dataclasses import replace

import torch
from apply_cases import applied, copy, edited, refused, report_of, rescale_values, scales

from calib.scales.stats import KVStats
from calib.scales.stats_file import load_stats, save_stats


def test_an_output_without_marks(model, measured, tmp_path):
    old, other = shutil.copytree(measured, tmp_path / "old"), copy(model, tmp_path / "other")
    report = report_of(old)
    del report["marks"]
    (old / "fp8kv_calibration.json").write_text(json.dumps(report))
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


def test_a_damaged_report(model, measured, tmp_path):
    report = report_of(measured)
    recipe, observer = report["recipe"], report["recipe"]["observer"] | {"name": "mse"}
    for i, (change, phrase) in enumerate(
        [
            ({"fp8kv_calibration": 2}, "not of this version of fp8kv"),
            ({"measured_on": {"model": "m"}}, "what was calibrated (measured_on.checkpoint: "),
            ({"warnings": "none"}, "what was calibrated (warnings: "),
            ({"dataset": {}}, "what was calibrated (dataset.source: "),
            ({"marks": report["marks"] | {"version": 1}}, "damaged (version: "),
            (
                {"recipe": recipe | {"observer": observer}},
                "hold no histogram; calibrate with observer mse",
            ),
        ]
    ):
        given = edited(measured, tmp_path / f"{i}", **change)
        refused(given, model, tmp_path / "out", phrase)


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


def test_weights_with_scales_among_them_are_left_alone(model, measured, tmp_path):
    def edit(tensors):
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.5])

    other = copy(model, tmp_path / "other", edit)
    refused(measured, other, tmp_path / "out", "apply never rewrites weights", "fp8kv strip")


def test_what_is_no_calibration(model, tmp_path):
    refused(model, model, tmp_path / "out", "has no fp8kv_stats.safetensors")
    gone = tmp_path / "gone"
    refused(gone, model, tmp_path / "out", f"cannot read statistics: '{gone}' does not exist")
