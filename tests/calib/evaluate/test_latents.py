"""The evaluation of a model that caches latents: rows, layers, and what it has no rows for."""

import pytest
import torch
from families import LATENT, save_model, tiny_model
from transformers import AutoModelForCausalLM

from calib.errors import InputError
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.summarize import summarize
from calib.recipe import load_recipe

SUITE = Suite(3, 3, 40, 2, 6, (), (), 2)
CHOICES = {"data.dataset": "random", "device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    built = tiny_model("deepseek_v3", **LATENT["deepseek_v3"])
    with torch.no_grad():
        built.model.layers[1].self_attn.kv_a_layernorm.weight *= 2**14  # beyond FP8 at 1.0
        built.model.layers[1].self_attn.kv_b_proj.weight /= 2**14
        built.model.layers[2].self_attn.kv_a_proj_with_mqa.weight[16:] *= 2**14
    return save_model(built, tmp_path_factory.mktemp("model") / "latent")


@pytest.fixture(scope="module")
def report(model):
    return summarize(evaluate(str(model), load_recipe(None, CHOICES), suite=SUITE)).to_json()


def test_every_way_to_have_one_scale_has_a_row(report):
    rows = report["variants"]
    assert {"none", "tensor", "mse", "e5m2", "k only", "v only", "random"} <= rows.keys()
    assert not {"attn_head", "channel", "qkv", "channel+k_center"} & rows.keys()
    assert rows["tensor"]["kl"]["value"] < rows["none"]["kl"]["value"] / 2
    _, *spoiled = zip(rows["tensor"]["layers"], rows["none"]["layers"], strict=True)
    for tensor, none in spoiled:
        assert all(map(float.__lt__, tensor["rel_rms"], none["rel_rms"]))
    assert report["advice"][0].startswith("Engines' own classes use no scales of latents")
    assert any("K stands for the latent, V for k_pe" in line for line in report["warnings"])
    assert report["bytes_per_token"] == {"fp8": 3 * (16 + 8), "16bit": 6 * (16 + 8)}


def test_shares_of_a_layer_count_the_latent_and_k_pe_each_for_itself(report, model):
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    by_layer = {row["layer_idx"]: row for row in report["variants"]["none"]["layers"]}
    assert by_layer[1]["saturated"]["k"][0] > 0.5
    assert by_layer[1]["saturated"]["v"] == [0.0]
    assert by_layer[2]["saturated"]["k"] == [0.0]
    assert by_layer[2]["saturated"]["v"][0] > 0.9  # of its 8 values; the latent has 16
    one = {row["layer_idx"]: row for row in report["variants"]["tensor"]["layers"]}
    for index, row in one.items():
        assert row["scale"]["k"] == row["scale"]["v"]
        assert len(row["rel_rms"]) == loaded.config.num_attention_heads, index


def test_a_variant_per_head_that_was_asked_for_is_refused(model):
    recipe = load_recipe(None, CHOICES | {"evaluation.variants": ["tensor", "attn_head"]})
    with pytest.raises(InputError, match="attn_head: this model caches latents"):
        evaluate(str(model), recipe, suite=SUITE)
