"""Scales of one checkpoint beside another of the same model."""

import json
import os
import shutil

import pytest
from apply_cases import (
    FITTING,
    applied,
    copy,
    refused,
    rescale_values,
    scales,
    smooth,
)
from coded_forms import FORMS
from command_line import fp8kv
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
    report = json.loads((out / "fp8kv_calibration.json").read_text())
    before = json.loads((measured / "fp8kv_calibration.json").read_text())
    assert report["measured_on"]["model"] == before["model"] == str(model)
    assert report["measured_on"]["checkpoint"] == before["checkpoint"] != report["checkpoint"]
    assert report["measured_on"]["compared"]["largest_error"] < 0.01
    assert report["marks"] == before["marks"]
    assert f"measured on {model} and applied to this checkpoint" in (out / "README.md").read_text()


def test_what_is_not_compared_is_named(model, measured, tmp_path):
    """Marks of older versions have none of the output projection."""
    old = tmp_path / "old"
    shutil.copytree(measured, old)
    file = old / "fp8kv_calibration.json"
    report = json.loads(file.read_text())
    tensors = report["marks"]["tensors"]
    outputs = [name for name in tensors if name.endswith("o_proj.weight")]
    assert len(outputs) == 3
    for name in outputs:
        del tensors[name]
    file.write_text(json.dumps(report))

    def larger_output(tensors):
        tensors["model.layers.0.self_attn.o_proj.weight"] *= 1.35

    other = copy(model, tmp_path / "other", larger_output)
    for given, checkpoint, left in ((measured, model, ""), (old, other, ", o_proj")):
        done = fp8kv("apply", given, checkpoint, "-o", tmp_path / f"out{left}", "--json")
        assert done.exit_code == 0, done.stderr
        said = [line for line in json.loads(done.stdout)["warnings"] if "not compared" in line]
        assert len(said) == 1
        assert said[0].startswith(f"not compared: down_proj{left}; K and V of later layers follow")


@pytest.mark.parametrize("form", FITTING)
def test_a_quantised_version(form, model, measured, tmp_path):
    other = FORMS[form].quantise(copy(model, tmp_path / "other"), tmp_path / "plain")
    out = applied(measured, other, tmp_path / "out")
    assert scales(out) == scales(measured)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["config_groups"] == FORMS[form].says["config_groups"]
    assert config["kv_cache_scheme"]["num_bits"] == 8
    assert "these scales were measured on" in (out / "README.md").read_text()


@pytest.mark.parametrize(("form", "version"), [("gptq-4", "if any"), ("awq", "AutoAWQConverter")])
def test_weights_beside_which_engines_load_no_scales(form, version, model, measured, tmp_path):
    other = FORMS[form].quantise(copy(model, tmp_path / "other"), tmp_path / "plain")
    refused(measured, other, tmp_path / "out", "no place for KV scales beside", version)


@pytest.mark.parametrize("form", [None, "compressed-fp8-channel", "compressed-int8", "compressed-w4"])
def test_smoothed_norms_that_the_weights_make_up_for(form, model, measured, tmp_path):
    other = copy(model, tmp_path / "other", smooth)
    if form:
        FORMS[form].quantise(other, tmp_path / "plain")
    out = applied(measured, other, tmp_path / "out")
    report = json.loads((out / "fp8kv_calibration.json").read_text())
    assert report["measured_on"]["compared"]["layers_with_moved_factors"] == 3
    assert any("norms of 3 layers hold other factors" in line for line in report["warnings"])


@pytest.mark.parametrize("form", [None, "compressed-fp8-channel", "compressed-w4"])
@pytest.mark.parametrize("smoothed", [False, True])
@pytest.mark.parametrize("factor", [1.2, 0.5])
def test_rescaled_values_are_refused(form, smoothed, factor, model, measured, tmp_path):
    def edit(tensors):
        rescale_values(tensors, factor)
        if smoothed:
            smooth(tensors)

    other = copy(model, tmp_path / "other", edit)
    if form:
        FORMS[form].quantise(other, tmp_path / "plain")
    refused(measured, other, tmp_path / "out", "do not fit", "v_proj", "AWQ", "calibrate")
