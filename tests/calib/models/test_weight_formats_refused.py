"""Quantised weights that are not what their config says are refused in one line."""

import copy
import json
from contextlib import suppress

import pytest
import torch
from coded_forms import FORMS
from command_line import calibrate, one_line_error
from families import edit_json, edit_tensors, save_model, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from calib.errors import InputError
from calib.files.safetensors_header import Entry
from calib.models.quantized import WEIGHT_FORMATS
from calib.models.quantized.coded_weight import ModuleTensors
from calib.models.quantized.config import QuantizationConfig
from calib.models.quantized.weights import all_weights
from calib.models.sources import find_model

# one of each form whose files differ
KINDS = ["gptq-4", "awq", "compressed-fp8", "compressed-w4-asymmetric", "compressed-nvfp4"]
KINDS += ["compressed-int8-asymmetric", "modelopt-nvfp4", "fp8-block", "quark-mxfp4"]
OF_FLOATS = ["compressed-fp8", "compressed-nvfp4", "fp8-block"]
LARGE_SCALES = ["gptq-4", "awq", "compressed-fp8", "fp8-block", "quark-mxfp4"]
MODULE, EXPERT = "model.layers.1.self_attn.k_proj", "model.layers.1.block_sparse_moe.experts.0"


@pytest.fixture
def model(tiny_directory, tmp_path):
    return lambda name: FORMS[name].quantise(tiny_directory, tmp_path / "plain")


@pytest.fixture
def edited(model):
    """The model in a form, after `change` edited the tensors of a module."""
    whole = {}

    def edit(name, change):
        if name not in whole:
            directory = model(name)
            whole[name] = directory, load_file(directory / "model.safetensors")
        directory, stored = whole[name]
        tensors = {n: t.clone() for n, t in stored.items() if not n.startswith(f"{MODULE}.")}
        parts = {n.removeprefix(f"{MODULE}."): t.clone() for n, t in stored.items() if n not in tensors}
        change(parts)
        tensors |= {f"{MODULE}.{n}": tensor for n, tensor in parts.items()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return directory

    return edit


def read(directory):
    for weight in all_weights(find_model(str(directory)), torch.float16).values():
        weight.read()


def refused(directory, *said):
    """By whatever reads its weights, in memory or layer by layer."""
    with pytest.raises(InputError) as error:
        read(directory)
    assert [words for words in (str(directory), *said) if words not in str(error.value)] == []


def refused_by_calibrate(directory, tmp_path, *said):
    for offload in ("none", "layerwise"):
        options = ("--format", "fp8kv", "--dtype", "float16", "--offload", offload)
        one_line_error(calibrate(directory, "-o", tmp_path / "out", *options), str(directory), *said)
        assert not (tmp_path / "out").exists()


def scale_of(parts):
    return next(name for name in parts if name in ("scales", "weight_scale", "weight_scale_inv"))


def set_scale(which, bits, value):
    """Set one scale to `value`; one in E8M0 to a byte."""

    def change(parts):
        scale = parts[scale_of(parts)]
        scale.view(-1)[which] = bits if scale.dtype == torch.uint8 else value

    return change


def replace_scale(change):
    return lambda parts: parts.update({scale_of(parts): change(parts[scale_of(parts)])})


@pytest.mark.parametrize("name", KINDS)
def test_tensors_that_do_not_fit_their_codes(name, edited):
    refused(edited(name, lambda parts: parts.pop(scale_of(parts))), f"'{MODULE}' has no ")
    triple = replace_scale(lambda scale: torch.cat([scale.reshape(-1, 1)] * 3, 1))
    refused(edited(name, triple), f"'{MODULE}.")
    refused(edited(name, set_scale(-1, 255, torch.nan)), f"'{MODULE}.", "NaN")
    refused(edited(name, replace_scale(lambda _: torch.ones(1).long())), f"'{MODULE}.", "is I64")
    if name != "gptq-4":
        second = {"qweight": torch.ones(4, 4, dtype=torch.int32)}
        refused(edited(name, lambda parts: parts.update(second)), MODULE)
    if name in OF_FLOATS:
        negative = replace_scale(lambda scale: (-scale.float()).to(scale.dtype))
        refused(edited(name, negative), f"'{MODULE}.weight': a scale of its floats is negative")
        read(edited(name, set_scale(0, 0, 0.0)))  # of a block of zeros
    if name in LARGE_SCALES:
        said = f"'{MODULE}.weight' dequantises to NaN or Inf in torch.float16"
        refused(edited(name, set_scale(0, 200, 65504)), said)


def test_calibrate_says_so_before_or_after_weights_are_read(edited, tmp_path):
    without = edited("gptq-4", lambda parts: parts.pop("scales"))
    refused_by_calibrate(without, tmp_path, f"'{MODULE}' has no 'scales'")
    large = edited("gptq-4", set_scale(0, 200, 65504))
    refused_by_calibrate(large, tmp_path, f"'{MODULE}.weight' dequantises to NaN or Inf in torch.float16")
    second = {"weight_packed": torch.ones(4, 4, dtype=torch.int32)}
    refused_by_calibrate(edited("gptq-4", lambda parts: parts.update(second)), tmp_path, MODULE)
    edit_json(large / "config.json", hidden_size=32)
    refused_by_calibrate(large, tmp_path, "its config.json wants")
    # experts are fused while they are loaded
    directory = save_model(tiny_model("mixtral", num_local_experts=2), tmp_path / "moe")
    FORMS["compressed-fp8"].quantise(directory, tmp_path / "plain-moe")
    scale = f"{EXPERT}.w1.weight_scale"
    edit_tensors(directory, lambda tensors: tensors[scale].fill_(torch.nan))
    refused_by_calibrate(directory, tmp_path, f"'{scale}' holds NaN")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gptq-4", {"bits": 5}, "bits 5"),
        ("gptq-4", {"bits": 8}, "model.layers.0"),
        ("gptq-4", {"group_size": 40}, "which groups of 40 do not divide"),
        ("gptq-4", {"group_size": 16}, "qzeros"),
        ("gptq-4", {"group_size": 0}, "group_size 0"),
        ("gptq-4", {"dynamic": {"+:.*down_proj": {"bits": 8}}}, "'dynamic'"),
        ("gptq-4", {"quant_method": "awq"}, "model.layers.0"),
        ("gptq-4", {"quant_method": "modelopt", "quant_algo": "FP8"}, "no file holds such codes"),
        ("gptq-4", {"sym": True}, "a zero point is not in the middle"),
        ("awq", {"bits": 8}, "bits 8"),
        ("awq", {"checkpoint_format": "gemv"}, "checkpoint_format 'gemv'"),
        ("awq", {"version": "gemv"}, "'gemv'"),
        ("awq", {"quant_method": "gptq"}, "model.layers.0"),
        ("compressed-w4", {"ignore": [MODULE]}, f"'{MODULE}' holds codes"),
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
def test_configs_that_their_files_do_not_fit(name, change, said, model):
    directory = model(name)
    edit_json(directory / "config.json", quantization_config={**FORMS[name].says, **change})
    refused(directory, said)


def test_groups_of_compressed_tensors(model):
    directory, says = model("compressed-w4"), copy.deepcopy(FORMS["compressed-w4"].says)
    group = says["config_groups"]["group_0"]
    for changes, said in [
        ({"targets": ["re:.*self_attn.*"]}, "mlp.down_proj' holds codes, and no group is about it"),
        ({"targets": ["re:*"]}, "not a regular expression"),
        ({"num_bits": 9}, "num_bits 9"),
        ({"num_bits": 4.0}, "num_bits 4.0"),
        ({"type": "float"}, "type 'float'"),
        ({"strategy": "token"}, "'token'"),
        ({"strategy": "channel"}, "strategy channel with group_size 32"),
        ({"num_bits": 8}, "words in a row"),
        ({"symmetric": False}, "weight_zero_point"),
        ({"symmetric": "no"}, "symmetric 'no'"),
        ({"strategy": "tensor", "group_size": -1, "symmetric": False}, "one zero point for several rows"),
    ]:
        changed = changes if "targets" in changes else {"weights": {**group["weights"], **changes}}
        groups = {"group_0": {**group, **changed}}
        edit_json(directory / "config.json", quantization_config={**says, "config_groups": groups})
        refused(directory, said)


def test_codes_that_two_versions_pack_otherwise_in_as_many_words():
    says = {**FORMS["compressed-w3"].says}
    group = {"num_bits": 3, "strategy": "group", "group_size": 20}
    says["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": group}}
    entries = {"weight_packed": Entry("I32", (8, 2), 0, 64), "weight_scale": Entry("F32", (8, 1), 0, 32)}
    with pytest.raises(InputError, match="20 codes of 3 bits in two ways"):
        [*WEIGHT_FORMATS["compressed-tensors"](QuantizationConfig(says)).weights(ModuleTensors("m", entries))]


@pytest.mark.parametrize(("name", "part"), [("gptq-4", "g_idx"), ("compressed-w4", "weight_g_idx")])
def test_a_group_that_there_is_not_an_order_of_columns_that_is_lost_and_another_shape(name, part, edited):
    refused(edited(f"{name}-ordered", lambda parts: parts[part].add_(1)), f"'{MODULE}.weight'", "_idx")
    refused(edited(f"{name}-ordered", lambda parts: parts.pop(part)), f"'{MODULE}' has no '{part}'")
    if name == "compressed-w4":
        refused(edited(f"{name}-ordered", lambda parts: parts["weight_shape"].add_(1)), "weight_shape")


def test_two_configs_and_codes_of_two_formats_that_do_not_agree(edited):
    def change(parts):
        parts.clear()
        parts["weight"] = torch.ones(32, 64).to(torch.float8_e4m3fn)
        parts["weight_scale"] = torch.ones(1)

    refused(edited("gptq-4", change), f"'{MODULE}.weight' as F8_E4M3")
    directory = edited("gptq-4", lambda parts: parts["qzeros"].fill_(-1))
    refused(directory, "stored as 15, which AutoGPTQ reads as 0 and GPTQModel as 16")
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    refused(directory, "in one way by quantization_config and in another")


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
