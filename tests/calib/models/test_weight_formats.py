"""Quantised weights are read as the numbers that they stand for, in memory and layer by layer."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from coded_forms import FORMS, GPT_OSS
from command_line import calibrate, fp8kv, one_line_error, succeeded
from families import edit_json, save_model, tiny_model, tiny_vision_language_model
from loaded import load, refused
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from calib.capture.loop import calibrate as calibrate_model
from calib.data import make_batches
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.files.tensors import StoredTensor
from calib.models.config import load_config
from calib.models.load import weight_sources
from calib.models.sources import find_model
from calib.recipe import load_recipe
from calib.scales.stats_file import load_stats

GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "quantized").glob("*/*"))
# ModelOpt's with factors for activations, or INT4 in an order of its own
REFUSED = {"int4-awq", "int8-smoothquant", "w4a8-awq"}
FP8KV = ("--format", "fp8kv", "--weights", "none")
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


@pytest.mark.parametrize("case", GOLDEN, ids=lambda path: path.name)
def test_weights_are_what_the_tool_itself_makes_of_them(case):
    if case.name in REFUSED:
        refused(case, "quant_algo.*give the model it was made from")
        return
    same(load(case, dtype="float32"), load_file(case / "dequantized.safetensors"))


@pytest.mark.parametrize("tool", ["gptqmodel", "llmcompressor-0.14", "amd-quark"])
def test_the_largest_k_v_and_q_are_those_of_the_tools_weights(tool):
    case = next(case for case in GOLDEN if case.parent.name.startswith(tool))
    model, ids = load(case, dtype="float32"), torch.arange(2, 62).view(2, 30)
    recipe = load_recipe(None, {"device": "cpu"})
    stats = calibrate_model(model, make_batches(ids.tolist(), 2, pad_id=0), recipe)
    tools = {n: w.float() for n, w in load_file(case / "dequantized.safetensors").items()}
    assert not model.load_state_dict(tools, strict=False).unexpected_keys
    expected = largest_qkv(model, ids)
    assert expected.keys() == stats.layers.keys()
    for name, layer in stats.layers.items():
        for letter, amax in expected[name].items():
            found = getattr(layer, letter).amax.amax(1)
            assert torch.allclose(found, amax, rtol=1e-3, atol=0), (name, letter)


def largest_qkv(model, ids):
    """The largest |K|, |V| and |Q| of each head for the token ids [B, T], as transformers makes them."""
    names, found = {module: name for name, module in model.named_modules()}, {}
    eager = sys.modules[type(model).__module__].eager_attention_forward

    def attend(module, query, key, value, *args, **kwargs):
        states = {"k": key, "v": value, "q": query}
        found[names[module]] = {x: t.abs().amax((0, 2, 3)) for x, t in states.items()}
        return eager(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("measuring", attend)
    AttentionMaskInterface.register("measuring", eager_mask)
    model.set_attn_implementation("measuring")
    with torch.inference_mode():
        model(ids)
    return found


@pytest.mark.parametrize("form", ["gptq-4-ordered", "compressed-w3", "modelopt-nvfp4", "fp8-block"])
def test_layer_by_layer_gives_the_same_bits_and_reads_codes_once(form, tiny_directory, tmp_path, monkeypatch):
    FORMS[form].quantise(tiny_directory, tmp_path / "plain")
    same_both_ways(tiny_directory, tmp_path / "plain", tmp_path)
    read, whole = [], StoredTensor.read

    def counting(self, memory=None):
        read.append(self.nbytes)
        return whole(self, memory)

    monkeypatch.setattr(StoredTensor, "read", counting)
    # a few rows of each layer are read once more for `apply`: much of a tiny model
    monkeypatch.setattr("calib.formats.output.marks_or_none", lambda *_: None)
    succeeded(calibrate(tiny_directory, "-o", tmp_path / "counted", "--offload", "layerwise", *FP8KV))
    assert sum(read) <= 1.05 * (tiny_directory / "model.safetensors").stat().st_size


def same_both_ways(directory, plain, tmp_path):
    """Weights are those of `plain`, in memory, and layer by layer gives the same statistics."""
    same(load(directory, dtype="float32"), load(plain, dtype="float32").state_dict())
    for offload in ("none", "layerwise"):
        succeeded(calibrate(directory, "-o", tmp_path / offload, "--offload", offload, *FP8KV))
    by_layer = load_stats(tmp_path / "layerwise").layers
    for name, layer in load_stats(tmp_path / "none").layers.items():
        assert torch.equal(layer.k.amax, by_layer[name].k.amax)
        assert torch.equal(layer.v.amax, by_layer[name].v.amax)


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
    file = tiny_directory / "model.safetensors"
    bias = {"model.layers.0.self_attn.k_proj.bias": torch.zeros(32, dtype=torch.float16)}
    save_file(load_file(file) | bias, file, {"format": "pt"})
    same_both_ways(tiny_directory, tmp_path / "plain", tmp_path)
    save_file(load_file(file) | {name: b + 1 for name, b in bias.items()}, file, {"format": "pt"})
    refused(tiny_directory, "k_proj.bias', which its config.json does not use")


def test_codes_that_only_another_file_announces_get_no_config(tiny_directory, tmp_path):
    FORMS["modelopt-nvfp4"].quantise(tiny_directory, tmp_path / "plain")
    for name in ("vllm", "modelopt", "trtllm"):
        done = calibrate(tiny_directory, "-o", tmp_path / "out", "--format", name)
        one_line_error(done, "config.json has no quantization_config", "--format fp8kv")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["compressed-w4", "modelopt-fp8", "fp8-block", "quark-fp8"])
def test_scales_are_written_beside_codes(name, tiny_directory, tmp_path):
    FORMS[name].quantise(tiny_directory, tmp_path / "plain")
    succeeded(calibrate(tiny_directory, "-o", tmp_path / "out", "--format", "vllm"))
    # what was written is calibrated again to the same
    succeeded(calibrate(tmp_path / "out", "-o", tmp_path / "again", *FP8KV))
    before, after = (load_stats(tmp_path / place).layers for place in ("out", "again"))
    for module, layer in before.items():
        assert torch.equal(layer.k.amax, after[module].k.amax)


def test_every_result_says_that_activations_were_not_quantised(tiny_directory, tmp_path):
    quantised = FORMS["gptq-4"].quantise(tiny_directory, tmp_path / "plain")
    done = calibrate(quantised, "-o", tmp_path / "out", *FP8KV)
    report = json.loads((tmp_path / "out" / "fp8kv_calibration.json").read_text())
    card = (tmp_path / "out" / "README.md").read_text()
    for text in (done.stdout, card, *report["warnings"][:1]):
        assert f"the weights are quantised (GPTQ): they {NOTE}" in text
    suite = Suite(4, 2, 16, 2, 4, (), (), 2)
    choices = {"data.dataset": "random", "device": "cpu", "evaluation.variants": ["none"]}
    found = evaluate(str(quantised), load_recipe(None, choices), suite=suite)
    assert NOTE in found.warnings[0]
    done = fp8kv("generate", quantised, "w5", "--scales", "none", "--device", "cpu")
    assert f"warning: the weights are quantised (GPTQ): they {NOTE}" in done.stdout
