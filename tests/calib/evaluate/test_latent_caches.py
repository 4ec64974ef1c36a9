"""A model that caches latents (MLA): rows, layers and cache types, and who serves them."""

import json

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error, ran, succeeded
from evaluations import caches_recipe, plain_comparison, plain_inputs
from families import LATENT, save_model, tiny_model
from transformers import AutoModelForCausalLM

from calib.caches.rounding import rounding
from calib.caches.types import LATENT_CACHES, Shape
from calib.capture.attention import layer_shapes
from calib.errors import InputError
from calib.evaluate.recommend import Wish, recommend
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.serve_commands import Offers
from calib.evaluate.summarize import summarize
from calib.evaluate.verdict import Judgement
from calib.models.sources import find_model
from calib.recipe import load_recipe
from fp8kv_runtime.hf import is_latent

SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2}
SUITE = Suite(4, 3, 32, 0, 0, (), (), 2)
FLAGS = ("--dataset", "random", "--samples", "2", "--seq-len", "16", "--device", "cpu")


def latent_directory(family, parent, **sizes):
    model = tiny_model(family, **{**LATENT[family], **SIZES, **sizes})
    for module in filter(is_latent, model.modules()):
        # small latents, as FP8 at scale 1.0 does not hold them; the model's function stays
        module.kv_a_layernorm.weight.data *= 2.0**-7
        module.kv_b_proj.weight.data *= 2.0**7
    return save_model(model, parent / family)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return latent_directory("deepseek_v3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def evaluation(directory):
    return evaluate(str(directory), caches_recipe("none", "tensor"), suite=SUITE)


@pytest.fixture(scope="module")
def report(evaluation):
    return summarize(evaluation)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A model whose indexer chooses the tokens to attend to."""
    return latent_directory("deepseek_v32", tmp_path_factory.mktemp("sparse"), index_head_dim=80)


@pytest.fixture(scope="module")
def sparse_offers(sparse):
    checkpoint = find_model(str(sparse))
    shapes = layer_shapes(AutoModelForCausalLM.from_pretrained(sparse))
    assert shapes == [Shape(1, 512, 64, "sparse latents")] * 2
    return Offers(str(sparse), checkpoint, "random", shapes)


def test_all_are_the_types_for_latents(evaluation):
    others = {"reference", "bf16", "eager", "none", "tensor", "fp8, baked"}
    assert evaluation.measured.keys() == {*others, *LATENT_CACHES}
    assert any("types for K and V of heads are left out" in each for each in evaluation.warnings)


def test_a_cache_is_the_rounding_of_latent_and_k_pe(evaluation):
    model, documents = plain_inputs(evaluation)
    for name in LATENT_CACHES:
        rounded = rounding(name)

        def attend(original, module, query, latent, k_pe, *args, rounded=rounded, **kwargs):
            return original(module, query, *rounded(0, latent, k_pe), *args, **kwargs)

        for ids, found in zip(documents, evaluation.measured[name].documents, strict=True):
            kl, _ = plain_comparison(model, ids, attend)
            # the logits are float32's
            torch.testing.assert_close(found.kl.double(), kl, rtol=0.02, atol=1e-8)
            assert kl.max() > 1e-7


def test_fp8_at_one_on_baked_weights_is_the_baked_model(evaluation, directory, tmp_path):
    # the samples that the evaluation calibrates on
    scales, baked = tmp_path / "scales", tmp_path / "baked"
    succeeded(calibrate(directory, "-o", scales, "--dtype", "float32", "--format", "fp8kv"))
    ran("bake", directory, "--scales", scales, "--for", "fp8", "-o", baked)
    found = evaluate(str(baked), caches_recipe("none"), suite=SUITE).measured
    assert not any(each.variant.is_baked for each in found.values())
    simulated = evaluation.measured["fp8, baked"].documents
    plain = evaluation.measured["none"].documents
    for ours, theirs, other in zip(simulated, found["none"].documents, plain, strict=True):
        # the FP8 cache of our runtime hands attention a copy, laid out otherwise
        torch.testing.assert_close(ours.kl, theirs.kl, rtol=1e-3, atol=1e-7)
        assert ours.kl.mean() < other.kl.mean() / 2
    *_, bake, serve = answers(evaluation, engine="vllm")["fp8, baked"]
    assert (bake.split()[:2], serve.split()[0]) == (["fp8kv", "bake"], "vllm")
    assert serve.endswith("--kv-cache-dtype fp8")


def test_bytes_are_those_of_the_types(report):
    rows = report.variants
    sizes = {
        "reference": 1152,
        "none": 576,
        "tensor": 576,
        **dict(zip(LATENT_CACHES, (656, 352), strict=True)),
    }
    for name, size in sizes.items():
        assert rows[name].bytes_per_token == 2 * size, name  # layers


def answers(evaluation, offers=None, *, engine=None, gpu=None):
    """Commands that serve each variant, or why none does."""
    found = {
        name: (offers or evaluation.offers).find(each.variant, engine, gpu)
        for name, each in evaluation.measured.items()
        if each.variant.kind != "control"
    }
    return {name: each if isinstance(each, str) else each.commands for name, each in found.items()}


def test_latents_are_served_at_scale_1_and_never_with_scales(evaluation, directory):
    found = answers(evaluation, engine="vllm", gpu="h100")
    assert found["none"] == (f"vllm serve {directory} --kv-cache-dtype fp8",)
    for engine in (None, "vllm", "sglang", "lmdeploy"):
        assert "no engine stores latents with scales" in answers(evaluation, engine=engine)["tensor"]
    (served,) = answers(evaluation, engine="sglang")["none"]
    assert served.endswith("--kv-cache-dtype fp8_e4m3")
    assert "not on a100" in answers(evaluation, gpu="a100")["none"]
    assert "not for latents" in answers(evaluation, engine="lmdeploy")["none"]
    for name in LATENT_CACHES:
        assert "for sparse latents" in found[name]
        assert found[name].endswith("not for latents")


def test_sparse_latents_are_served_in_tiles_of_their_size(evaluation, sparse_offers):
    for gpu, blocks in (("h100", str), ("b200", tuple)):
        found = answers(evaluation, sparse_offers, engine="vllm", gpu=gpu)
        assert found["fp8_ds_mla"][-1].endswith("--kv-cache-dtype fp8_ds_mla")
        assert isinstance(found["nvfp4_ds_mla"], blocks)
    assert "--attention-backend" in found["none"][-1]
    assert "not on h100" in answers(evaluation, sparse_offers, engine="vllm", gpu="h100")["none"]
    small = Offers("m", sparse_offers.checkpoint, "", [Shape(1, 144, 24, "sparse latents")])
    assert (
        "with latents of 512 + 64 (vllm, sglang), not of 144 + 24" in answers(evaluation, small)["fp8_ds_mla"]
    )


def test_the_recommendation_is_one_of_them(evaluation, report, sparse_offers):
    rows = report.variants
    judgement = Judgement(evaluation.measured, rows, report.noise_floor)
    found = recommend(judgement, sparse_offers, Wish(kl=10.0, gpu="b200"))
    assert found.chosen.cache == "nvfp4_ds_mla"
    assert found.chosen.share == 352 / 1152
    assert "no engine stores latents" in found.not_served["tensor"]
    found = recommend(judgement, sparse_offers, Wish(kl=rows["fp8_ds_mla"].kl.high, gpu="h100"))
    assert found.chosen.cache == "fp8_ds_mla"


def test_a_model_whose_k_and_v_vllm_caches(evaluation, tmp_path):
    directory = latent_directory("minicpm3", tmp_path)
    offers = Offers(str(directory), find_model(str(directory)), "random", evaluation.shapes)
    found = answers(evaluation, offers, engine="vllm")
    assert found["none"] == "vllm: not known to cache latents of minicpm3 models"
    assert answers(evaluation, offers)["none"][-1].startswith("python -m sglang")


def test_types_of_the_other_kind_are_refused_by_name(directory, small_directory):
    done = fp8kv("eval", directory, *FLAGS, "--caches", "int8_per_token_head")
    one_line_error(done, "int8_per_token_head holds K and V of heads", "caches latents", "--caches")
    done = fp8kv("generate", directory, "a", "--cache", "nvfp4", "--device", "cpu")
    one_line_error(done, "nvfp4 holds K and V of heads", "latents (MLA)")
    done = fp8kv("eval", small_directory, *FLAGS, "--caches", "fp8_ds_mla")
    one_line_error(done, "fp8_ds_mla holds latents (MLA)", "K and V of heads")


def test_the_command_line(directory, sparse, tmp_path):
    out = tmp_path / "report"
    ran("eval", sparse, *FLAGS, "--variants", "none", "--caches", "all", "-o", out)
    rows = json.loads((out / "report.json").read_text())["variants"]
    assert all(rows[name]["kl"]["value"] > 0 for name in LATENT_CACHES)
    done = ran("recommend", directory, *FLAGS, "--engine", "vllm", "--json")
    assert "fp8_ds_mla" in json.loads(done.stdout)["not_served"]
    flags = ("--cache", "fp8_ds_mla", "--max-new-tokens", "3", "--device", "cpu", "--json")
    done = ran("generate", directory, "some text", *flags)
    facts = json.loads(done.stdout)
    assert (facts["bytes_per_token"], facts["bytes_per_token_16bit"]) == (2 * 656, 2 * 1152)


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """A model with latents beyond FP8 at scale 1.0 in its second layer, and such k_pe in its third."""
    built = tiny_model("deepseek_v3", **LATENT["deepseek_v3"])
    with torch.no_grad():
        built.model.layers[1].self_attn.kv_a_layernorm.weight *= 2**14
        built.model.layers[1].self_attn.kv_b_proj.weight /= 2**14
        built.model.layers[2].self_attn.kv_a_proj_with_mqa.weight[16:] *= 2**14
    return save_model(built, tmp_path_factory.mktemp("model") / "latent")


def test_every_way_to_have_one_scale_has_a_row_that_counts_latent_and_k_pe(spoiled):
    recipe = load_recipe(None, {"data.dataset": "random", "device": "cpu", "dtype": "float32"})
    report = summarize(evaluate(str(spoiled), recipe, suite=SUITE)).to_json()
    rows = report["variants"]
    assert {"none", "tensor", "mse", "e5m2", "k only", "v only", "random"} <= rows.keys()
    assert not {"attn_head", "channel", "qkv", "channel+k_center"} & rows.keys()
    assert rows["tensor"]["kl"]["value"] < rows["none"]["kl"]["value"] / 2
    assert report["advice"][0].startswith("Engines' own classes use no scales of latents")
    assert any("K stands for the latent, V for k_pe" in line for line in report["warnings"])
    assert report["bytes_per_token"] == {"fp8": 3 * (16 + 8), "16bit": 6 * (16 + 8)}
    _, second, third = rows["none"]["layers"]
    for none, tensor in zip((second, third), rows["tensor"]["layers"][1:], strict=True):
        assert all(map(float.__lt__, tensor["rel_rms"], none["rel_rms"]))
    assert second["saturated"]["k"][0] > 0.5
    assert second["saturated"]["v"] == [0.0]
    assert third["saturated"]["k"] == [0.0]
    assert third["saturated"]["v"][0] > 0.9  # of its 8 values; the latent has 16
    for row in rows["tensor"]["layers"]:
        assert row["scale"]["k"] == row["scale"]["v"]
        assert len(row["rel_rms"]) == 4


def test_a_variant_per_head_that_was_asked_for_is_refused(directory):
    with pytest.raises(InputError, match="attn_head: this model caches latents"):
        evaluate(str(directory), caches_recipe("tensor", "attn_head"), suite=SUITE)
