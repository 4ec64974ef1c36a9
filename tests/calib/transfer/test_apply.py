"""Scales of one checkpoint beside another of the same model; marks of weights have tests of their own."""

import json
import os
import re
import shutil

import torch
from apply_cases import (
    applied,
    calibrated,
    config_of,
    copy,
    edited,
    refused,
    report_of,
    rescale_values,
    scales,
    smooth,
)
from coded_forms import FORMS
from command_line import fp8kv, one_line_error, ran
from families import save_model, tiny_model
from transformers import LlamaForCausalLM


def test_another_dtype_and_other_files(model, measured, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    (other / "model.safetensors").unlink()
    loaded = LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    loaded.save_pretrained(other, max_shard_size="50KB")
    out = applied(measured, other, tmp_path / "out")
    assert scales(out) == scales(measured)
    shards = [*other.glob("*.safetensors")]
    assert len(shards) > 1
    assert all(os.path.samefile(out / shard.name, shard) for shard in shards)
    report, before = report_of(out), report_of(measured)
    assert report["measured_on"]["model"] == before["model"] == str(model)
    assert report["measured_on"]["checkpoint"] == before["checkpoint"] != report["checkpoint"]
    assert report["measured_on"]["compared"]["largest_error"] < 0.01
    assert report["marks"] == before["marks"]
    assert any("not compared: down_proj; K and V of later layers" in line for line in report["warnings"])
    assert f"measured on {model} and applied to this checkpoint" in (out / "README.md").read_text()
    done = fp8kv("merge", out, measured, "-o", tmp_path / "merged")
    one_line_error(done, "were applied, and not measured there", "merge calibrations")


def test_a_quantised_version_also_in_place(model, measured, tmp_path):
    form = FORMS["compressed-fp8"]
    other = form.quantise(copy(model, tmp_path / "other"), tmp_path / "plain")
    out = applied(measured, other, tmp_path / "out")
    config = config_of(out)["quantization_config"]
    assert config["config_groups"] == form.says["config_groups"]
    assert config["kv_cache_scheme"]["num_bits"] == 8
    assert "these scales were measured on" in (out / "README.md").read_text()
    assert any("what quantised weights and activations" in line for line in report_of(out)["warnings"])
    weights = (other / "model.safetensors").stat().st_ino
    ran("apply", measured, other, "--in-place")
    assert scales(other) == scales(out) == scales(measured)
    assert (other / "model-00001-of-00001.safetensors").stat().st_ino == weights
    assert (tmp_path / "other.before-fp8kv" / "config.json").exists()
    one_line_error(fp8kv("apply", measured, other, "--in-place", "-o", tmp_path / "o"), "leave -o")
    # beside some weights engines load no scales
    for name, version in {"gptq-4": "if any", "awq": "AutoAWQConverter"}.items():
        other = FORMS[name].quantise(copy(model, tmp_path / name), tmp_path / f"plain-{name}")
        refused(measured, other, tmp_path / "no", "no place for KV scales beside", version)


def test_another_architecture_other_sizes_and_settings(model, measured, tmp_path):
    for name, config, message in (
        ("qwen2", {}, "its config says model_type llama"),
        ("llama", {"num_key_value_heads": 4}, "its config says num_key_value_heads 2"),
        ("llama", {"num_hidden_layers": 4}, "it has 3 layers, and "),
        ("llama", {"rms_norm_eps": 1e-5}, "its config says rms_norm_eps 1e-06"),
    ):
        other = save_model(tiny_model(name, **config), tmp_path / f"{name}{config}")
        refused(measured, other, tmp_path / "out", f"is of another model: {message}")
    older = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None, "dtype": None}
    applied(measured, copy(model, tmp_path / "older", config=older), tmp_path / "out")


def test_smoothed_norms_that_the_weights_make_up_for_and_rescaled_values(model, measured, tmp_path):
    other = copy(model, tmp_path / "smooth", smooth)
    report = report_of(applied(measured, other, tmp_path / "out"))
    assert report["measured_on"]["compared"]["layers_with_moved_factors"] == 3
    assert any("norms of 3 layers hold other factors" in line for line in report["warnings"])
    other = copy(model, tmp_path / "rescaled", rescale_values)
    refused(measured, other, tmp_path / "no", "do not fit", "v_proj", "AWQ", "; calibrate that model")


def test_other_strategies_come_from_the_statistics_and_advice_names_flags_of_apply(model, measured, tmp_path):
    other = copy(model, tmp_path / "other")
    out = applied(measured / "fp8kv_stats.safetensors", other, tmp_path / "out", "--strategy", "attn_head")
    expected = calibrated(model, tmp_path / "expected", "--strategy", "attn_head")
    assert scales(out) == scales(expected)
    again = applied(out, other, tmp_path / "again", "--strategy", "tensor", "--format", "tgi")
    assert scales(again) == scales(measured)
    done = fp8kv("apply", out, other, "-o", tmp_path / "no", "--format", "tgi")
    one_line_error(done, "Use --strategy tensor, or --format vllm")
    help = fp8kv("apply", "--help").output
    assert all(flag in help for flag in re.findall(r"--[a-z0-9-]+", done.stderr))
    done = fp8kv("apply", measured, model, "-o", measured, "--overwrite")
    one_line_error(done, f"would mix with the calibration in '{measured}'")


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
            ({"recipe": recipe | {"observer": observer}}, "hold no histogram; calibrate with observer mse"),
        ]
    ):
        given = edited(measured, tmp_path / f"{i}", **change)
        refused(given, model, tmp_path / "out", phrase)
    refused(model, model, tmp_path / "out", "has no fp8kv_stats.safetensors")
    gone = tmp_path / "gone"
    refused(gone, model, tmp_path / "out", f"cannot read statistics: '{gone}' does not exist")


def test_weights_with_scales_among_them_are_left_alone(model, measured, tmp_path):
    def edit(tensors):
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.5])

    other = copy(model, tmp_path / "other", edit)
    refused(measured, other, tmp_path / "out", "apply never rewrites weights", "fp8kv strip")
