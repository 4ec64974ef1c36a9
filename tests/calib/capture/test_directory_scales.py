"""Scales are read from what every format holds, and refused where they do not fit the model."""

import json
import re

import pytest
import torch
from command_line import calibrate
from families import SHARED_KV, save_model, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from calib.capture.directory_scales import open_scales
from calib.errors import InputError
from calib.scales.stats_file import load_scales
from fp8kv_runtime.fp8 import FP8_DTYPES


def assert_same_scales(one, other):
    assert [*one.layers] == [*other.layers]
    for name, layer in one.layers.items():
        assert torch.equal(layer.k, other.layers[name].k)
        assert torch.equal(layer.v, other.layers[name].v)


@pytest.fixture(scope="module")
def model(saved_llama):
    return AutoModelForCausalLM.from_pretrained(saved_llama)


def test_our_own_exports_are_read_like_anyones(saved_llama, model, tmp_path):
    for layout, flags in (
        ("vllm", ("--strategy", "attn_head")),
        ("aphrodite", ("--strategy", "attn_head")),
        ("sglang", ()),
        ("tgi", ("--fp8-dtype", "e4m3fnuz")),
        ("modelopt", ()),
        ("trtllm", ()),
    ):
        out = tmp_path / layout
        assert calibrate(saved_llama, "-o", out, "--format", layout, *flags).exit_code == 0
        expected = load_scales(out)
        for file in ("fp8kv_stats.safetensors", "fp8kv_calibration.json"):
            (out / file).unlink()
        found = open_scales(out)(model)
        assert (found.strategy, found.fp8_dtype) == (expected.strategy, expected.fp8_dtype)
        assert_same_scales(found, expected)


def write_json(directory, dtype, ranks):
    text = {"model_type": "llama", "kv_cache": {"dtype": dtype, "scaling_factor": ranks}}
    (directory / "kv_cache_scales.json").write_text(json.dumps(text))


def test_json_has_one_scale_for_both(model, tmp_path):
    ranks = {"0": {"0": 0.5, "1": 0.25, "2": 1}, "1": {"0": 0.125, "1": 0.75, "2": 1}}
    write_json(tmp_path, "float8_e4m3fn", ranks)
    layers = open_scales(tmp_path)(model).layers.values()
    assert [layer.k.item() for layer in layers] == [layer.v.item() for layer in layers] == [0.5, 0.75, 1.0]
    write_json(tmp_path, "float8_e4m3fn", {"1": ranks["1"]})
    refused(tmp_path, model, "has scales of ranks [1]; ranks count from 0")


def test_json_of_another_type_of_model_is_refused(model, tmp_path):
    model.save_pretrained(tmp_path)
    write_json(tmp_path, "float8_e4m3fn", {"0": {"0": 0.5, "1": 0.25, "2": 1}})
    assert open_scales(tmp_path)(model).layers
    file = tmp_path / "kv_cache_scales.json"
    file.write_text(file.read_text().replace("llama", "gemma"))
    refused(tmp_path, model, "is for a 'gemma', and config.json is that of a 'llama'")
    write(tmp_path, k_scale=0.5, v_scale=0.5)  # tensors come first, and no engine reads the file beside them
    file.write_text(re.sub(r": (0.25|1)([,}])", r": 0.5\2", file.read_text()))
    assert {layer.k.item() for layer in open_scales(tmp_path)(model).layers.values()} == {0.5}


def write(directory, layers=3, **scales):
    tensors = {ending: torch.as_tensor(value) for ending, value in scales.items()}
    named = {f"model.layers.{i}.self_attn.{n}": x.clone() for i in range(layers) for n, x in tensors.items()}
    save_file(named, directory / "model.safetensors")


def test_scales_of_other_tools_have_other_names_and_forms(model, tmp_path):
    for scales, k, v in (
        ({"attn.k_scale": 0.5, "attn.v_scale": 0.25}, 0.5, 0.25),
        ({"kv_cache_scaling_factor": torch.tensor([0.5], dtype=torch.bfloat16)}, 0.5, 0.5),
        ({"kv_scale": 4.0, "k_scale": 2.0, "v_scale": 4.0}, 2.0, 4.0),
    ):
        write(tmp_path, **scales)
        layers = open_scales(tmp_path)(model).layers.values()
        assert [(layer.k.tolist(), layer.v.tolist()) for layer in layers] == [([k], [v])] * 3


def refused(directory, model, message):
    with pytest.raises(InputError, match=re.escape(message)):
        open_scales(directory)(model)


def test_what_does_not_fit_gets_one_line(model, tmp_path):
    for scales, message in (
        ({"k_scale": 0.5}, "the v_scale of layer 0 is missing"),
        ({"kv_scale": 4.0, "k_scale": 2.0}, "two values for the K and V scale of layer 0"),
        ({"kv_scale": 0.5, "layers": 1}, "it lacks layers 1, 2, and"),
        ({"kv_scale": 0.5, "layers": 4}, "of another model: it has a layer 3"),
        ({"kv_scale": float("nan")}, "k_scale of layer 0 is [nan]"),
        ({"kv_scale": 0.0}, "is [0.0], which no K, V or Q needs; mend it"),
        ({"kv_scale": torch.tensor(1e-50, dtype=torch.float64)}, "[1e-50], which no K, V or Q needs"),
        ({"kv_scale": torch.tensor(1e39, dtype=torch.float64)}, "[1e+39], which no K, V or Q needs"),
        ({"kv_scale": torch.ones(3)}, "layer 0 has K heads 3, and 2 in"),
        ({"weight": 0.5}, "holds no KV-cache scales"),
    ):
        write(tmp_path, **scales)
        refused(tmp_path, model, message)


FLOAT8 = {"type": "float", "num_bits": 8}


def quantized(method="compressed-tensors", **fields):
    return {"quantization_config": {"quant_method": method, **fields}}


def quark(dtype):
    return quantized("quark", layer_quant_config={"*k_proj": {"output_tensors": {"dtype": dtype}}})


FNUZ = {"kv_cache_torch_dtype": "float8_e4m3fnuz"}


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        ({}, None, "e4m3fn"),
        (FNUZ, None, "e4m3fnuz"),
        ({"kv_cache_torch_dtype": "float8_e5m2"}, None, "e5m2"),
        (FNUZ | quantized(kv_cache_scheme=FLOAT8), None, "e4m3fnuz"),
        (quantized("modelopt", quantization={"kv_cache_quant_algo": "FP8"}), None, "e4m3fn"),
        (quark("fp8_e4m3"), None, "e4m3fn"),
        (quark("fp8_e5m2"), None, "e5m2"),
        (None, "float8_e4m3fnuz", "e4m3fnuz"),
        (FNUZ, "float8_e4m3fnuz", "e4m3fnuz"),
        ({"kv_cache_torch_dtype": "bfloat16"}, None, "of config.json is 'bfloat16'"),
        (None, "int8", "dtype of kv_cache_scales.json is 'int8'"),
        (FNUZ, "float8_e4m3fn", "float8_e4m3fnuz and dtype of kv_cache_scales.json float8_e4m3fn"),
        (quantized(kv_cache_scheme=FLOAT8 | {"num_bits": 4}), None, "NVFP4 cache"),
        (quantized(kv_cache_scheme=FLOAT8 | {"type": "int"}), None, "is 'int of 8 bits'"),
        (quantized("modelopt", quantization={"kv_cache_quant_algo": "NVFP4"}), None, "NVFP4 cache"),
        (quark("int8"), None, "is 'int8'"),
        (quark("fp8_e5m2") | FNUZ, None, "contradict"),
    ],
)
def test_the_fp8_type_is_read_from_where_it_is_said_or_refused(config, dtype, expected, model, tmp_path):
    write(tmp_path, kv_scale=0.5)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    if dtype is not None:
        write_json(tmp_path, dtype, {"0": {str(i): 0.5 for i in range(3)}})
    if expected in FP8_DTYPES:
        assert open_scales(tmp_path)(model).fp8_dtype == expected
    else:
        refused(tmp_path, model, expected)


@pytest.mark.parametrize("kept", [{0, 1, 2}, {0, 1}], ids=["all layers", "owners alone"])
def test_layers_that_share_a_cache_take_their_owners_scales(kept, tmp_path):
    model = tiny_model("gemma3n_text", **SHARED_KV)
    out = tmp_path / "out"
    assert calibrate(save_model(model, tmp_path / "model"), "-o", out).exit_code == 0
    scales = load_file(out / "model-fp8kv-scales.safetensors")
    named = {name: t for name, t in scales.items() if int(name.split(".")[2]) in kept}
    save_file(named, tmp_path / "model.safetensors")
    found, expected = open_scales(tmp_path)(model), load_scales(out)
    assert found.shared == expected.shared
    assert len(found.shared) == 1
    assert_same_scales(found, expected)


def test_what_is_served_is_taken_and_not_what_was_measured(saved_llama, model, tmp_path):
    assert calibrate(saved_llama, "-o", tmp_path / "out").exit_code == 0
    path = tmp_path / "out" / "model-fp8kv-scales.safetensors"
    names = load_file(path)
    save_file({name: torch.full((1,), 100.0) for name in names}, path, {"format": "pt"})
    layers = open_scales(tmp_path / "out")(model).layers.values()
    assert {layer.k.item() for layer in layers} == {layer.v.item() for layer in layers} == {100.0}
    save_file({name: torch.zeros(1) for name in names}, path, {"format": "pt"})
    refused(tmp_path / "out", model, "is [0.0], which no K, V or Q needs")
