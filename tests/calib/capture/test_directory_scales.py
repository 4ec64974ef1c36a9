"""Scales are read from what every format holds, and refused where they do not fit the model."""

import json

import pytest
import torch
from command_line import calibrate
from families import SHARED_KV, save_model, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from calib.capture.directory_scales import open_scales
from calib.errors import InputError
from calib.files.cache_type import FP8_MAX
from calib.scales.stats_file import load_scales
from fp8kv_runtime.fp8 import FP8_DTYPES, fp8_max


def load_directory_scales(directory, model):
    return open_scales(directory)(model)


@pytest.fixture(scope="module")
def model(saved_llama):
    return AutoModelForCausalLM.from_pretrained(saved_llama)


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("vllm", ("--strategy", "attn_head")),
        ("aphrodite", ("--strategy", "attn_head")),
        ("sglang", ()),
        ("tgi", ("--fp8-dtype", "e4m3fnuz")),
        ("modelopt", ()),
        ("trtllm", ()),
    ],
)
def test_our_own_exports_are_read_like_anyones(layout, flags, saved_llama, model, tmp_path):
    out = tmp_path / "out"
    assert calibrate(saved_llama, "-o", out, "--format", layout, *flags).exit_code == 0
    expected = load_scales(out)
    for file in ("fp8kv_stats.safetensors", "fp8kv_calibration.json"):
        (out / file).unlink()
    found = load_directory_scales(out, model)
    assert (found.strategy, found.fp8_dtype) == (expected.strategy, expected.fp8_dtype)
    assert [*found.layers] == [*expected.layers]
    for name, layer in expected.layers.items():
        assert torch.equal(found.layers[name].k, layer.k)
        assert torch.equal(found.layers[name].v, layer.v)


def test_json_has_one_scale_for_both(model, tmp_path):
    ranks = {"0": {"0": 0.5, "1": 0.25, "2": 1}, "1": {"0": 0.125, "1": 0.75, "2": 1}}
    text = {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": ranks}}
    (tmp_path / "kv_cache_scales.json").write_text(json.dumps(text))
    layers = load_directory_scales(tmp_path, model).layers.values()
    assert [layer.k.item() for layer in layers] == [layer.v.item() for layer in layers] == [0.5, 0.75, 1.0]


def write(directory, endings, *, layers=3, value=None):
    value = torch.tensor([0.5]) if value is None else value
    tensors = {
        f"model.layers.{i}.self_attn.{ending}": value.clone() for i in range(layers) for ending in endings
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("endings", [["attn.k_scale", "attn.v_scale"], ["kv_cache_scaling_factor"]])
def test_scales_of_other_tools_have_other_names_and_forms(endings, model, tmp_path):
    for value in (torch.tensor(0.5), torch.tensor([0.5], dtype=torch.bfloat16)):
        scales = load_directory_scales(write(tmp_path, endings, value=value), model)
        assert [layer.k.tolist() for layer in scales.layers.values()] == [[0.5]] * 3
        assert [layer.v.tolist() for layer in scales.layers.values()] == [[0.5]] * 3


def test_a_scale_of_k_alone_goes_before_one_of_both(model, tmp_path):
    given = {"kv": 4.0, "k": 2.0, "v": 4.0}
    tensors = {
        f"model.layers.{i}.self_attn.{x}_scale": torch.tensor(value)
        for i in range(3)
        for x, value in given.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    layer = next(iter(load_directory_scales(tmp_path, model).layers.values()))
    assert (layer.k.item(), layer.v.item()) == (2.0, 4.0)


@pytest.mark.parametrize(
    ("endings", "options", "message"),
    [
        (["k_scale"], {}, "the v_scale of layer 0 is missing"),
        (["k_scale", "v_scale"], {"layers": 1}, "it lacks layers 1, 2, and"),
        (["k_scale", "v_scale"], {"layers": 4}, "of another model: it has a layer 3"),
        (["kv_scale"], {"value": torch.tensor(float("nan"))}, "k_scale of layer 0 is [nan]"),
        (["kv_scale"], {"value": torch.tensor(0.0)}, "is [0.0]; a scale is finite and positive"),
        (["kv_scale"], {"value": torch.tensor(1e-50, dtype=torch.float64)}, "finite and positive"),
        (["kv_scale"], {"value": torch.tensor(1e39, dtype=torch.float64)}, "finite and positive"),
        (["kv_scale"], {"value": torch.ones(3)}, "layer 0 has K heads 3, and 2 in"),
        (["weight"], {}, "holds no KV-cache scales"),
    ],
)
def test_what_does_not_fit_gets_one_line(endings, options, message, model, tmp_path):
    write(tmp_path, endings, **options)
    with pytest.raises(InputError) as caught:
        load_directory_scales(tmp_path, model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def say(directory, config=None, dtype=None):
    """What the files of a directory say of the FP8 type, beside its scales."""
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    if dtype is not None:
        cache = {"dtype": dtype, "scaling_factor": {"0": {str(i): 0.5 for i in range(3)}}}
        text = json.dumps({"model_type": "llama", "kv_cache": cache})
        (directory / "kv_cache_scales.json").write_text(text)
    return directory


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
    ],
)
def test_the_fp8_type_is_read_from_where_it_is_said(config, dtype, expected, model, tmp_path):
    write(tmp_path, ["k_scale", "v_scale"])
    assert load_directory_scales(say(tmp_path, config, dtype), model).fp8_dtype == expected


@pytest.mark.parametrize(
    ("config", "dtype", "message"),
    [
        ({"kv_cache_torch_dtype": "bfloat16"}, None, "of config.json is 'bfloat16'"),
        ({"kv_cache_torch_dtype": 8}, None, "of config.json is '8'"),
        (None, "int8", "dtype of kv_cache_scales.json is 'int8'"),
        (FNUZ, "float8_e4m3fn", "float8_e4m3fnuz and dtype of kv_cache_scales.json float8_e4m3fn"),
        (quantized(kv_cache_scheme=FLOAT8 | {"num_bits": 4}), None, "NVFP4 cache"),
        (quantized(kv_cache_scheme=FLOAT8 | {"type": "int"}), None, "is 'int of 8 bits'"),
        (quantized("modelopt", quantization={"kv_cache_quant_algo": "NVFP4"}), None, "NVFP4 cache"),
        (quark("int8"), None, "is 'int8'"),
        (quark("fp8_e5m2") | FNUZ, None, "contradict"),
    ],
)
def test_an_fp8_type_that_is_not_known_is_refused(config, dtype, message, model, tmp_path):
    write(tmp_path, ["k_scale", "v_scale"])
    with pytest.raises(InputError) as caught:
        load_directory_scales(say(tmp_path, config, dtype), model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_largest_values_are_those_of_the_runtime():
    assert {name: fp8_max(dtype) for name, dtype in FP8_DTYPES.items()} == FP8_MAX


@pytest.mark.parametrize("kept", [{0, 1, 2}, {0, 1}], ids=["all layers", "owners alone"])
def test_layers_that_share_a_cache_take_their_owners_scales(kept, tmp_path):
    model = tiny_model("gemma3n_text", **SHARED_KV)
    out = tmp_path / "out"
    assert calibrate(save_model(model, tmp_path / "model"), "-o", out).exit_code == 0
    expected = load_scales(out)
    scales = load_file(out / "model-fp8kv-scales.safetensors")
    alone = tmp_path / "alone"
    alone.mkdir()
    named = {name: t for name, t in scales.items() if int(name.split(".")[2]) in kept}
    save_file(named, alone / "model.safetensors")
    found = load_directory_scales(alone, model)
    assert list(found.layers) == list(expected.layers)
    assert found.shared == expected.shared
    assert len(found.shared) == 1
    for name, layer in expected.layers.items():
        assert torch.equal(found.layers[name].k, layer.k)


def test_what_is_served_is_taken_and_not_what_was_measured(saved_llama, model, tmp_path):
    out = tmp_path / "out"
    assert calibrate(saved_llama, "-o", out).exit_code == 0
    path = out / "model-fp8kv-scales.safetensors"
    served = {name: torch.full_like(scale, 100.0) for name, scale in load_file(path).items()}
    save_file(served, path, {"format": "pt"})
    layers = load_directory_scales(out, model).layers.values()
    assert {layer.k.item() for layer in layers} == {layer.v.item() for layer in layers} == {100.0}
    save_file({n: torch.zeros_like(scale) for n, scale in served.items()}, path, {"format": "pt"})
    with pytest.raises(InputError, match="finite and positive"):
        load_directory_scales(out, model)
