"""Caches of other types than static FP8, plain and on baked weights."""

import json

import pytest
import torch
from baking import bake, model_directory
from command_line import calibrate, fp8kv, one_line_error
from evaluations import caches_recipe
from families import save_model, tiny_model
from transformers import AutoModelForCausalLM

from calib.caches.rounding import rounding
from calib.caches.types import ALL_CACHES, CACHES, cache_type
from calib.choices import CacheName
from calib.data import load_data
from calib.errors import InputError
from calib.evaluate.cache_variants import cache_names, select_types
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.summarize import summarize
from calib.models.load import load_tokenizer
from calib.models.sources import find_model
from fp8kv_runtime.hf import swap_attention

SMALL = Suite(4, 3, 32, 2, 4, (), (), 1)
RECIPE = caches_recipe("none")
SHAPES = [(2, 16, 16)] * 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = model_directory(tmp_path_factory.mktemp("model") / "tiny", "llama")
    model = AutoModelForCausalLM.from_pretrained(path)
    # the padding token's is 0, and so are its K and V, which LMDeploy divides by 0
    weight = model.get_input_embeddings().weight.data
    weight[0] = weight[5]
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def evaluation(directory):
    return evaluate(str(directory), RECIPE, suite=SMALL)


@pytest.fixture(scope="module")
def baked(directory, tmp_path_factory):
    """The evaluations of the model as `fp8kv bake` writes it, by purpose."""
    out = tmp_path_factory.mktemp("baked")
    # the samples that the evaluation calibrates on
    scales = out / "scales"
    done = calibrate(directory, "-o", scales, "--dtype", "float32", "--format", "fp8kv")
    assert done.exit_code == 0, done.stderr
    found = {}
    for purpose in ("fp8", "int8"):
        done = bake(directory, scales, out / purpose, "--for", purpose)
        assert done.exit_code == 0, done.stderr
        found[purpose] = evaluate(str(out / purpose), RECIPE, suite=SMALL)
    return found


def test_the_choices_are_the_types():
    assert CacheName.__args__ == ("all", *ALL_CACHES)


@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_per_token_head", "lmdeploy_int8"])
def test_simulated_baking_is_the_baked_model_bit_for_bit(name, evaluation, baked):
    simulated = evaluation.measured[f"{name}, baked"].documents
    plain = evaluation.measured[name].documents
    for ours, theirs, other in zip(simulated, baked["int8"].measured[name].documents, plain, strict=True):
        assert torch.equal(ours.kl, theirs.kl)
        assert torch.equal(ours.nll, theirs.nll)
        assert not torch.equal(ours.kl, other.kl)


def test_fp8_at_one_on_baked_weights_is_the_baked_model(evaluation, baked):
    simulated = evaluation.measured["fp8, baked"].documents
    real = baked["fp8"].measured["none"].documents
    plain = evaluation.measured["none"].documents
    for ours, theirs, other in zip(simulated, real, plain, strict=True):
        # the FP8 cache of our runtime hands attention a copy of K and V, laid out otherwise
        torch.testing.assert_close(ours.kl, theirs.kl, rtol=1e-3, atol=1e-7)
        assert not torch.allclose(ours.kl, other.kl, rtol=1e-3, atol=1e-7)


def test_a_baked_model_has_no_baked_rows(baked):
    for evaluation in baked.values():
        assert not any(m.variant.is_baked for m in evaluation.measured.values())
        assert "int8_per_token_head" in evaluation.measured


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_is_the_rounding_of_k_and_v(name, evaluation, directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    rounded = rounding(name, dtype=torch.bfloat16)  # as the checkpoint is

    def attend(original, module, query, key, value, *args, **kwargs):
        return original(module, query, *rounded(module.layer_idx, key, value), *args, **kwargs)

    documents = evaluation.measured[name].documents
    texts = evaluate_documents(directory)
    for ids, found in zip(texts, documents, strict=True):
        with torch.inference_mode():
            p = model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)
            with swap_attention(model, attend):
                q = model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        # the logits are float32's
        torch.testing.assert_close(found.kl.double(), kl, rtol=0.02, atol=1e-8)
        assert kl.max() > 1e-7


def evaluate_documents(directory):
    data = RECIPE.data.model_copy(update={"samples": 7, "seq_len": 32})
    tokenizer = load_tokenizer(find_model(str(directory)))
    model = tiny_model("llama")
    return [torch.tensor(s) for s in load_data(data, tokenizer, lambda: model).samples[4:]]


def test_bytes_have_all_overhead(evaluation):
    rows = summarize(evaluation).to_json()["variants"]
    fp8 = sum(heads * (k + v) for heads, k, v in SHAPES)
    assert rows["reference"]["bytes_per_token"] == 2 * fp8
    for name in ("none", "tensor", "attn_head", "fp8, baked"):
        assert rows[name]["bytes_per_token"] == fp8
    for name in CACHES:
        wanted = cache_type(name).bytes_per_token(SHAPES)
        assert rows[name]["bytes_per_token"] == wanted
        assert wanted != fp8
    assert "bytes_per_token" not in rows["bf16"]
    assert rows["int8_per_token_head, baked"]["is_baked"]
    assert rows["int8_per_token_head, baked"]["cache"] == "int8_per_token_head"


def test_each_writes_text(evaluation):
    for name in (*CACHES, "fp8, baked"):
        assert len(evaluation.measured[name].same_tokens) == 2


@pytest.mark.parametrize("dims", [24, 40])
def test_a_head_size_that_is_not_allowed(dims):
    shapes = [(2, dims, dims)]
    with pytest.raises(InputError, match=rf"nvfp4: head size {dims} .*leave it out of --caches"):
        select_types(["fp8", "nvfp4"], shapes)
    types, warnings = select_types(["all"], shapes)
    assert [kind.name for kind in types] == [n for n in CACHES if "nvfp4" not in n]
    assert len(warnings) == len(CACHES) - len(types)
    assert all(str(dims) in warning for warning in warnings)


def test_names_are_those_that_can_be_gated():
    assert cache_names(["fp8", "nvfp4"]) == ["nvfp4", "fp8, baked"]
    assert cache_names(["int8_per_token_head"])[1:] == ["int8_per_token_head, baked"]
    assert set(CACHES) < set(cache_names(["all"]))


def test_a_gate_on_a_row_that_cannot_be_is_refused_at_once(directory, monkeypatch):
    monkeypatch.setattr("calib.evaluate.run.find_model", lambda _: pytest.fail("measured"))
    for name in ("nvfp4, baked", "fp8"):
        done = fp8kv("eval", directory, "--caches", "fp8,nvfp4", "--fail-if", f"{name}:kl>1")
        one_line_error(done, f"'{name}'")


def test_what_bake_refuses_has_no_baked_rows(tmp_path):
    directory = save_model(tiny_model("olmo", clip_qkv=0.5), tmp_path / "olmo")
    evaluation = evaluate(str(directory), RECIPE, suite=SMALL)
    assert not any(m.variant.is_baked for m in evaluation.measured.values())
    warnings = [w for w in evaluation.warnings if "clips Q, K and V" in w]
    assert [w.partition(":")[0] for w in warnings] == [
        "no rows on weights baked for fp8",
        "no rows on weights baked for int8",
    ]


def test_the_command_line(directory, tmp_path):
    flags = ("--dataset", "random", "--samples", "2", "--seq-len", "16", "--device", "cpu")
    out = tmp_path / "report"
    gate = ("--fail-if", "int8_per_token_head:kl>0")
    done = fp8kv(
        "eval", directory, "--caches", "int8_per_token_head,nvfp4", "--variants", "none", *flags,
        "-o", out, *gate,
    )  # fmt: skip
    assert done.exit_code == 1, done.stderr
    assert "int8_per_token_head: kl is" in done.stderr
    report = json.loads((out / "report.json").read_text())
    kinds = {name: row["kind"] for name, row in report["variants"].items()}
    assert kinds["nvfp4"] == kinds["int8_per_token_head, baked"] == "cache"
    assert "tensor" not in kinds
    assert fp8kv("compare", out, out).exit_code == 0
    one_line_error(
        fp8kv("eval", directory, "--caches", "int9", *flags), "evaluation.caches", "'int9'", "nvfp4"
    )
