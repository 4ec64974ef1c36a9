"""Caches of other types than static FP8, plain and on baked weights."""

import json

import pytest
import torch
from baking import bake
from command_line import calibrate, fp8kv, one_line_error, succeeded
from evaluations import caches_recipe, plain_comparison, plain_inputs
from families import save_model, tiny_model

from calib.caches.rounding import rounding
from calib.caches.types import ALL_CACHES, CACHES, cache_type
from calib.choices import CacheName
from calib.errors import InputError
from calib.evaluate.cache_variants import cache_names, select_types
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate

pytestmark = pytest.mark.xdist_group("caches")
SMALL = Suite(4, 3, 32, 0, 0, (), (), 0)
SHAPES = [(2, 16, 16)] * 3


@pytest.fixture(scope="module")
def baked(caches_directory, tmp_path_factory):
    """The evaluations of the model as `fp8kv bake` writes it, by purpose."""
    out = tmp_path_factory.mktemp("baked")
    # the samples that the evaluation calibrates on
    scales = out / "scales"
    succeeded(calibrate(caches_directory, "-o", scales, "--dtype", "float32", "--format", "fp8kv"))
    found = {}
    for purpose in ("fp8", "int8"):
        succeeded(bake(caches_directory, scales, out / purpose, "--for", purpose))
        found[purpose] = evaluate(str(out / purpose), caches_recipe("none"), suite=SMALL).measured
        assert not any(m.variant.is_baked for m in found[purpose].values())
    return found


@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_per_token_head", "lmdeploy_int8"])
def test_simulated_baking_is_the_baked_model_bit_for_bit(name, caches_evaluation, baked):
    simulated = caches_evaluation.measured[f"{name}, baked"].documents
    plain = caches_evaluation.measured[name].documents
    for ours, theirs, other in zip(simulated, baked["int8"][name].documents, plain, strict=True):
        assert torch.equal(ours.kl, theirs.kl)
        assert torch.equal(ours.nll, theirs.nll)
        assert not torch.equal(ours.kl, other.kl)


def test_fp8_at_one_on_baked_weights_is_the_baked_model(caches_evaluation, baked):
    simulated = caches_evaluation.measured["fp8, baked"].documents
    plain = caches_evaluation.measured["none"].documents
    for ours, theirs, other in zip(simulated, baked["fp8"]["none"].documents, plain, strict=True):
        # the FP8 cache of our runtime hands attention a copy of K and V, laid out otherwise
        torch.testing.assert_close(ours.kl, theirs.kl, rtol=1e-3, atol=1e-7)
        assert not torch.allclose(ours.kl, other.kl, rtol=1e-3, atol=1e-7)


@pytest.fixture(scope="module")
def plain_caches(caches_evaluation):
    return plain_inputs(caches_evaluation)


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_is_the_rounding_of_k_and_v(name, caches_evaluation, plain_caches):
    rounded = rounding(name, dtype=torch.bfloat16)  # as the checkpoint is

    def attend(original, module, query, key, value, *args, **kwargs):
        return original(module, query, *rounded(module.layer_idx, key, value), *args, **kwargs)

    model, documents = plain_caches
    for ids, found in zip(documents, caches_evaluation.measured[name].documents, strict=True):
        kl, _ = plain_comparison(model, ids, attend)
        # the logits are float32's
        torch.testing.assert_close(found.kl.double(), kl, rtol=0.02, atol=1e-8)
        assert kl.max() > 1e-7


def test_bytes_have_all_overhead_and_each_cache_writes_text(caches_evaluation, caches_report):
    rows = caches_report.to_json()["variants"]
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
    for name in (*CACHES, "fp8, baked"):
        assert len(caches_evaluation.measured[name].same_tokens) == 2


@pytest.mark.parametrize("dims", [24, 40])
def test_a_head_size_that_is_not_allowed(dims):
    shapes = [(2, dims, dims)]
    with pytest.raises(InputError, match=rf"nvfp4: head size {dims} .*leave it out of --caches"):
        select_types(["fp8", "nvfp4"], shapes)
    types, warnings = select_types(["all"], shapes)
    assert [kind.name for kind in types] == [n for n in CACHES if "nvfp4" not in n]
    assert len(warnings) == len(CACHES) - len(types)
    assert all(str(dims) in warning for warning in warnings)


def test_names_are_the_types_and_those_that_can_be_gated():
    assert CacheName.__args__ == ("all", *ALL_CACHES)
    assert select_types(["all"], [(2, 64, 64)]) == ([cache_type(name) for name in CACHES], [])
    assert cache_names(["fp8", "nvfp4"]) == ["nvfp4", "fp8, baked"]
    assert cache_names(["int8_per_token_head"])[1:] == ["int8_per_token_head, baked"]
    assert set(CACHES) < set(cache_names(["all"]))


def test_what_bake_refuses_has_no_baked_rows(tmp_path):
    directory = save_model(tiny_model("olmo", clip_qkv=0.5), tmp_path / "olmo")
    evaluation = evaluate(str(directory), caches_recipe("none"), suite=SMALL)
    assert not any(m.variant.is_baked for m in evaluation.measured.values())
    warnings = [w for w in evaluation.warnings if "clips Q, K and V" in w]
    assert [w.partition(":")[0] for w in warnings] == [
        "no rows on weights baked for fp8",
        "no rows on weights baked for int8",
    ]


def test_the_command_line(caches_directory, tmp_path, monkeypatch):
    flags = ("--dataset", "random", "--samples", "2", "--seq-len", "16", "--device", "cpu")
    out, caches = tmp_path / "report", "int8_per_token_head,nvfp4"
    gate = ("--variants", "none", "--fail-if", "int8_per_token_head:kl>0")
    done = fp8kv("eval", caches_directory, "--caches", caches, *flags, "-o", out, *gate)
    assert done.exit_code == 1, done.stderr
    assert "int8_per_token_head: kl is" in done.stderr
    report = json.loads((out / "report.json").read_text())
    kinds = {name: row["kind"] for name, row in report["variants"].items()}
    assert kinds["nvfp4"] == kinds["int8_per_token_head, baked"] == "cache"
    assert "tensor" not in kinds

    monkeypatch.setattr("calib.evaluate.run.find_model", lambda _: pytest.fail("measured"))
    done = fp8kv("eval", caches_directory, "--caches", "int9", *flags)
    one_line_error(done, "evaluation.caches", "'int9'", "nvfp4")
    for name in ("nvfp4, baked", "fp8"):
        done = fp8kv("eval", caches_directory, "--caches", "fp8,nvfp4", "--fail-if", f"{name}:kl>1")
        one_line_error(done, f"'{name}'")
