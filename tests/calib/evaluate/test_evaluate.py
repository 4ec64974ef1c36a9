"""The evaluation on tiny models: every figure recomputed plainly, every mistake one line."""

import json

import numpy as np
import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error
from fake_quant import fake_quantized, rounded
from families import FAMILIES, save_model, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache

from calib.data import load_data
from calib.errors import InputError
from calib.evaluate import inputs
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.summarize import summarize
from calib.models.load import load_tokenizer
from calib.models.sources import find_model
from calib.recipe import load_recipe
from fp8kv_runtime.hf import swap_attention

SMALL = Suite(3, 4, 24, 2, 5, (), (), 2)
CHOICES = {"data.dataset": "random", "device": "cpu", "dtype": "float32"}
RECIPE = load_recipe(None, CHOICES)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_model(tiny_model("mistral", **FAMILIES["mistral"]), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def evaluation(directory):
    return evaluate(str(directory), RECIPE, suite=SMALL)


@pytest.fixture(scope="module")
def report(evaluation):
    return summarize(evaluation).to_json()


def held_out(directory):
    data = RECIPE.data.model_copy(update={"samples": 7, "seq_len": 24})
    tokenizer = load_tokenizer(find_model(str(directory)))
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    return model, load_data(data, tokenizer, lambda: model).samples[3:]


@pytest.mark.parametrize("name", ["none", "e5m2", "tensor", "attn_head", "channel", "random"])
def test_kl_and_agreement_are_those_of_plain_transformers(name, evaluation, report, directory):
    model, documents = held_out(directory)
    scales = evaluation.measured[name].variant.scales
    kl, agreed = [], 0
    for document in documents:
        ids = torch.tensor([document])
        with torch.inference_mode():
            p = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
            with fake_quantized(model, scales):
                q = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1))
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
    row = report["variants"][name]
    np.testing.assert_allclose(row["kl"]["value"], torch.cat(kl).mean().item(), rtol=0.02)
    assert row["top1_count"] == agreed


def test_the_reference_and_the_controls_do_not_differ(report):
    reference = report["variants"]["reference"]
    assert reference["kl"]["value"] == 0
    assert reference["ppl_change"]["value"] == 0
    assert reference["top1"]["value"] == 1
    assert not report["variants"]["bf16"]["measurable"]
    assert report["variants"]["eager"]["kl"]["value"] < 1e-6
    assert report["variants"]["e5m2"]["measurable"]
    assert report["noise_floor"] >= report["variants"]["bf16"]["kl"]["value"]


@pytest.mark.parametrize("letter", ["k", "v"])
def test_one_tensor_alone(letter, evaluation, report, directory):
    model, documents = held_out(directory)
    scales = evaluation.measured[f"{letter} only"].variant.scales
    layers = {layer.layer_idx: layer for layer in scales.layers.values()}

    def attend(original, module, query, key, value, *args, **kwargs):
        layer = layers[module.layer_idx]
        if letter == "k":
            key = rounded(key, layer.k, torch.float8_e4m3fn)
        else:
            value = rounded(value, layer.v, torch.float8_e4m3fn)
        return original(module, query, key, value, *args, **kwargs)

    kl = []
    for document in documents:
        ids = torch.tensor([document])
        with torch.inference_mode():
            p = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
            with swap_attention(model, attend):
                q = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1))
    row = report["variants"][f"{letter} only"]
    np.testing.assert_allclose(row["kl"]["value"], torch.cat(kl).mean().item(), rtol=0.02)


def test_e5m2_is_worse_than_e4m3(report):
    variants = report["variants"]
    assert variants["e5m2"]["kl"]["low"] > variants["tensor"]["kl"]["high"]


def test_layers_count_what_rounding_does(report, directory):
    none, tensor = (report["variants"][name]["layers"] for name in ("none", "tensor"))
    assert [layer["layer_idx"] for layer in tensor] == [0, 1, 2]
    assert all(len(layer["rel_rms"]) == 4 for layer in tensor)
    assert all(0 < error < 0.2 for layer in tensor for error in layer["rel_rms"])
    assert all(share == 0 for layer in none for share in layer["saturated"]["k"])
    model, documents = held_out(directory)
    with torch.inference_mode():
        caches = [
            model(torch.tensor([ids]), past_key_values=DynamicCache()).past_key_values.layers
            for ids in documents[: SMALL.layer_documents]
        ]
    for index, layer in enumerate(none):
        amax = torch.stack([cache[index].keys.abs().amax((0, 2, 3)) for cache in caches]).amax(0)
        np.testing.assert_allclose(layer["range_used"]["k"], amax / 448, rtol=1e-6)
    assert max(max(layer["range_used"]["k"]) for layer in tensor) > 0.5


def test_variants_can_be_chosen(directory):
    recipe = load_recipe(None, {**CHOICES, "evaluation.variants": ["tensor"]})
    chosen = evaluate(str(directory), recipe, suite=SMALL)
    assert list(chosen.measured) == ["reference", "bf16", "eager", "tensor"]


@pytest.fixture
def small_suite(monkeypatch):
    monkeypatch.setitem(inputs.SUITES, "quick", SMALL)


def eval_(*arguments):
    return fp8kv("eval", *arguments, "--device", "cpu", "--dataset", "random")


@pytest.mark.usefixtures("small_suite")
def test_the_command_prints_writes_and_fails(directory, tmp_path):
    scales = tmp_path / "mine"
    assert calibrate(directory, "-o", scales, "--strategy", "attn_head").exit_code == 0
    done = eval_(directory, "--scales", scales, "-o", tmp_path / "report", "--fail-if", "kl<1e9")
    assert done.exit_code == 1
    assert "failed: mine: kl is " in done.stderr
    assert "advice: " in done.stdout
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert report["schema"] == 1
    assert report["variants"]["mine"]["what"] == "given with --scales"
    assert "| mine |" in (tmp_path / "report/report.md").read_text()
    passed = eval_(directory, "--variants", "tensor", "--fail-if", "tensor:kl>1e9", "--json")
    assert passed.exit_code == 0
    assert json.loads(passed.stdout)["data"]["documents"] == 4


@pytest.mark.usefixtures("small_suite")
def test_mistakes_get_one_line(directory, tiny_directory, tmp_path):
    one_line_error(
        eval_(directory, "--variants", "tensr"), "variants.0: Input should be 'bf16'", "got 'tensr'"
    )
    one_line_error(eval_(directory, "--fail-if", "speed>1"), "is not a condition")
    one_line_error(eval_(directory, "--seq-len", 999), "--seq-len 999 is longer than the model's 256")
    one_line_error(eval_(directory, "--samples", 1), "evaluation.samples: Input should be greater")
    one_line_error(eval_(directory, "--search", "much"), "evaluation.kl_budget: Input should be a")
    one_line_error(eval_(directory, "--scales", tmp_path), "holds no model")
    (tmp_path / "short.txt").write_text("w5 w6 w7\n")
    one_line_error(
        fp8kv("eval", directory, "--device", "cpu", "--dataset", tmp_path / "short.txt"),
        "has 1 samples, and 7 are needed, 3 of them to calibrate on: use a larger dataset",
    )
    llama = save_model(tiny_model("llama"), tmp_path / "llama")
    scales = tmp_path / "scales"
    assert calibrate(llama, "-o", scales, "--format", "fp8kv").exit_code == 0
    one_line_error(eval_(directory, "--scales", scales), "is of another model", "model_type llama")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/model.safetensors").touch()
    one_line_error(eval_(directory, "--variants", "tensor", "-o", tmp_path / "full"), "which is not a report")


@pytest.mark.usefixtures("small_suite")
def test_a_recipe_carries_its_evaluation_and_its_gates(directory, tmp_path):
    recipe = tmp_path / "gated.yaml"
    recipe.write_text(
        "strategy: attn_head\n"
        "data: {dataset: random}\n"
        "evaluation: {variants: [tensor], fail_if: ['kl_mean<1e9', 'tensor:top1<0']}\n"
    )
    out = tmp_path / "mine"
    done = calibrate(directory, "--recipe", recipe, "--dataset", "random", "-o", out, "--evaluate", "--json")
    assert done.exit_code == 1
    assert "failed: mine: kl is " in done.stderr
    assert "tensor: top1" not in done.stderr
    printed = json.loads(done.stdout)
    assert list(printed["evaluation"]["variants"]) == [
        "reference", "bf16", "eager", "tensor", "mine",
    ]  # fmt: skip
    assert json.loads((out / "evaluation/report.json").read_text()) == printed["evaluation"]
    assert (out / "model.safetensors.index.json").exists()
    # the same gates with the evaluation alone
    again = fp8kv("eval", directory, "--device", "cpu", "--recipe", recipe, "--scales", out)
    assert again.exit_code == 1
    assert "failed: mine: kl is " in again.stderr


@pytest.mark.parametrize(
    ("evaluation", "phrases"),
    [
        ("fail_if: ['tensr:kl>1']", ["no variant 'tensr'; there are bf16, eager, none", "mine"]),
        ("variants: [none], fail_if: ['tensor:kl>1']", ["no variant 'tensor'; there are none, bf"]),
        ("fail_if: ['reference:kl>1']", ["no variant 'reference'"]),
        ("tasks: [./gone.yaml]", ["--tasks './gone.yaml'", "No such file"]),
        ("tasks: [hellaswagg]", ["lm-eval has no task 'hellaswagg'; did you mean hellaswag"]),
    ],
)
def test_what_the_evaluation_must_refuse_is_refused_before_the_calibration(
    evaluation, phrases, directory, tmp_path, monkeypatch
):
    monkeypatch.setattr("calib.job.find_model", lambda *_: pytest.fail("it began"))
    recipe = tmp_path / "gated.yaml"
    recipe.write_text(f"evaluation: {{{evaluation}}}\n")
    done = calibrate(directory, "--recipe", recipe, "-o", tmp_path / "mine", "--evaluate")
    one_line_error(done, *phrases)
    assert not (tmp_path / "mine").exists()


def test_scales_that_are_none_are_found_before_the_model_is_loaded(directory, tmp_path, monkeypatch):
    monkeypatch.setattr("calib.evaluate.run.load_model", lambda *_: pytest.fail("loaded"))
    one_line_error(fp8kv("eval", directory, "--scales", tmp_path / "none"), "none' is not a dir")


def test_the_suites_length_is_cut_to_the_models_positions_and_a_given_one_is_refused(tmp_path):
    short = save_model(tiny_model("llama", max_position_embeddings=64), tmp_path / "short")
    choices = {**CHOICES, "evaluation.variants": ["tensor"]}
    done = evaluate(str(short), load_recipe(None, choices))
    assert done.suite.seq_len == 64
    assert "cut to the model's 64 positions; the default is 256 tokens" in done.warnings[0]
    typed = load_recipe(None, {**choices, "evaluation.seq_len": 65})
    with pytest.raises(InputError, match="--seq-len 65 is longer than the model's 64 positions"):
        evaluate(str(short), typed)
