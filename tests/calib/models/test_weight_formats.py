"""Quantised weights are read as what they stand for, in memory and layer by layer, or refused in one line."""

import copy
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from coded_forms import FORMS, GPT_OSS
from command_line import calibrate, fp8kv, one_line_error, succeeded
from families import edit_json, edit_tensors, save_model, tiny_model, tiny_vision_language_model
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import LOADERS, load, refused
from safetensors.torch import load_file, save_file

from calib.errors import InputError
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.files.safetensors_header import Entry
from calib.files.tensors import StoredTensor
from calib.models.config import load_config
from calib.models.load import weight_sources
from calib.models.quantized import WEIGHT_FORMATS
from calib.models.quantized.coded_weight import ModuleTensors
from calib.models.quantized.config import QuantizationConfig
from calib.models.quantized.weights import all_weights
from calib.models.sources import find_model
from calib.recipe import load_recipe
from calib.scales.stats_file import load_stats

GOLDEN = Path(__file__).parents[2] / "golden"
# ModelOpt's with factors for activations, or INT4 in an order of its own
REFUSED = {"int4-awq", "int8-smoothquant", "w4a8-awq"}
FP8KV = ("--format", "fp8kv", "--weights", "none")
KV_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}
# as nvidia-modelopt 0.47 writes it, see tests/golden
GROUP = {"input_activations": KV_SCHEME, "weights": KV_SCHEME, "targets": ["Linear"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": KV_SCHEME}
MODELOPT |= {"config_groups": {"group_0": GROUP}, "ignore": ["lm_head", "model.embed_tokens"]}
W4A8 = {**MODELOPT, "quant_algo": "W4A8_AWQ"}
NOTE = "were dequantised, and activations were not quantised"


def same(model, expected):
    loaded = model.state_dict()
    for name, values in expected.items():
        assert torch.equal(loaded[name], values.float()), name


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_what_their_codes_stand_for_rounded_once(form, tiny_directory, tmp_path):
    FORMS[form].quantise(tiny_directory, tmp_path / "plain")
    plain, checkpoint = load_file(tmp_path / "plain/model.safetensors"), find_model(str(tiny_directory))
    same(load(tiny_directory, dtype="float32"), plain)
    halves = weight_sources(checkpoint, load_config(checkpoint), "bfloat16")
    for name, values in plain.items():
        if name.endswith("_proj.weight"):
            assert torch.equal(halves[name].read(), values.bfloat16()), name


@pytest.mark.parametrize("case", sorted(GOLDEN.glob("quantized/*/*")), ids=lambda path: path.name)
def test_weights_are_what_the_tool_itself_makes_of_them(case):
    if case.name in REFUSED:
        refused(case, "quant_algo.*give the model it was made from")
        return
    same(load(case, dtype="float32"), load_file(case / "dequantized.safetensors"))


@pytest.mark.parametrize("form", ["gptq-4-ordered", "compressed-w3", "modelopt-nvfp4", "fp8-block"])
def test_layer_by_layer_gives_the_same_bits_and_reads_codes_once(form, tiny_directory, tmp_path, monkeypatch):
    FORMS[form].quantise(tiny_directory, tmp_path / "plain")
    same_both_ways(tiny_directory, tmp_path / "plain", tmp_path)
    # a few rows of each layer are read once more for `apply`: much of a tiny model
    monkeypatch.setattr("calib.formats.output.marks_or_none", lambda *_: None)
    with patch.object(StoredTensor, "read", autospec=True, side_effect=StoredTensor.read) as read:
        succeeded(calibrate(tiny_directory, "-o", tmp_path / "counted", "--offload", "layerwise", *FP8KV))
    nbytes = sum(call.args[0].nbytes for call in read.call_args_list)
    assert nbytes <= 1.05 * (tiny_directory / "model.safetensors").stat().st_size


def same_both_ways(directory, plain, tmp_path):
    """Weights are those of `plain`, in memory, and layer by layer gives the same statistics."""
    same(load(directory, dtype="float32"), load(plain, dtype="float32").state_dict())
    for offload in ("none", "layerwise"):
        succeeded(calibrate(directory, "-o", tmp_path / offload, "--offload", offload, *FP8KV))
    assert_same_amax(tmp_path / "none", tmp_path / "layerwise")


def assert_same_amax(one, other):
    one, other = load_stats(one).layers, load_stats(other).layers
    for name, layer in one.items():
        assert torch.equal(layer.k.amax, other[name].k.amax)
        assert torch.equal(layer.v.amax, other[name].v.amax)


@pytest.mark.parametrize("name", ["gptq-4", "compressed-fp8", "modelopt-nvfp4", "gpt-oss"])
def test_experts_that_are_fused_or_fused_while_they_are_loaded(name, tmp_path):
    if name == "gpt-oss":
        model, form, part = tiny_model("gpt_oss", head_dim=16, num_local_experts=4), GPT_OSS, "experts.down_"
    else:
        model, form, part = tiny_model("mixtral", num_local_experts=2), FORMS[name], "experts.1.w2."
    directory = save_model(model, tmp_path / "m")
    form.quantise(directory, tmp_path / "plain")
    assert any(part in name for name in load_file(directory / "model.safetensors"))
    same_both_ways(directory, tmp_path / "plain", tmp_path)


def test_a_config_inside_text_config(tmp_path):
    directory = save_model(tiny_vision_language_model(), tmp_path / "m")
    form = replace(FORMS["gptq-4"], weights=r"language_model.*_proj\.weight$")
    form.quantise(directory, tmp_path / "plain")
    config = json.loads((directory / "config.json").read_text())
    text = {**config["text_config"], "quantization_config": config["quantization_config"]}
    edit_json(directory / "config.json", quantization_config=None, text_config=text)
    same_both_ways(directory, tmp_path / "plain", tmp_path)


def test_modules_that_are_left_alone_and_several_schemes(tiny_directory, tmp_path):
    for name, weights, place in [
        ("modelopt-fp8", r"layers.0.*_proj\.weight$", "half"),
        ("modelopt-nvfp4", r"layers.1.*mlp.*_proj\.weight$", "coded"),
    ]:
        replace(FORMS[name], weights=weights).quantise(tiny_directory, tmp_path / place)
    stored = load_file(tiny_directory / "model.safetensors")
    layers = {
        name.removesuffix(".weight"): {"quant_algo": "NVFP4" if "layers.1" in name else "FP8"}
        for name, tensor in stored.items()
        if tensor.dtype in (torch.uint8, torch.float8_e4m3fn) and name.endswith(".weight")
    }
    document = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (tiny_directory / "hf_quant_config.json").write_text(json.dumps({"quantization": document}))
    edit_json(tiny_directory / "config.json", quantization_config=None)
    half, coded = (load_file(tmp_path / place / "model.safetensors") for place in ("half", "coded"))
    same(load(tiny_directory, dtype="float32"), {n: (coded if "layers.1" in n else half)[n] for n in half})


def test_groups_of_compressed_tensors_by_name_pattern_and_class(tiny_directory, tmp_path):
    groups, module = {}, "model.layers.0.self_attn.q_proj"
    parts = {"compressed-int8": module, "compressed-fp8-channel": "self_attn.k_proj", "compressed-w4": "mlp"}
    for name, weights, target in [
        ("compressed-int8", r"layers.0.self_attn.q_proj\.weight$", module),
        ("compressed-fp8-channel", r"layers.*self_attn.[kvo]_proj\.weight$", "re:.*self_attn.*"),
        ("compressed-w4", r"mlp.*_proj\.weight$", "Linear"),
    ]:
        form = replace(FORMS[name], weights=weights)
        form.quantise(tiny_directory, tmp_path / name)
        group, says = form.says["config_groups"]["group_0"], form.says
        groups[name] = {**group, "targets": [target], "format": says["format"]}
    says = {**says, "format": "mixed-precision", "config_groups": groups}
    edit_json(tiny_directory / "config.json", quantization_config=says)
    loaded = load(tiny_directory, dtype="float32").state_dict()
    for name, part in parts.items():
        plain = load_file(tmp_path / name / "model.safetensors")
        for weight in [weight for weight in plain if part in weight]:
            assert torch.equal(loaded[weight], plain[weight]), weight


def test_biases_of_zero_that_gptq_adds_do_no_harm(tiny_directory, tmp_path):
    FORMS["gptq-4"].quantise(tiny_directory, tmp_path / "plain")
    name, bias = "model.layers.0.self_attn.k_proj.bias", torch.zeros(32, dtype=torch.float16)
    edit_tensors(tiny_directory, lambda tensors: tensors.update({name: bias}))
    same_both_ways(tiny_directory, tmp_path / "plain", tmp_path)
    edit_tensors(tiny_directory, lambda tensors: tensors.update({name: bias + 1}))
    refused(tiny_directory, "k_proj.bias', which its config.json does not use")


def test_codes_that_only_another_file_announces_get_no_config_and_no_twin(tiny_directory, tmp_path):
    FORMS["modelopt-nvfp4"].quantise(tiny_directory, tmp_path / "plain")
    for name in ("vllm", "modelopt", "trtllm"):
        done = calibrate(tiny_directory, "-o", tmp_path / "out", "--format", name)
        one_line_error(done, "config.json has no quantization_config", "--format fp8kv")
    one_line_error(fp8kv("stress", tiny_directory, "-o", tmp_path / "out"), "give the model it was made from")
    assert not (tmp_path / "out").exists()


def test_every_result_says_that_activations_were_not_quantised(tiny_directory, tmp_path):
    quantised = FORMS["gptq-4"].quantise(tiny_directory, tmp_path / "plain")
    done = calibrate(quantised, "-o", tmp_path / "out", *FP8KV)
    report = json.loads((tmp_path / "out" / "fp8kv_calibration.json").read_text())
    for text in (done.stderr, (tmp_path / "out" / "README.md").read_text(), *report["warnings"][:1]):
        assert f"the weights are quantised (GPTQ): they {NOTE}" in text
    suite = Suite(4, 8, 16, 2, 4, (), (), 2)
    choices = {"data.dataset": "random", "device": "cpu", "evaluation.variants": ["none"]}
    assert NOTE in " ".join(evaluate(str(quantised), load_recipe(None, choices), suite=suite).warnings)
    done = fp8kv("generate", quantised, "w5", "--scales", "none", "--device", "cpu")
    assert f"warning: the weights are quantised (GPTQ): they {NOTE}" in done.stderr


def read_both_ways(directory):
    for loader in LOADERS:
        load(directory, loader)


def test_quantisation_that_nothing_here_undoes(tiny_directory):
    for config in (
        {"quantization_config": W4A8},
        {"quantization_config": {"quant_method": "modelopt", "quantization": W4A8}},
        {"quantization_config": {**MODELOPT, "quant_method": "modelopt_fp4"}},
        {"quantization_config": {"quant_method": "petit"}},
        {"quantization_config": {"bits": 4}},
        {"quantization_config": {"quant_method": ["fp8"]}},
        {"compression_config": {"config_groups": {"group_0": {"targets": ["Linear"]}}}},
        {"compression_config": {"quant_method": "fp8"}},
    ):
        edit_json(tiny_directory / "config.json", **config)
        refused(tiny_directory, f"'{tiny_directory}' are quantised.*{next(iter(config))}")
        edit_json(tiny_directory / "config.json", **dict.fromkeys(config))
        (tiny_directory / "hf_quant_config.json").write_text(json.dumps({"quantization": W4A8}))
        refused(tiny_directory, r"are quantised.*hf_quant_config.json.*give the model it was made from")
        (tiny_directory / "hf_quant_config.json").unlink()


SCALES = ["weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale", "pre_quant_scale"]
SCALES += ["output_scale", "activation_scale", "weight_zero_point", "weight.absmax", "SCB"]


@pytest.mark.parametrize("suffixes", [*([s] for s in SCALES), ["qzeros", "g_idx", "scales"]], ids="-".join)
def test_scales_and_codes_that_the_loader_would_leave_over(tiny_directory, suffixes):
    def edit(tensors):
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors |= {name.removesuffix("weight") + suffix: torch.ones(3) for suffix in suffixes}
            if "scales" in suffixes:
                del tensors[name]

    edit_tensors(tiny_directory, edit)
    said = rf"layers.0.mlp.down_proj.{min(suffixes)}'.*give the model it was made from"
    with pytest.raises(InputError, match=said):  # names alone tell, before weights are missing
        load_config(find_model(str(tiny_directory)))


def test_other_tensors_that_are_left_over_do_no_harm(tiny_directory):
    extra = {"vision.blocks.0.layer_scale": torch.ones(2), "logit_scale": torch.ones(1)}
    extra |= {"model.position_ids": torch.arange(4), "head.weight": torch.ones(2)}
    extra["model.layers.0.self_attn.k_zero_point"] = torch.ones(1)
    edit_tensors(tiny_directory, lambda tensors: tensors.update(extra))
    read_both_ways(tiny_directory)


@pytest.mark.parametrize(
    ("form", "name", "offload"),
    [
        *((form, "vllm", "none") for form in ("compressed-w4", "modelopt-fp8", "fp8-block", "quark-fp8")),
        *((None, name, "none") for name in ("modelopt", "sglang", "tgi", "trtllm")),
        *((None, name, "layerwise") for name in ("vllm", "modelopt")),
    ],
)
def test_an_output_is_calibrated_again_to_the_same(form, name, offload, tiny_directory, tmp_path):
    once, twice = tmp_path / "once", tmp_path / "twice"
    if form:
        FORMS[form].quantise(tiny_directory, tmp_path / "plain")
    succeeded(calibrate(tiny_directory, "-o", once, "--format", name))
    # modelopt's outputs hold a quantization_config, which only this format may replace
    succeeded(calibrate(once, "-o", twice, "--offload", offload, *FP8KV))
    assert_same_amax(once, twice)


KV_ONLY = {
    "modelopt": {"quant_method": "modelopt", "ignore": [], "kv_cache_scheme": KV_SCHEME},
    "ours": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*"]},
    "nested": {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
    "llm-compressor": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["LlamaAttention"], "weights": None}},
        "kv_cache_scheme": KV_SCHEME,
    },
}


@pytest.mark.parametrize("says", KV_ONLY.values(), ids=KV_ONLY)
def test_configs_that_quantise_the_cache_alone(tiny_directory, says):
    document = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tiny_directory / "hf_quant_config.json").write_text(json.dumps(document))
    edit_json(tiny_directory / "config.json", quantization_config=says)
    read_both_ways(tiny_directory)
    edit_json(tiny_directory / "config.json", quantization_config=None, compression_config=says)
    read_both_ways(tiny_directory)
    if says.get("config_groups"):  # a transform of the weights is not forgotten
        edit_json(tiny_directory / "config.json", compression_config={**says, "transform_config": {"R1": {}}})
        refused(tiny_directory, "quantised|compressed")
    edit_json(tiny_directory / "config.json", compression_config={})  # it says nothing of weights
    (tiny_directory / "hf_quant_config.json").write_text("{}")
    read_both_ways(tiny_directory)


@pytest.mark.parametrize("case", sorted(GOLDEN.glob("*-*/*")), ids=lambda path: path.name)
def test_real_outputs_of_other_tools(case):
    read_both_ways(case)


@pytest.mark.parametrize(("place", "says"), [("quantization_config", []), ("compression_config", "fp8")])
def test_a_quantization_config_that_is_no_mapping(tiny_directory, tmp_path, place, says):
    edit_json(tiny_directory / "config.json", **{place: says})
    one_line_error(calibrate(tiny_directory, "-o", tmp_path / "out"), place, type(says).__name__)
    one_line_error(fp8kv("strip", tiny_directory, "-o", tmp_path / "out"), place)


def test_quantisation_inside_text_config_and_moe_scales_of_each_expert_are_refused(tmp_path):
    directory = save_model(tiny_vision_language_model(), tmp_path / "vlm")
    text = json.loads((directory / "config.json").read_text())["text_config"]
    edit_json(directory / "config.json", text_config={**text, "quantization_config": W4A8})
    refused(directory, r"modelopt.*text_config.quantization_config")
    experts = {"num_experts": 2, "num_experts_per_tok": 2}
    directory = save_model(tiny_model("qwen2_moe", **experts), tmp_path / "moe")
    FORMS["modelopt-fp8"].quantise(directory)
    edit_json(directory / "config.json", quantization_config=None)
    refused(directory, "holds 'model.layers.0.*' as F8_E4M3")


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


def unreadable(directory, *said):
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
    unreadable(edited(name, lambda parts: parts.pop(scale_of(parts))), f"'{MODULE}' has no ")
    triple = replace_scale(lambda scale: torch.cat([scale.reshape(-1, 1)] * 3, 1))
    unreadable(edited(name, triple), f"'{MODULE}.")
    unreadable(edited(name, set_scale(-1, 255, torch.nan)), f"'{MODULE}.", "NaN")
    unreadable(edited(name, replace_scale(lambda _: torch.ones(1).long())), f"'{MODULE}.", "is I64")
    if name != "gptq-4":
        second = {"qweight": torch.ones(4, 4, dtype=torch.int32)}
        unreadable(edited(name, lambda parts: parts.update(second)), MODULE)
    if name in OF_FLOATS:
        negative = replace_scale(lambda scale: (-scale.float()).to(scale.dtype))
        unreadable(edited(name, negative), f"'{MODULE}.weight': a scale of its floats is negative")
        read(edited(name, set_scale(0, 0, 0.0)))  # of a block of zeros
    if name in LARGE_SCALES:
        said = f"'{MODULE}.weight' dequantises to NaN or Inf in torch.float16"
        unreadable(edited(name, set_scale(0, 200, 65504)), said)


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
    unreadable(directory, said)


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
        unreadable(directory, said)


def test_codes_that_two_versions_pack_otherwise_in_as_many_words():
    says = {**FORMS["compressed-w3"].says}
    group = {"num_bits": 3, "strategy": "group", "group_size": 20}
    says["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": group}}
    entries = {"weight_packed": Entry("I32", (8, 2), 0, 64), "weight_scale": Entry("F32", (8, 1), 0, 32)}
    with pytest.raises(InputError, match="20 codes of 3 bits in two ways"):
        [*WEIGHT_FORMATS["compressed-tensors"](QuantizationConfig(says)).weights(ModuleTensors("m", entries))]


@pytest.mark.parametrize(("name", "part"), [("gptq-4", "g_idx"), ("compressed-w4", "weight_g_idx")])
def test_a_group_that_there_is_not_an_order_of_columns_that_is_lost_and_another_shape(name, part, edited):
    unreadable(edited(f"{name}-ordered", lambda parts: parts[part].add_(1)), f"'{MODULE}.weight'", "_idx")
    unreadable(edited(f"{name}-ordered", lambda parts: parts.pop(part)), f"'{MODULE}' has no '{part}'")
    if name == "compressed-w4":
        unreadable(edited(f"{name}-ordered", lambda parts: parts["weight_shape"].add_(1)), "weight_shape")


def test_two_configs_and_codes_of_two_formats_that_do_not_agree(edited):
    def change(parts):
        parts.clear()
        parts["weight"] = torch.ones(32, 64).to(torch.float8_e4m3fn)
        parts["weight_scale"] = torch.ones(1)

    unreadable(edited("gptq-4", change), f"'{MODULE}.weight' as F8_E4M3")
    directory = edited("gptq-4", lambda parts: parts["qzeros"].fill_(-1))
    unreadable(directory, "stored as 15, which AutoGPTQ reads as 0 and GPTQModel as 16")
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    unreadable(directory, "in one way by quantization_config and in another")


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
