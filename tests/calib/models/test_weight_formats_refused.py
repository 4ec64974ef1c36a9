"""Quantised weights that are not what their config says are refused in one line, before or after
they are read, in memory and layer by layer."""

import copy
import json
from contextlib import suppress

import pytest
import torch
from coded_forms import FORMS
from command_line import calibrate, one_line_error
from families import save_model, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_models import edit_json
from safetensors.torch import load_file, save_file

from calib.errors import InputError
from calib.files.safetensors_header import Entry
from calib.models.quantized import WEIGHT_FORMATS
from calib.models.quantized.coded_weight import ModuleTensors
from calib.models.quantized.config import QuantizationConfig
from calib.recipe import load_recipe

RECIPE = load_recipe(None, {"device": "cpu"})
# one of each form whose files differ
KINDS = ["gptq-4", "awq", "compressed-fp8", "compressed-w4-asymmetric", "compressed-nvfp4"]
KINDS += ["compressed-int8-asymmetric", "modelopt-nvfp4", "fp8-block", "quark-mxfp4"]
MODULE = "model.layers.1.self_attn.k_proj"


@pytest.fixture
def model(tiny_directory, tmp_path):
    return lambda name: FORMS[name].quantise(tiny_directory, tmp_path / "plain")


def edit(directory, change):
    """Let `change` edit the tensors of a module of the model."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    parts = {n: tensors.pop(n) for n in [*tensors] if n.startswith(f"{MODULE}.")}
    parts = {name.removeprefix(f"{MODULE}."): tensor for name, tensor in parts.items()}
    change(parts)
    save_file(tensors | {f"{MODULE}.{n}": t for n, t in parts.items()}, file, {"format": "pt"})


def refuse(directory, tmp_path, *said):
    for offload in ("none", "layerwise"):
        output = tmp_path / f"out-{offload}"
        options = ("--format", "fp8kv", "--dtype", "float16", "--offload", offload)
        one_line_error(calibrate(directory, "-o", output, *options), str(directory), *said)
        assert not output.exists()


def scale_of(parts):
    return next(name for name in parts if name in ("scales", "weight_scale", "weight_scale_inv"))


@pytest.mark.parametrize("name", KINDS)
def test_codes_without_scales(name, model, tmp_path):
    directory = model(name)
    edit(directory, lambda parts: parts.pop(scale_of(parts)))
    refuse(directory, tmp_path, f"'{MODULE}' has no ")


@pytest.mark.parametrize("name", ["compressed-fp8", "compressed-nvfp4", "fp8-block"])
def test_negative_scales_of_floats(name, model, tmp_path):
    directory = model(name)

    def change(parts):
        scale = scale_of(parts)
        parts[scale] = (-parts[scale].float()).to(parts[scale].dtype)

    edit(directory, change)
    refuse(directory, tmp_path, f"'{MODULE}.weight': a scale of its floats is negative")


@pytest.mark.parametrize("name", KINDS)
def test_scales_of_another_shape(name, model, tmp_path):
    directory = model(name)

    def change(parts):
        scale = scale_of(parts)
        parts[scale] = torch.cat([parts[scale].reshape(-1, 1)] * 3, 1)

    edit(directory, change)
    refuse(directory, tmp_path, f"'{MODULE}.")


@pytest.mark.parametrize("name", KINDS)
def test_scales_that_are_nan(name, model, tmp_path):
    directory = model(name)

    def change(parts):
        scale = parts[scale_of(parts)]
        # in E8M0 all ones are NaN
        scale.view(-1)[-1] = 255 if scale.dtype == torch.uint8 else torch.nan

    edit(directory, change)
    refuse(directory, tmp_path, f"'{MODULE}.", "NaN")


@pytest.mark.parametrize("name", ["gptq-4", "awq", "compressed-fp8", "fp8-block", "quark-mxfp4"])
def test_weights_that_are_infinite_in_the_calibration_dtype(name, model, tmp_path):
    directory = model(name)

    def change(parts):
        scale = parts[scale_of(parts)]
        scale.view(-1)[0] = 200 if scale.dtype == torch.uint8 else 65504

    edit(directory, change)
    refuse(directory, tmp_path, f"'{MODULE}.weight' dequantises to NaN or Inf in torch.float16")


@pytest.mark.parametrize("name", KINDS)
def test_a_tensor_of_another_type(name, model, tmp_path):
    directory = model(name)
    edit(directory, lambda parts: parts.update({scale_of(parts): torch.ones(1).long()}))
    refuse(directory, tmp_path, f"'{MODULE}.", "is I64")


@pytest.mark.parametrize("name", KINDS)
def test_a_weight_beside_its_codes(name, model, tmp_path):
    directory = model(name)
    other = "weight_packed" if FORMS[name].says.get("quant_method") == "gptq" else "qweight"
    edit(directory, lambda parts: parts.update({other: torch.ones(4, 4, dtype=torch.int32)}))
    refuse(directory, tmp_path, MODULE)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gptq-4", {"bits": 5}, "bits 5"),
        ("gptq-4", {"bits": 4.0}, "bits 4.0"),
        ("gptq-4", {"bits": None}, "bits None"),
        ("gptq-4", {"bits": 8}, "model.layers.0"),
        ("gptq-4", {"group_size": 40}, "which groups of 40 do not divide"),
        ("gptq-4", {"group_size": 16}, "qzeros"),
        ("gptq-4", {"group_size": 0}, "group_size 0"),
        ("gptq-4", {"checkpoint_format": "marlin"}, "'marlin'"),
        ("gptq-4", {"dynamic": {"+:.*down_proj": {"bits": 8}}}, "'dynamic'"),
        ("gptq-4", {"quant_method": "awq"}, "model.layers.0"),
        ("gptq-4", {"quant_method": "modelopt", "quant_algo": "FP8"}, "no file holds such codes"),
        ("gptq-4", {"sym": True}, "a zero point is not in the middle"),
        ("awq", {"bits": 8}, "bits 8"),
        ("awq", {"checkpoint_format": "gemv"}, "checkpoint_format 'gemv'"),
        ("awq", {"version": "gemv"}, "'gemv'"),
        ("awq", {"quant_method": "gptq"}, "model.layers.0"),
        ("awq", {"group_size": 40}, "which groups of 40 do not divide"),
        ("compressed-w4", {"ignore": [MODULE]}, f"'{MODULE}' holds codes"),
        ("compressed-w4", {"format": "marlin-24"}, "'marlin-24'"),
        ("compressed-w4", {"transform_config": {"R1": {}}}, "transform_config"),
        ("compressed-w4", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        ("compressed-w4", {"quantization_status": "frozen"}, "quantization_status"),
        ("compressed-w4", {"format": "int-quantized"}, "weight"),
        ("modelopt-fp8", {"quant_algo": "FP9"}, "quant_algo 'FP9'"),
        ("modelopt-fp8", {"quant_algo": "NVFP4"}, "is F8_E4M3"),
        ("fp8-block", {"weight_block_size": [64]}, "weight_block_size"),
        ("fp8-block", {"weight_block_size": [16, 16]}, "weight_scale_inv"),
        ("fp8-block", {"fmt": "e5m2"}, "'e5m2'"),
        ("quark-fp8", {"algo_config": [{"name": "rotation"}]}, "algo_config"),
        ("quark-fp8", {"export": {"weight_format": "fake_quantized"}}, "fake_quantized"),
    ],
)
def test_configs_that_their_files_do_not_fit(name, change, said, model, tmp_path):
    directory = model(name)
    edit_json(directory / "config.json", quantization_config={**FORMS[name].says, **change})
    refuse(directory, tmp_path, said)


def test_groups_of_compressed_tensors(model, tmp_path):
    directory, says = model("compressed-w4"), copy.deepcopy(FORMS["compressed-w4"].says)
    group = says["config_groups"]["group_0"]

    def become(**changes):
        groups = {"group_0": {**group, "targets": [], **changes}}
        edit_json(directory / "config.json", quantization_config={**says, "config_groups": groups})

    become(targets=["re:.*self_attn.*"])
    refuse(directory, tmp_path, "mlp.down_proj' holds codes, and no group is about it")
    become(targets=["re:*"])
    refuse(directory, tmp_path, "not a regular expression")
    for weights, said in [
        ({"num_bits": 9}, "num_bits 9"),
        ({"num_bits": 4.0}, "num_bits 4.0"),
        ({"type": "float"}, "type 'float'"),
        ({"strategy": "token"}, "'token'"),
        ({"strategy": "channel"}, "strategy channel with group_size 32"),
        ({"num_bits": 3}, "words in a row"),
        ({"num_bits": 8}, "words in a row"),
        ({"symmetric": False}, "weight_zero_point"),
        ({"symmetric": "no"}, "symmetric 'no'"),
    ]:
        become(targets=["Linear"], weights={**group["weights"], **weights})
        refuse(directory, tmp_path, said)


def test_codes_that_two_versions_pack_otherwise_in_as_many_words():
    says = {**FORMS["compressed-w3"].says}
    group = {"num_bits": 3, "strategy": "group", "group_size": 20}
    says["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": group}}
    entries = {
        "weight_packed": Entry("I32", (8, 2), 0, 64),
        "weight_scale": Entry("F32", (8, 1), 0, 32),
    }
    with pytest.raises(InputError, match="20 codes of 3 bits in two ways"):
        [*WEIGHT_FORMATS["compressed-tensors"](QuantizationConfig(says)).weights(ModuleTensors("m", entries))]


def test_a_shape_that_codes_do_not_have(model, tmp_path):
    directory = model("compressed-w4")
    edit(directory, lambda parts: parts["weight_shape"].add_(1))
    refuse(directory, tmp_path, "weight_shape")


@pytest.mark.parametrize("name", ["gptq-4-ordered", "compressed-w4-ordered"])
def test_a_group_that_there_is_not(name, model, tmp_path):
    directory = model(name)
    part = "g_idx" if "gptq" in name else "weight_g_idx"
    edit(directory, lambda parts: parts[part].add_(1))
    refuse(directory, tmp_path, f"'{MODULE}.weight'", "_idx")


@pytest.mark.parametrize("name", ["gptq-4-ordered", "compressed-w4-ordered"])
def test_an_order_of_columns_that_is_lost(name, model, tmp_path):
    directory = model(name)
    part = "g_idx" if "gptq" in name else "weight_g_idx"
    edit(directory, lambda parts: parts.pop(part))
    refuse(directory, tmp_path, f"'{MODULE}' has no '{part}'")


def test_two_configs_that_do_not_agree(model, tmp_path):
    directory = model("gptq-4")
    document = {"quantization": {"quant_algo": "FP8"}}
    (directory / "hf_quant_config.json").write_text(json.dumps(document))
    refuse(directory, tmp_path, "in one way by quantization_config and in another")


def test_codes_of_a_second_format(model, tmp_path):
    directory = model("gptq-4")

    def change(parts):
        parts.clear()
        parts["weight"] = torch.ones(32, 64).to(torch.float8_e4m3fn)
        parts["weight_scale"] = torch.ones(1)

    edit(directory, change)
    refuse(directory, tmp_path, f"'{MODULE}.weight' as F8_E4M3")


def test_a_weight_of_another_shape_than_the_config_wants(model, tmp_path):
    directory = model("gptq-4")
    edit_json(directory / "config.json", hidden_size=32)
    refuse(directory, tmp_path, "its config.json wants")


def test_an_expert_whose_scale_is_nan(tmp_path):
    # experts are fused while they are loaded
    directory = save_model(tiny_model("mixtral", num_local_experts=2), tmp_path / "moe")
    FORMS["compressed-fp8"].quantise(directory, tmp_path / "plain")
    tensors = load_file(directory / "model.safetensors")
    scale = "model.layers.1.block_sparse_moe.experts.0.w1.weight_scale"
    tensors[scale].fill_(torch.nan)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    refuse(directory, tmp_path, f"'{scale}' holds NaN")


SCALAR = st.none() | st.booleans() | st.integers(-5, 200) | st.floats() | st.text(max_size=5)
FLAT = SCALAR | st.lists(SCALAR, max_size=3) | st.dictionaries(st.text(max_size=5), SCALAR)
JSON = FLAT | st.lists(FLAT, max_size=2) | st.dictionaries(st.text(max_size=5), FLAT, max_size=2)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*FORMS.values()]), st.data())
def test_nonsense_in_a_config_is_read_or_refused(form, data):
    says = copy.deepcopy(form.says)
    place, keys = says, data.draw(st.integers(0, 3))
    for _ in range(keys):
        inner = [value for value in place.values() if isinstance(value, dict)]
        place = data.draw(st.sampled_from(inner)) if inner else place
    place[data.draw(st.sampled_from([*place, "sym"]))] = data.draw(JSON)
    with suppress(InputError):
        WEIGHT_FORMATS[form.says.get("quant_method", "modelopt")](QuantizationConfig(says))


def test_a_zero_point_that_tools_read_differently(tiny_directory, tmp_path):
    directory = FORMS["gptq-4"].quantise(tiny_directory, tmp_path / "plain")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("k_proj.qzeros"))
    tensors[name] = torch.full_like(tensors[name], -1)
    save_file(tensors, file, {"format": "pt"})
    done = calibrate(directory, "-o", tmp_path / "out", "--format", "fp8kv")
    one_line_error(done, "stored as 15, which AutoGPTQ reads as 0 and GPTQModel as 16")
    assert not (tmp_path / "out").exists()
