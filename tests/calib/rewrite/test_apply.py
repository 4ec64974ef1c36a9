"""Scales of one checkpoint beside another of the same model: fitting ones, and no others."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
from coded_forms import FORMS
from command_line import calibrate, fp8kv, one_line_error
from families import LATENT, save_model, tiny_model
from quantized_models import edit_json
from safetensors.torch import load_file, save_file

from calib.marks.record import Marks
from calib.model.find import find_checkpoint
from calib.scalefiles.reading import read_scales
from calib.scales.stats import KVStats
from calib.scales.stats_file import load_stats, save_stats

LAYERS = range(3)
ATTENTION = "model.layers.{}.self_attn.{}_proj.weight"
FITTING = [
    *("compressed-fp8", "compressed-fp8-channel", "compressed-fp8-block", "compressed-int8"),
    *("compressed-int8-asymmetric", "compressed-w4", "compressed-w4-asymmetric"),
    *("compressed-w4-ordered", "compressed-w3", "compressed-w8-channel", "compressed-nvfp4"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tiny_model("llama"), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory):
    return calibrated(model, tmp_path_factory.mktemp("measured") / "out")


def calibrated(model, out, *flags):
    done = calibrate(model, "-o", out, *flags)
    assert done.exit_code == 0, done.stderr
    return out


def scales(directory):
    return [(layer.layer, layer.k, layer.v, layer.q) for layer in read_scales(directory).layers]


def applied(measured, model, out, *flags):
    done = fp8kv("apply", measured, model, "-o", out, *flags)
    assert done.exit_code == 0, done.stderr
    return out


def refused(measured, model, out, *phrases, flags=(), status=2):
    one_line_error(fp8kv("apply", measured, model, "-o", out, *flags), *phrases, status=status)
    assert not out.exists()


def copy(model, path, edit=lambda tensors: None, config=None):
    """A copy of the model whose tensors `edit` changed."""
    shutil.copytree(model, path)
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    edit_json(path / "config.json", **(config or {}))
    return path


def smooth(tensors, size=0.5):
    """Move factors from norms into the weights that read them, as AWQ and SmoothQuant do."""
    generator = torch.Generator().manual_seed(1)
    for layer in LAYERS:
        of = f"model.layers.{layer}."
        attention, mlp = (torch.rand(64, generator=generator) * 2 * size + 1 - size for _ in "ab")
        tensors[f"{of}input_layernorm.weight"] /= attention
        tensors[f"{of}post_attention_layernorm.weight"] /= mlp
        for letter in "qkv":
            tensors[ATTENTION.format(layer, letter)] *= attention
        for name in ("gate", "up"):
            tensors[f"{of}mlp.{name}_proj.weight"] *= mlp


def rescale_values(tensors, factor=1.5, channels=slice(None)):
    """Factors per channel from V to the output projection."""
    for layer in LAYERS:
        tensors[ATTENTION.format(layer, "v")][channels] *= factor


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
    (other / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
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


@pytest.mark.parametrize(
    "form", [None, "compressed-fp8-channel", "compressed-int8", "compressed-w4"]
)
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


def norm_alone(tensors):
    tensors["model.layers.1.input_layernorm.weight"][::2] *= 1.5


def mlp_norm_alone(tensors):
    tensors["model.layers.1.post_attention_layernorm.weight"][::2] *= 1.5


def mlp_norm_as_a_whole(tensors):
    tensors["model.layers.1.post_attention_layernorm.weight"] *= 100


def all_but_queries(tensors):
    tensors["model.layers.1.input_layernorm.weight"] /= 100
    for letter in "kv":
        tensors[ATTENTION.format(1, letter)] *= 100


def other_queries(tensors):
    tensors[ATTENTION.format(1, "q")] *= 10


def larger_keys(tensors):
    tensors[ATTENTION.format(1, "k")] *= 1.1


def other_keys(tensors):
    tensors[ATTENTION.format(2, "k")] += 0.05 * torch.randn(32, 64) * 0.02


def other_embedding(tensors):
    tensors["model.embed_tokens.weight"] += 0.1 * tensors["model.embed_tokens.weight"].roll(1, 0)


def bias(tensors):
    tensors["model.layers.0.self_attn.v_proj.bias"] = torch.ones(32)


def other_mlp(tensors):
    weight = tensors["model.layers.2.mlp.up_proj.weight"]
    weight += 0.1 * weight.roll(1, 0)


def slightly_tuned(tensors):
    weight = tensors[ATTENTION.format(2, "k")]
    weight += 0.02 * weight.roll(1, 0)


def final_norm(tensors):
    tensors["model.norm.weight"] *= 1.1


@pytest.mark.parametrize(
    ("edit", "phrases"),
    [
        (norm_alone, ["norms differ", "layers.1.self_attn", "calibrate that model"]),
        (mlp_norm_alone, ["norms differ", "layers.1.mlp", "calibrate that model"]),
        (other_keys, ["'layers.2.self_attn.k_proj.weight'", "from what it was"]),
        (mlp_norm_as_a_whole, ["norms differ", "a row of 'layers.1.mlp.gate_proj", " times"]),
        (all_but_queries, ["norms differ", "a row of 'layers.1.self_attn.q_proj", "0.01 times"]),
        (other_queries, ["a row of 'layers.1.self_attn.q_proj.weight' is 10.00 times"]),
        (larger_keys, ["k_proj.weight' is 1.10 times what it was; calibrate that model"]),
        (other_mlp, ["'layers.2.mlp.up_proj.weight'", "from what it was"]),
        (slightly_tuned, ["'layers.2.self_attn.k_proj.weight'", "from what it was"]),
        (other_embedding, ["embed_tokens.weight' differs"]),
        (bias, ["'layers.0.self_attn.v_proj.bias' is only in the second"]),
        (final_norm, ["'norm.weight' differs"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_another_model_of_the_same_sizes(edit, phrases, model, measured, tmp_path):
    other = copy(model, tmp_path / "other", edit)
    refused(measured, other, tmp_path / "out", *phrases)


@pytest.mark.parametrize("form", ["compressed-fp8-channel", "compressed-int8"])
def test_another_model_behind_codes_of_eight_bits(form, model, measured, tmp_path):
    def edit(tensors):
        weight = tensors[ATTENTION.format(1, "k")]
        weight += 0.1 * weight.roll(1, 0)

    other = FORMS[form].quantise(copy(model, tmp_path / "other", edit), tmp_path / "plain")
    refused(measured, other, tmp_path / "out", "'layers.1.self_attn.k_proj.weight'", "more than")


@pytest.mark.parametrize("head", [1, 6, 15])
def test_one_head_of_many(head, tmp_path):
    model = save_model(
        tiny_model("llama", num_attention_heads=16, num_key_value_heads=16, head_dim=8),
        tmp_path / "model",
    )

    def edit(tensors):
        tensors[ATTENTION.format(0, "v")][8 * head : 8 * head + 8] *= 4

    measured = calibrated(model, tmp_path / "measured")
    other = copy(model, tmp_path / "other", edit)
    refused(
        measured, other, tmp_path / "out", "a row of 'layers.0.self_attn.v_proj.weight' is 4.00"
    )


def test_another_architecture_and_other_sizes(measured, tmp_path):
    qwen = save_model(tiny_model("qwen2"), tmp_path / "qwen")
    refused(measured, qwen, tmp_path / "out", "is of another model: its config says model_type")
    heads = save_model(tiny_model("llama", num_key_value_heads=4), tmp_path / "heads")
    refused(measured, heads, tmp_path / "out", "its config says num_key_value_heads 2")
    for count in (2, 4):
        layers = save_model(tiny_model("llama", num_hidden_layers=count), tmp_path / f"{count}")
        refused(measured, layers, tmp_path / "out", "is of another model", f"{count} layers")


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}},
        {"rms_norm_eps": 1e-5},
        {"hidden_act": "relu"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_config_beside_the_same_weights(change, model, measured, tmp_path):
    other = copy(model, tmp_path / "other", config=change)
    refused(measured, other, tmp_path / "out", "is of another model: its config says")


def test_the_same_config_in_other_words(model, measured, tmp_path):
    older = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None, "dtype": None}
    older |= {"use_cache": False, "eos_token_id": 7, "max_position_embeddings": 512}
    applied(measured, copy(model, tmp_path / "other", config=older), tmp_path / "out")


def test_keys_behind_a_norm_of_their_own(tmp_path):
    model = save_model(tiny_model("qwen3"), tmp_path / "model")
    measured = calibrated(model, tmp_path / "measured")

    def edit(tensors):
        tensors["model.layers.1.self_attn.k_norm.weight"] *= 1.2

    applied(measured, copy(model, tmp_path / "same"), tmp_path / "out")
    other = copy(model, tmp_path / "other", edit)
    refused(measured, other, tmp_path / "no", "'layers.1.self_attn.k_norm.weight' differs")


@pytest.mark.parametrize("rows", [slice(0, 16), slice(16, 24)], ids=["latent", "k_pe"])
def test_a_latent_or_k_pe_of_another_size(rows, tmp_path):
    model = save_model(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]), tmp_path / "model")
    measured = calibrated(model, tmp_path / "measured", "--format", "fp8kv")

    weight = "layers.1.self_attn.kv_a_proj_with_mqa"

    def edit(tensors):
        tensors[f"model.{weight}.weight"][rows] *= 1.2

    other = copy(model, tmp_path / "other", edit)
    flags = ("--format", "fp8kv")
    refused(measured, other, tmp_path / "no", weight, flags=flags)


def test_a_vocabulary_that_has_grown(tmp_path):
    model = save_model(tiny_model("llama", vocab_size=300), tmp_path / "model")

    def grow(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.cat([tensors[name], tensors[name][:20]])

    measured = calibrated(model, tmp_path / "measured")
    other = copy(model, tmp_path / "other", grow, {"vocab_size": 320})
    assert scales(applied(measured, other, tmp_path / "out")) == scales(measured)


@pytest.mark.parametrize(
    "family",
    ["phi3", "gemma2", "olmo2", "mixtral", "starcoder2", "gpt_neox", *("deepseek_v3", "minicpm3")],
)
def test_other_families(family, tmp_path):
    model = save_model(tiny_model(family, **LATENT.get(family, {})), tmp_path / "model")
    measured = calibrated(model, tmp_path / "measured", "--format", "fp8kv")
    out = applied(measured, copy(model, tmp_path / "same"), tmp_path / "out", "--format", "fp8kv")
    assert json.loads((out / "fp8kv_calibration.json").read_text())["measured_on"]


def test_in_place_keeps_weights_and_backs_up_the_rest(model, measured, tmp_path):
    other = FORMS["compressed-fp8"].quantise(copy(model, tmp_path / "other"), tmp_path / "plain")
    weights = (other / "model.safetensors").stat().st_ino
    done = fp8kv("apply", measured, other, "--in-place")
    assert done.exit_code == 0, done.stderr
    assert scales(other) == scales(measured)
    assert (other / "model-00001-of-00001.safetensors").stat().st_ino == weights
    assert (tmp_path / "other.before-fp8kv" / "config.json").exists()
    one_line_error(fp8kv("apply", measured, other, "--in-place", "-o", tmp_path / "o"), "leave -o")


def test_scales_of_another_strategy_and_from_the_statistics_alone(model, measured, tmp_path):
    other = copy(model, tmp_path / "other")
    out = applied(
        measured / "fp8kv_stats.safetensors", other, tmp_path / "out", "--strategy", "attn_head"
    )
    expected = calibrated(model, tmp_path / "expected", "--strategy", "attn_head")
    assert scales(out) == scales(expected)
    again = applied(out, other, tmp_path / "again", "--strategy", "tensor", "--format", "tgi")
    assert scales(again) == scales(measured)


def without_marks(measured, path):
    shutil.copytree(measured, path)
    file = path / "fp8kv_calibration.json"
    report = json.loads(file.read_text())
    del report["marks"]
    file.write_text(json.dumps(report))
    return path


def test_an_output_without_marks(model, measured, tmp_path):
    old, other = without_marks(measured, tmp_path / "old"), copy(model, tmp_path / "other")
    assert scales(applied(old, other, tmp_path / "from-its-weights")) == scales(measured)
    (old / "model-00001-of-00001.safetensors").unlink()
    refused(
        old, other, tmp_path / "out", "neither marks nor weights", "give that model with --base"
    )
    changed = copy(model, tmp_path / "changed", rescale_values, {"rope_theta": 7.0})
    wrong = ("--base", changed)
    for given in (old, measured):
        refused(given, other, tmp_path / "out", "is not the model that", flags=wrong)
    out = applied(old, other, tmp_path / "from-the-base", "--base", model)
    assert scales(out) == scales(measured)
    refused(old, changed, tmp_path / "out", "do not fit", flags=("--base", model))


def edited(measured, path, **changes):
    """A calibration whose report somebody changed."""
    shutil.copytree(measured, path)
    edit_json(path / "fp8kv_calibration.json", **changes)
    return path


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"fp8kv_calibration": 2}, "not of this version of fp8kv"),
        ({"measured_on": {"model": "m"}}, "what was calibrated (measured_on.checkpoint: "),
        ({"warnings": "none"}, "what was calibrated (warnings: "),
        ({"dataset": {}}, "what was calibrated (dataset.source: "),
    ],
)
def test_a_damaged_report(change, phrase, model, measured, tmp_path):
    refused(edited(measured, tmp_path / "broken", **change), model, tmp_path / "out", phrase)


def test_a_recipe_that_the_statistics_do_not_serve(model, measured, tmp_path):
    recipe = json.loads((measured / "fp8kv_calibration.json").read_text())["recipe"]
    recipe["observer"]["name"] = "mse"
    given = edited(measured, tmp_path / "given", recipe=recipe)
    refused(given, model, tmp_path / "out", "hold no histogram; calibrate with observer mse")


def test_statistics_that_somebody_changed(model, measured, tmp_path):
    given = shutil.copytree(measured, tmp_path / "given")
    stats = load_stats(given)
    name, layer = next(iter(stats.layers.items()))
    louder = replace(layer, v=replace(layer.v, amax=layer.v.amax * 2))
    (given / "fp8kv_stats.safetensors").unlink()
    save_stats(KVStats({**stats.layers, name: louder}), given / "fp8kv_stats.safetensors")
    refused(given, model, tmp_path / "out", "are not those that its fp8kv_calibration.json sums up")


def test_a_card_that_steers_no_terminal(model, measured, tmp_path):
    clear, dataset = "\x1b[2J\n# clear", {"source": "\x1b[3J", "samples": 1, "tokens": 1}
    origin = {"model": "a\x1b[4J\nb", "checkpoint": "c"}
    changes = {"warnings": [clear], "dataset": dataset, "measured_on": origin}
    out = applied(edited(measured, tmp_path / "given", **changes), model, tmp_path / "out")
    card = (out / "README.md").read_text()
    assert all(text in card for text in ("[2J\ufffd# clear", "[3J", "[4J\ufffdb"))
    assert "\x1b" not in card


@pytest.mark.parametrize(
    ("flags", "to", "advice"),
    [
        (("--targets", "qkv"), ("--format", "tgi"), "Use --format vllm"),
        (("--strategy", "attn_head"), ("--format", "tgi"), "Use --strategy tensor, or --format"),
        (("--fp8-dtype", "e5m2"), ("--format", "tgi"), "Use --format "),
    ],
)
def test_advice_names_flags_that_apply_has(flags, to, advice, model, tmp_path):
    measured = calibrated(model, tmp_path / "measured", *flags, "--format", "fp8kv")
    done = fp8kv("apply", measured, model, "-o", tmp_path / "out", *to)
    one_line_error(done, advice)
    help = fp8kv("apply", "--help").output
    assert all(flag in help for flag in re.findall(r"--[a-z0-9-]+", done.stderr))


@pytest.mark.parametrize(
    "change",
    [
        {"layers": "3"},
        {"tensors": {}},
        {"version": 1},
        {"tensors": {"a": {"shape": [2], "bits": 16, "values": "?"}}},
        {"tensors": {"a": {"shape": [2], "bits": 16, "values": ""}}},
        {"tensors": {"a": {"shape": [2], "bits": 16, "values": "gH8=" * 64}}},
        {"tensors": {"a": {"shape": [2], "bits": 17, "values": "AAA="}}},
    ],
)
def test_damaged_marks(change, model, measured, tmp_path):
    broken = shutil.copytree(measured, tmp_path / "broken")
    file = broken / "fp8kv_calibration.json"
    report = json.loads(file.read_text())
    report["marks"] |= change
    file.write_text(json.dumps(report))
    done = fp8kv("apply", broken, model, "-o", tmp_path / "out")
    one_line_error(done, "the marks", "damaged")
    assert "pydantic" not in done.stderr


def test_weights_with_scales_among_them_are_left_alone(model, measured, tmp_path):
    def edit(tensors):
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.5])

    other = copy(model, tmp_path / "other", edit)
    refused(measured, other, tmp_path / "out", "apply never rewrites weights", "fp8kv strip")


def test_applied_scales_are_not_merged(model, measured, tmp_path):
    out = applied(measured, copy(model, tmp_path / "other"), tmp_path / "out")
    done = fp8kv("merge", out, measured, "-o", tmp_path / "merged")
    one_line_error(done, "were applied, and not measured there", "merge calibrations")


def test_what_is_no_calibration(model, tmp_path):
    refused(model, model, tmp_path / "out", "has no fp8kv_stats.safetensors")
    gone = tmp_path / "gone"
    refused(gone, model, tmp_path / "out", f"cannot read statistics: there is no '{gone}'")


def test_marks_are_the_same_whatever_files_and_as_json(model, measured):
    saved = json.loads((measured / "fp8kv_calibration.json").read_text())["marks"]
    marks = Marks.from_json(saved, "")
    assert marks.to_json() == saved
    assert marks.layers == find_checkpoint(str(model)).num_layers
