"""Scales of one checkpoint beside another model, or an edited one: fitting ones, and no others."""

import json

import pytest
import torch
from apply_cases import (
    ATTENTION,
    applied,
    calibrated,
    copy,
    refused,
    scales,
)
from coded_forms import FORMS
from command_line import fp8kv, one_line_error
from families import LATENT, save_model, tiny_model


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


def larger_output(tensors):
    tensors[ATTENTION.format(1, "o")] *= 1.35


def other_output(tensors):
    weight = tensors[ATTENTION.format(0, "o")]
    weight.copy_(weight.flip(0))


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
        (other_queries, ["a row of 'layers.1.self_attn.q_proj.weight' is ", " times what it was"]),
        (larger_keys, ["k_proj.weight' is 1.10 times what it was; calibrate that model"]),
        (larger_output, ["'layers.1.self_attn.o_proj.weight' is 1.35 times what it was"]),
        (other_output, ["'layers.0.self_attn.o_proj.weight' is ", "from what it was"]),
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
    refused(measured, other, tmp_path / "out", "a row of 'layers.0.self_attn.v_proj.weight' is 4.00")


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


def test_the_calibration_is_not_replaced_by_what_is_made_of_it(model, measured):
    before = {file.name: file.read_bytes() for file in measured.iterdir() if file.is_file()}
    done = fp8kv("apply", measured, model, "-o", measured, "--overwrite")
    one_line_error(done, f"would mix with the calibration in '{measured}'")
    after = {file.name: file.read_bytes() for file in measured.iterdir() if file.is_file()}
    assert after == before
