"""Weights that nothing here dequantises are refused by name; those that are plain are read."""

import json
from pathlib import Path

import pytest
import torch
from coded_forms import FORMS
from command_line import SMALL, calibrate, fp8kv, one_line_error, succeeded
from families import edit_json, save_model, tiny_model, tiny_vision_language_model
from loaded import LOADERS, load, refused
from safetensors.torch import load_file, save_file

from calib.errors import InputError
from calib.models.config import load_config
from calib.models.sources import find_model
from calib.scales.stats_file import load_stats

KV_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}
# as nvidia-modelopt 0.47 writes it, see tests/golden
MODELOPT = {
    "config_groups": {
        "group_0": {"input_activations": KV_SCHEME, "weights": KV_SCHEME, "targets": ["Linear"]}
    },
    "ignore": ["lm_head", "model.embed_tokens"],
    "quant_algo": "FP8",
    "kv_cache_scheme": KV_SCHEME,
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quant_method": "modelopt",
}
W4A8 = {**MODELOPT, "quant_algo": "W4A8_AWQ"}
GOLDEN = Path(__file__).parents[2] / "golden"


def edit_tensors(directory, edit):
    """Replace each linear weight by the tensors that `edit` makes of its name and values."""
    file, kept = directory / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        is_linear = name.endswith("_proj.weight")
        kept |= edit(name.removesuffix(".weight"), tensor) if is_linear else {name: tensor}
    save_file(kept, file, {"format": "pt"})


def read_both_ways(directory):
    for loader in LOADERS:
        load(directory, loader)


@pytest.mark.parametrize(
    "command",
    [
        ["calibrate", "-o", "OUT", *SMALL],
        ["calibrate", "-o", "OUT", *SMALL, "--offload", "layerwise"],
        ["eval", "--device", "cpu", "-o", "OUT"],
        ["generate", "w5", "--scales", "none", "--device", "cpu"],
        ["stress", "-o", "OUT"],
    ],
    ids=["calibrate", "layerwise", "eval", "generate", "stress"],
)
def test_what_nothing_here_reads_is_refused_by_every_command(command, tiny_directory, tmp_path):
    FORMS["modelopt-fp8"].quantise(tiny_directory)
    name, *rest = [str(tmp_path / "out") if word == "OUT" else word for word in command]

    def say_no(*said):
        one_line_error(fp8kv(name, tiny_directory, *rest), *said, "give the model it was made from")
        assert not (tmp_path / "out").exists()

    if name == "stress":  # a twin is not made of codes that can be read either
        say_no()
    edit_json(tiny_directory / "config.json", quantization_config=None)
    (tiny_directory / "hf_quant_config.json").write_text(json.dumps({"quantization": W4A8}))
    say_no("hf_quant_config.json")
    (tiny_directory / "hf_quant_config.json").unlink()
    edit_json(tiny_directory / "config.json", quantization_config=W4A8)
    say_no("quantization_config")


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": W4A8},
        {"quantization_config": {"quant_method": "modelopt", "quantization": W4A8}},
        {"quantization_config": {**MODELOPT, "quant_method": "modelopt_fp4"}},
        {"quantization_config": {"quant_method": "petit"}},
        {"quantization_config": {"bits": 4}},
        {"quantization_config": {"quant_method": ["fp8"]}},
        {"compression_config": {"config_groups": {"group_0": {"targets": ["Linear"]}}}},
        {"compression_config": {"quant_method": "fp8"}},
    ],
)
def test_quantisation_that_nothing_here_undoes(tiny_directory, config):
    edit_json(tiny_directory / "config.json", **config)
    refused(tiny_directory, f"'{tiny_directory}' are quantised.*{next(iter(config))}")


def test_quantisation_inside_text_config(tmp_path):
    directory = save_model(tiny_vision_language_model(), tmp_path / "vlm")
    text = json.loads((directory / "config.json").read_text())["text_config"]
    edit_json(directory / "config.json", text_config={**text, "quantization_config": W4A8})
    refused(directory, r"modelopt.*text_config.quantization_config")


SCALES = ["weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale", "pre_quant_scale"]
SCALES += ["output_scale", "activation_scale", "weight_zero_point", "weight.absmax", "SCB"]


@pytest.mark.parametrize("suffixes", [*([s] for s in SCALES), ["qzeros", "g_idx", "scales"]], ids="-".join)
def test_scales_and_codes_that_the_loader_would_leave_over(tiny_directory, suffixes):
    def edit(module, weight):
        extra = {f"{module}.{suffix}": torch.ones(3) for suffix in suffixes}
        return extra if "scales" in suffixes else {f"{module}.weight": weight, **extra}

    edit_tensors(tiny_directory, edit)
    said = rf"layers.0.mlp.down_proj.{min(suffixes)}'.*give the model it was made from"
    with pytest.raises(InputError, match=said):  # names alone tell, before weights are missing
        load_config(find_model(str(tiny_directory)))


@pytest.mark.parametrize(("dtype", "name"), [(torch.float8_e5m2, "F8_E5M2"), (torch.uint8, "U8")])
def test_weights_stored_as_codes_of_which_nothing_is_said(tiny_directory, dtype, name):
    edit_tensors(tiny_directory, lambda m, w: {f"{m}.weight": (w * 100).to(dtype)})
    refused(tiny_directory, f"holds 'model.layers.0.mlp.down_proj.weight' as {name}")


def test_other_tensors_that_are_left_over_do_no_harm(tiny_directory):
    file = tiny_directory / "model.safetensors"
    extra = {"vision.blocks.0.layer_scale": torch.ones(2), "logit_scale": torch.ones(1)}
    extra |= {"model.position_ids": torch.arange(4), "head.weight": torch.ones(2)}
    extra["model.layers.0.self_attn.k_zero_point"] = torch.ones(1)
    save_file({**load_file(file), **extra}, file, {"format": "pt"})
    read_both_ways(tiny_directory)


@pytest.mark.parametrize(
    ("name", "offload"),
    [
        ("vllm", "layerwise"),
        ("sglang", "none"),
        ("tgi", "none"),
        ("modelopt", "layerwise"),
        ("modelopt", "none"),
        ("trtllm", "none"),
    ],
)
def test_an_output_of_each_format_is_calibrated_again_to_the_same(name, offload, tiny_directory, tmp_path):
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert calibrate(tiny_directory, "-o", once, "--format", name).exit_code == 0
    # modelopt's outputs hold a quantization_config, which only this format may replace
    succeeded(calibrate(once, "-o", twice, "--offload", offload, "--format", "fp8kv"))
    again = load_stats(twice).layers
    for module, layer in load_stats(once).layers.items():
        assert torch.equal(layer.k.amax, again[module].k.amax)
        assert torch.equal(layer.v.amax, again[module].v.amax)


KV_ONLY = {
    "modelopt": {"quant_method": "modelopt", "ignore": [], "kv_cache_scheme": KV_SCHEME},
    "ours": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*"]},
    "nested": {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
    "llm-compressor": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["LlamaAttention"], "weights": None}},
        "kv_cache_scheme": KV_SCHEME,
    },
    "nothing": {},
}


@pytest.mark.parametrize("says", KV_ONLY.values(), ids=KV_ONLY)
def test_configs_that_quantise_the_cache_alone(tiny_directory, says):
    document = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tiny_directory / "hf_quant_config.json").write_text(json.dumps(document))
    edit_json(tiny_directory / "config.json", quantization_config=says)
    read_both_ways(tiny_directory)
    edit_json(tiny_directory / "config.json", quantization_config=None, compression_config=says)
    read_both_ways(tiny_directory)
    if says == {}:
        (tiny_directory / "hf_quant_config.json").write_text("{}")
        read_both_ways(tiny_directory)
    if says.get("config_groups"):  # a transform of the weights is not forgotten
        edit_json(tiny_directory / "config.json", compression_config={**says, "transform_config": {"R1": {}}})
        refused(tiny_directory, "quantised|compressed")


@pytest.mark.parametrize("case", sorted(GOLDEN.glob("*-*/*")), ids=lambda path: path.name)
def test_real_outputs_of_other_tools(case):
    read_both_ways(case)


@pytest.mark.parametrize(("place", "says"), [("quantization_config", []), ("compression_config", "fp8")])
def test_a_quantization_config_that_is_no_mapping(tiny_directory, tmp_path, place, says):
    edit_json(tiny_directory / "config.json", **{place: says})
    done = calibrate(tiny_directory, "-o", tmp_path / "out")
    one_line_error(done, place, type(says).__name__)
    one_line_error(fp8kv("strip", tiny_directory, "-o", tmp_path / "out"), place)


def test_moe_scales_of_each_expert_are_refused(tmp_path):
    experts = {"num_experts": 2, "num_experts_per_tok": 2}
    directory = save_model(tiny_model("qwen2_moe", **experts), tmp_path / "moe")
    FORMS["modelopt-fp8"].quantise(directory)
    edit_json(directory / "config.json", quantization_config=None)
    refused(directory, "holds 'model.layers.0.*' as F8_E4M3")
