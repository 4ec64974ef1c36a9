"""Cache types of a model that caches latents (MLA): what is measured, and who serves it."""

import json

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error
from evaluations import caches_recipe
from families import LATENT, save_model, tiny_model
from transformers import AutoModelForCausalLM

from calib.caches.rounding import rounding
from calib.caches.types import CACHES, LATENT_CACHES, cache_type
from calib.capture.attention import layer_shapes
from calib.data import load_data
from calib.evaluate.cache_variants import select_types
from calib.evaluate.recommend import Wish, recommend
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.summarize import summarize
from calib.evaluate.verdict import Judgement
from calib.models.load import load_tokenizer
from calib.models.sources import find_model
from fp8kv_runtime.hf import is_latent, swap_attention

SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2}
INDEXER = {"index_head_dim": 80}
RECIPE = caches_recipe("none", "tensor")
SUITE = Suite(4, 3, 32, 0, 0, (), (), 0)
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
    return evaluate(str(directory), RECIPE, suite=SUITE)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    found = latent_directory("deepseek_v32", tmp_path_factory.mktemp("sparse"), **INDEXER)
    return evaluate(str(found), RECIPE, suite=SUITE)


def test_all_are_the_types_for_latents(evaluation):
    others = {"reference", "bf16", "eager", "none", "tensor", "fp8, baked"}
    assert evaluation.measured.keys() == {*others, *LATENT_CACHES}
    assert any("types for K and V of heads are left out" in each for each in evaluation.warnings)


def test_a_model_of_heads_has_none_of_them():
    types, warnings = select_types(["all"], [(2, 64, 64)])
    assert [each.name for each in types] == [*CACHES]
    assert warnings == []


@pytest.mark.parametrize("name", LATENT_CACHES)
def test_a_cache_is_the_rounding_of_latent_and_k_pe(name, evaluation, directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    rounded = rounding(name)

    def attend(original, module, query, latent, k_pe, *args, **kwargs):
        return original(module, query, *rounded(0, latent, k_pe), *args, **kwargs)

    data = RECIPE.data.model_copy(update={"samples": 7, "seq_len": 32})
    tokenizer = load_tokenizer(find_model(str(directory)))
    texts = load_data(data, tokenizer, lambda: model).samples[4:]
    for ids, found in zip(texts, evaluation.measured[name].documents, strict=True):
        tokens = torch.tensor(ids)[None]
        with torch.inference_mode():
            p = model(tokens, use_cache=False).logits[0].double().log_softmax(-1)
            with swap_attention(model, attend):
                q = model(tokens, use_cache=False).logits[0].double().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        # the logits are float32's
        torch.testing.assert_close(found.kl.double(), kl, rtol=0.02, atol=1e-8)
        assert kl.max() > 1e-7


def test_fp8_at_one_on_baked_weights_is_the_baked_model(evaluation, directory, tmp_path):
    # the samples that the evaluation calibrates on
    scales, baked = tmp_path / "scales", tmp_path / "baked"
    done = calibrate(directory, "-o", scales, "--dtype", "float32", "--format", "fp8kv")
    assert done.exit_code == 0, done.stderr
    done = fp8kv("bake", directory, "--scales", scales, "--for", "fp8", "-o", baked)
    assert done.exit_code == 0, done.stderr
    found = evaluate(str(baked), RECIPE, suite=SUITE).measured
    assert not any(each.variant.is_baked for each in found.values())
    simulated = evaluation.measured["fp8, baked"].documents
    plain = evaluation.measured["none"].documents
    for ours, theirs, other in zip(simulated, found["none"].documents, plain, strict=True):
        # the FP8 cache of our runtime hands attention a copy, laid out otherwise
        torch.testing.assert_close(ours.kl, theirs.kl, rtol=1e-3, atol=1e-7)
        assert ours.kl.mean() < other.kl.mean() / 2
    *_, bake, serve = answers(evaluation, "vllm")["fp8, baked"]
    assert (bake.split()[:2], serve.split()[0]) == (["fp8kv", "bake"], "vllm")
    assert serve.endswith("--kv-cache-dtype fp8")


def test_bytes(evaluation, directory):
    rows = summarize(evaluation).variants
    expected = {"reference": 1152, "none": 576, "tensor": 576} | dict(
        zip(LATENT_CACHES, (656, 352), strict=True)
    )
    assert {name: rows[name].bytes_per_token for name in expected} == {
        name: 2 * size
        for name, size in expected.items()  # layers
    }
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert cache_type("fp8_ds_mla").bytes_per_token(layer_shapes(model)) == 2 * 656


def answers(evaluation, engine=None, gpu=None):
    """Commands that serve each variant, or why none does."""
    found = {
        name: evaluation.offers.find(each.variant, engine, gpu)
        for name, each in evaluation.measured.items()
        if each.variant.kind != "control"
    }
    return {name: each if isinstance(each, str) else each.commands for name, each in found.items()}


def test_latents_are_served_at_scale_1_and_never_with_scales(evaluation, directory):
    found = answers(evaluation, "vllm", "h100")
    assert found["none"] == (f"vllm serve {directory} --kv-cache-dtype fp8",)
    for engine in (None, "vllm", "sglang", "lmdeploy"):
        assert "no engine stores latents with scales" in answers(evaluation, engine)["tensor"]
    (served,) = answers(evaluation, "sglang")["none"]
    assert served.endswith("--kv-cache-dtype fp8_e4m3")
    assert "not on a100" in answers(evaluation, None, "a100")["none"]
    assert "not for latents" in answers(evaluation, "lmdeploy")["none"]
    for name in LATENT_CACHES:
        assert "for sparse latents" in found[name]
        assert found[name].endswith("not for latents")


def test_sparse_latents_are_served_in_tiles(sparse):
    for gpu, blocks in (("h100", str), ("b200", tuple)):
        found = answers(sparse, "vllm", gpu)
        assert found["fp8_ds_mla"][-1].endswith("--kv-cache-dtype fp8_ds_mla")
        assert isinstance(found["nvfp4_ds_mla"], blocks)
    assert "not on h100" in answers(sparse, "vllm", "h100")["none"]
    assert "--attention-backend" in answers(sparse, "vllm", "b200")["none"][-1]


def test_the_recommendation_is_one_of_them(sparse):
    report = summarize(sparse)
    rows = report.variants
    judgement = Judgement(sparse.measured, rows, report.noise_floor)
    found = recommend(judgement, sparse.offers, Wish(kl=10.0, gpu="b200"))
    assert found.chosen.cache == "nvfp4_ds_mla"
    assert found.chosen.share == 352 / 1152
    assert "no engine stores latents" in found.not_served["tensor"]
    tight = rows["nvfp4_ds_mla"].kl.low
    found = recommend(judgement, sparse.offers, Wish(kl=tight, gpu="h100"))
    assert found.chosen.cache == "fp8_ds_mla"


def test_a_model_whose_k_and_v_vllm_caches(tmp_path):
    evaluation = evaluate(str(latent_directory("minicpm3", tmp_path)), RECIPE, suite=SUITE)
    found = answers(evaluation, "vllm")
    assert found["none"] == "vllm: not known to cache latents of minicpm3 models"
    assert answers(evaluation)["none"][-1].startswith("python -m sglang")


def test_sizes_that_kernels_do_not_take_are_measured_and_not_served(tmp_path):
    sizes = {**INDEXER, "kv_lora_rank": 144, "qk_rope_head_dim": 24}
    directory = latent_directory("deepseek_v32", tmp_path, **sizes)
    evaluation = evaluate(str(directory), RECIPE, suite=SUITE)
    found = answers(evaluation)
    assert "with latents of 512 + 64 (vllm, sglang), not of 144 + 24" in found["fp8_ds_mla"]
    row = summarize(evaluation).variants["fp8_ds_mla"]
    assert row.bytes_per_token == 2 * (144 + 2 * 4 + 2 * 24)
    assert row.kl.value > 0


def test_types_of_the_other_kind_are_refused_by_name(directory, tmp_path):
    done = fp8kv("eval", directory, *FLAGS, "--caches", "int8_per_token_head")
    one_line_error(done, "int8_per_token_head holds K and V of heads", "caches latents", "--caches")
    done = fp8kv("generate", directory, "a", "--cache", "nvfp4", "--device", "cpu")
    one_line_error(done, "nvfp4 holds K and V of heads", "latents (MLA)")
    llama = save_model(tiny_model("llama"), tmp_path / "llama")
    done = fp8kv("eval", llama, *FLAGS, "--caches", "fp8_ds_mla")
    one_line_error(done, "fp8_ds_mla holds latents (MLA)", "K and V of heads")


def test_the_command_line(directory, tmp_path):
    out = tmp_path / "report"
    caches = ("--variants", "none", "--caches", "all")
    done = fp8kv("eval", directory, *FLAGS, *caches, "-o", out)
    assert done.exit_code == 0, done.stderr
    assert {*LATENT_CACHES} <= set(json.loads((out / "report.json").read_text())["variants"])
    done = fp8kv("recommend", directory, *FLAGS, "--engine", "vllm", "--json")
    assert done.exit_code == 0, done.stderr
    assert "fp8_ds_mla" in json.loads(done.stdout)["not_served"]


def test_generation_on_a_simulated_cache(directory):
    flags = ("--cache", "fp8_ds_mla", "--max-new-tokens", "3", "--device", "cpu", "--json")
    done = fp8kv("generate", directory, "some text", *flags)
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["bytes_per_token"], facts["bytes_per_token_16bit"]) == (2 * 656, 2 * 1152)
