"""The evaluation of a tiny model from end to end: figures recomputed plainly, every mistake one line."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error, succeeded
from evaluations import plain_comparison, plain_inputs
from fake_quant import fake_quantized
from families import save_model, tiny_model
from transformers import LlamaConfig

from calib.errors import InputError
from calib.evaluate.inputs import fit_suite
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.summarize import summarize
from calib.recipe import EvaluationRecipe, load_recipe

pytestmark = pytest.mark.xdist_group("evaluate")


def assert_plain(evaluation, report, name, model, documents):
    """The figures are those of plain transformers that attend to rounded K and V."""
    variant = evaluation.measured[name].variant
    altered = partial(fake_quantized, model, variant.scales, tensors=variant.tensors)
    kl, agreed = zip(*(plain_comparison(model, altered(), ids) for ids in documents), strict=True)
    row = report["variants"][name]
    np.testing.assert_allclose(row["kl"]["value"], torch.cat(kl).mean().item(), rtol=0.02)
    assert row["top1_count"] == torch.cat(agreed).sum()


@pytest.mark.parametrize("name", ["none", "e5m2", "attn_head", "channel", "k only", "v only", "random"])
def test_kl_and_agreement_are_those_of_plain_transformers(name, small_evaluation, small_report, plain):
    assert_plain(small_evaluation, small_report, name, *plain)


def test_figures_of_a_real_model_are_those_of_plain_transformers(smollm2_directory):
    names = ["none", "e5m2", "tensor", "attn_head", "channel+k_center"]
    choices = {"data.dataset": "builtin:python-docs", "device": "cpu", "evaluation.variants": names}
    suite = Suite(4, 2, 128, 0, 0, (), (), 0)
    evaluation = evaluate("builtin:smollm2", load_recipe(None, choices), suite=suite)
    report = summarize(evaluation).to_json()
    for name in ("e5m2", "channel+k_center"):
        assert_plain(evaluation, report, name, *plain_inputs(evaluation))
    kl = {name: row["kl"]["value"] for name, row in report["variants"].items()}  # what is known of this model
    assert kl["e5m2"] > 2 * kl["tensor"]
    assert kl["channel+k_center"] < kl["attn_head"]
    assert all(0.001 < kl[name] < 0.05 for name in ("none", "tensor", "attn_head"))
    assert report["noise_floor"] < 1e-3


def test_the_reference_and_the_controls_do_not_differ_and_e5m2_is_worse_than_e4m3(small_report):
    variants = small_report["variants"]
    figures = [variants["reference"][name]["value"] for name in ("kl", "ppl_change", "top1")]
    assert figures == [0, 0, 1]
    assert not variants["bf16"]["measurable"]
    assert variants["eager"]["kl"]["value"] < 1e-6
    assert small_report["noise_floor"] >= variants["bf16"]["kl"]["value"]
    assert variants["e5m2"]["measurable"]
    assert variants["e5m2"]["kl"]["value"] > 2 * variants["tensor"]["kl"]["value"]


def eval_(*arguments):
    return fp8kv("eval", *arguments, "--device", "cpu", "--dataset", "random")


@pytest.mark.usefixtures("small_suite")
def test_a_command_and_a_recipe_print_write_and_fail(small_directory, tmp_path):
    recipe, out = tmp_path / "gated.yaml", tmp_path / "mine"
    recipe.write_text(
        "strategy: attn_head\n"
        "data: {dataset: random}\n"
        "evaluation: {variants: [tensor], fail_if: ['kl_mean<1e9', 'tensor:top1<0']}\n"
    )
    done = calibrate(small_directory, "--recipe", recipe, "-o", out, "--evaluate", "--json")
    report = json.loads(done.stdout)["evaluation"]
    assert list(report["variants"]) == ["reference", "bf16", "eager", "tensor", "mine"]
    assert json.loads((out / "evaluation/report.json").read_text()) == report
    assert (out / "model.safetensors.index.json").exists()
    # the same gates with the evaluation alone
    again = fp8kv("eval", small_directory, "--device", "cpu", "--recipe", recipe, "--scales", out)
    gated = eval_(small_directory, "--scales", out, "-o", tmp_path / "report", "--fail-if", "kl<1e9")
    for each in (done, again, gated):
        assert each.exit_code == 1
        assert "failed: mine: kl is " in each.stderr
        assert "tensor: top1" not in each.stderr
    assert "advice: " in gated.stdout
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert (report["schema"], report["variants"]["mine"]["what"]) == (1, "given with --scales")
    assert "| mine |" in (tmp_path / "report/report.md").read_text()
    passed = succeeded(eval_(small_directory, "--variants", "tensor", "--fail-if", "tensor:kl>1e9", "--json"))
    assert json.loads(passed.stdout)["data"]["documents"] == 4


@pytest.mark.usefixtures("small_suite")
def test_mistakes_get_one_line_before_the_model_is_loaded(small_directory, tmp_path, monkeypatch):
    monkeypatch.setattr("calib.evaluate.run.load_model", lambda *_: pytest.fail("loaded"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/model.safetensors").touch()
    for flags, *phrases in (
        (("--variants", "tensr"), "variants.0: Input should be 'bf16'", "got 'tensr'"),
        (("--fail-if", "speed>1"), "is not a condition"),
        (("--scales", "own", "--fail-if", "x:kl>1"), "no variant 'x'; there are bf16, eager, none", ", own"),
        (("--fail-if", "tensor:kl>1", "--variants", "none"), "no variant 'tensor'; there are none, bf"),
        (("--fail-if", "reference:kl>1"), "no variant 'reference'"),
        (("--tasks", "./gone.yaml"), "--tasks './gone.yaml'", "No such file"),
        (("--seq-len", 999), "--seq-len 999 is longer than the model's 256"),
        (("--samples", 1), "evaluation.samples: Input should be greater"),
        (("--search", "much"), "evaluation.kl_budget: Input should be a"),
        (("--scales", tmp_path), "holds no model"),
        (("--scales", tmp_path / "none"), "none' is not a dir"),
        (("--scales", tmp_path, "--scales", tmp_path), "is given twice; give every directory once"),
        (("--variants", "tensor", "-o", tmp_path / "full"), "which is not a report"),
    ):
        one_line_error(eval_(small_directory, *flags), *phrases)


@pytest.mark.usefixtures("small_suite")
def test_too_little_text_and_scales_of_another_model_get_one_line(small_directory, tmp_path):
    (tmp_path / "short.txt").write_text("w5 w6 w7\n")
    one_line_error(
        fp8kv("eval", small_directory, "--device", "cpu", "--dataset", tmp_path / "short.txt"),
        "has 1 samples, and 7 are needed, 3 of them to calibrate on: use a larger dataset",
    )
    llama = save_model(tiny_model("llama"), tmp_path / "llama")
    succeeded(calibrate(llama, "-o", tmp_path / "scales", "--format", "fp8kv"))
    done = eval_(small_directory, "--scales", tmp_path / "scales")
    one_line_error(done, "is of another model", "model_type llama")


def test_what_the_evaluation_must_refuse_is_refused_before_the_calibration(tmp_path, monkeypatch):
    monkeypatch.setattr("calib.job.find_model", lambda *_: pytest.fail("it began"))
    (tmp_path / "gated.yaml").write_text("evaluation: {tasks: [hellaswagg]}\n")
    done = calibrate("gone", "--recipe", tmp_path / "gated.yaml", "-o", tmp_path / "mine", "--evaluate")
    one_line_error(done, "lm-eval has no task 'hellaswagg'; did you mean hellaswag")
    assert not (tmp_path / "mine").exists()


def test_the_suites_length_is_cut_to_the_models_positions_and_a_given_one_is_refused():
    config = LlamaConfig(max_position_embeddings=64)
    suite, (warning,) = fit_suite(config, EvaluationRecipe(), None)
    assert (suite.documents, suite.seq_len) == (8, 64)
    assert "cut to the model's 64 positions; the default is 256 tokens" in warning
    with pytest.raises(InputError, match="--seq-len 65 is longer than the model's 64 positions"):
        fit_suite(config, EvaluationRecipe(seq_len=65), None)
