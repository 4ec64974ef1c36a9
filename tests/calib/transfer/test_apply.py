"""Scales of one checkpoint beside another of the same model; marks of weights have tests of their own."""

import json
import os
import re
import shutil

import pytest
from apply_cases import (
    applied,
    calibrated,
    config_of,
    copy,
    refused,
    report_of,
    rescale_values,
    scales,
    smooth,
)
from coded_forms import FORMS
from command_line import fp8kv, one_line_error, ran
from families import save_model, tiny_model
from safetensors.torch import load_file, save_file


def test_another_dtype_and_other_files(model, measured, tmp_path):
    def in_bfloat16(tensors):
        tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items()}

    other = copy(model, tmp_path / "other", in_bfloat16, {"dtype": "bfloat16"})
    tensors = load_file(other / "model.safetensors")
    (other / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, other / file, {"format": "pt"})
    index = {name: file for file, held in files.items() for name in held}
    (other / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    out = applied(measured, other, tmp_path / "out")
    assert scales(out) == scales(measured)
    for file in files:
        assert os.path.samefile(out / file, other / file)
    report, before = report_of(out), report_of(measured)
    assert report["measured_on"]["model"] == before["model"] == str(model)
    assert report["measured_on"]["checkpoint"] == before["checkpoint"] != report["checkpoint"]
    assert report["measured_on"]["compared"]["largest_error"] < 0.01
    assert report["marks"] == before["marks"]
    assert f"measured on {model} and applied to this checkpoint" in (out / "README.md").read_text()
    done = fp8kv("merge", out, measured, "-o", tmp_path / "merged")
    one_line_error(done, "were applied, and not measured there", "merge calibrations")


def test_what_is_not_compared_is_named(model, measured, tmp_path):
    """Marks of older versions have none of the output projection."""
    old = shutil.copytree(measured, tmp_path / "old")
    report = report_of(old)
    tensors = report["marks"]["tensors"]
    outputs = [name for name in tensors if name.endswith("o_proj.weight")]
    assert len(outputs) == 3
    for name in outputs:
        del tensors[name]
    (old / "fp8kv_calibration.json").write_text(json.dumps(report))

    def larger_output(tensors):
        tensors["model.layers.0.self_attn.o_proj.weight"] *= 1.35

    other = copy(model, tmp_path / "other", larger_output)
    for given, checkpoint, left in ((measured, model, ""), (old, other, ", o_proj")):
        done = ran("apply", given, checkpoint, "-o", tmp_path / f"out{left}", "--json")
        (said,) = [line for line in json.loads(done.stdout)["warnings"] if "not compared" in line]
        assert said.startswith(f"not compared: down_proj{left}; K and V of later layers follow")


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


@pytest.mark.parametrize(("form", "version"), [("gptq-4", "if any"), ("awq", "AutoAWQConverter")])
def test_weights_beside_which_engines_load_no_scales(form, version, model, measured, tmp_path):
    other = FORMS[form].quantise(copy(model, tmp_path / "other"), tmp_path / "plain")
    refused(measured, other, tmp_path / "out", "no place for KV scales beside", version)


def test_smoothed_norms_that_the_weights_make_up_for_and_rescaled_values(model, measured, tmp_path):
    other = copy(model, tmp_path / "smooth", smooth)
    report = report_of(applied(measured, other, tmp_path / "out"))
    assert report["measured_on"]["compared"]["layers_with_moved_factors"] == 3
    assert any("norms of 3 layers hold other factors" in line for line in report["warnings"])
    other = copy(model, tmp_path / "rescaled", rescale_values)
    refused(measured, other, tmp_path / "no", "do not fit", "v_proj", "AWQ", "; calibrate that model")


def test_another_architecture_other_sizes_and_settings(model, measured, tmp_path):
    said = "is of another model: "
    for name, config, message in (
        ("qwen2", {}, "its config says model_type llama"),
        ("llama", {"num_key_value_heads": 4}, "its config says num_key_value_heads 2"),
        ("llama", {"num_hidden_layers": 2}, "it has 3 layers, and "),
        ("llama", {"num_hidden_layers": 4}, "4 layers"),
    ):
        other = save_model(tiny_model(name, **config), tmp_path / f"{name}{config}")
        refused(measured, other, tmp_path / "out", said, message)
    other = copy(model, tmp_path / "settings", config={"rms_norm_eps": 1e-5})
    refused(measured, other, tmp_path / "out", f"{said}its config says rms_norm_eps 1e-06")
    older = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None, "dtype": None}
    applied(measured, copy(model, tmp_path / "older", config=older), tmp_path / "out")


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
