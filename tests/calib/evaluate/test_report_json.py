"""The fields of report.json that charts are drawn from, recomputed plainly."""

import json
import re
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES, tiny_model
from transformers import AutoModelForCausalLM

from calib.capture.attention import observe_qkv
from calib.data import load_data
from calib.evaluate.layer_errors import FIRST_BIN, layer_values, read_layers
from calib.evaluate.measure import Measured
from calib.evaluate.report import Figure, Report, Row
from calib.evaluate.statistics import Divergence, kl_by_position, ratio
from calib.evaluate.variants import Setup, Variant
from calib.evaluate.verdict import Judgement
from calib.models.load import load_tokenizer
from calib.models.sources import find_model
from calib.recipe import Recipe


def test_kl_by_position_adds_up_to_kl(small_evaluation, small_report):
    for name, row in small_report["variants"].items():
        bins = row["kl_by_position"]
        assert [(b["from"], b["to"]) for b in bins] == [(0, 16), (16, 32), (32, 40)]
        weights = [b["tokens"] for b in bins]
        assert weights == [48, 48, 24]
        mean = np.average([b["value"] for b in bins], weights=weights)
        np.testing.assert_allclose(mean, row["kl"]["value"], rtol=1e-6)
        documents = small_evaluation.measured[name].documents
        second = torch.cat([document.kl[16:32] for document in documents]).mean()
        np.testing.assert_allclose(bins[1]["value"], second.item(), rtol=1e-6)
        assert all(b["low"] <= b["value"] <= b["high"] for b in bins)


def test_positions_of_documents_of_different_lengths():
    documents = [np.arange(20.0), np.full(5, 7.0), np.full(40, 1.0)]
    first, second, third = kl_by_position(documents)
    assert (first.tokens, second.tokens, third.tokens) == (37, 20, 8)
    assert second.value == pytest.approx((16 + 17 + 18 + 19 + 16) / 20)
    assert (third.low, third.high) == (1.0, 1.0)  # one document alone


def test_a_ratio_is_resampled_by_document():
    rng = np.random.default_rng(0)
    weights = rng.uniform(1.0, 5.0, 50)
    found = ratio(3.0 * weights, weights)
    assert found.low == pytest.approx(found.value) == pytest.approx(found.high) == pytest.approx(3)
    spread = ratio(rng.normal(3.0, 1.0, 50) * weights, weights)
    # a mean of 50 documents is off by about 1 / sqrt(50)
    assert 0.3 < spread.high - spread.low < 1.0


def reference_values(directory, recipe):
    """K and V [K, N] by layer, of the documents that per-layer figures are taken from."""
    data = recipe.data.model_copy(update={"samples": 6, "seq_len": 40})
    tokenizer = load_tokenizer(find_model(str(directory)))
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    seen = {}

    def keep(name, query, key, value):
        layer = seen.setdefault(model.get_submodule(name).layer_idx, ([], []))
        for kept, x in zip(layer, (key, value), strict=True):
            kept.append(x[0].flatten(1))

    with torch.inference_mode(), observe_qkv(model, keep):
        for document in load_data(data, tokenizer, lambda: model).samples[3:5]:
            model(torch.tensor([document]), use_cache=False)
    return {idx: [torch.cat(parts, 1) for parts in pair] for idx, pair in seen.items()}


def test_amax_and_histogram_are_those_of_the_reference(small_directory, small_recipe, small_report):
    expected = reference_values(small_directory, small_recipe)
    assert [layer["layer_idx"] for layer in small_report["layers"]] == sorted(expected) == [0, 1, 2]
    for layer in small_report["layers"]:
        for letter, x in zip("kv", expected[layer["layer_idx"]], strict=True):
            found = layer[letter]
            torch.testing.assert_close(torch.tensor(found["amax"]), x.abs().amax(1), rtol=1e-6, atol=0)
            counts = found["counts"]
            assert sum(counts) + found["zeros"] == x.numel()
            edges = 2.0 ** (found["log2_first"] + np.arange(len(counts) + 1) / 2)
            magnitudes = x.abs().double().flatten().numpy()
            np.testing.assert_array_equal(np.histogram(magnitudes, edges)[0], counts)


def test_histogram_bins_are_exact_where_logarithms_round():
    root = 2.0**0.5
    x = torch.tensor([1.0, -1.4142, 1.4143, 2.0, 0.0, 2.0**-149, 2.0**127])
    found = layer_values(x[None, None, None], torch.zeros(1, 2, 3, 4)[:, :1])
    bins = dict(enumerate(found.histogram[0, 0].tolist(), start=FIRST_BIN))
    expected = {0: 2, 1: 1, 2: 1, -298: 1, 254: 1}
    assert {i: n for i, n in bins.items() if n} == expected
    assert 1.4142 < root < 1.4143
    assert found.zeros.tolist() == [[1, 12]]
    assert found.histogram[0, 1].sum() == 0


def test_heads_that_transformers_repeats_are_counted_once():
    model = tiny_model("falcon", **FAMILIES["falcon"])
    _, values = read_layers(Setup(model, None), [torch.arange(9)], [])
    assert [layer.amax.shape for layer in values.values()] == [(1, 2, 2)] * 3
    assert [int(layer.histogram[0, 0].sum()) for layer in values.values()] == [2 * 9 * 16] * 3


def test_scales_are_those_of_the_variant(small_evaluation, small_report):
    for name, kind in (("tensor", float), ("attn_head", list), ("channel", dict)):
        scales = small_evaluation.measured[name].variant.scales.layers.values()
        for row, layer in zip(small_report["variants"][name]["layers"], scales, strict=True):
            for letter, expected in (("k", layer.k), ("v", layer.v)):
                found = row["scale"][letter]
                assert isinstance(found, kind)
                if kind is dict:
                    assert found == {"min": expected.min().item(), "max": expected.max().item()}
                else:
                    assert torch.tensor(found).view(-1).equal(expected)


def test_the_error_of_a_layer_is_over_all_its_heads(small_evaluation, small_report):
    for row in small_report["variants"]["tensor"]["layers"]:
        layer = small_evaluation.measured["tensor"].layers[row["layer_idx"]]
        assert layer.error.shape == (2, 4)
        expected = (layer.error.sum() / layer.power.sum()).sqrt().item()
        found = row["rel_rms_layer"]
        assert found["value"] == pytest.approx(expected)
        by_document = (layer.error.sum(1) / layer.power.sum(1)).sqrt()
        assert by_document.min() * 0.999 <= found["low"] <= found["value"]
        assert found["value"] <= found["high"] <= by_document.max() * 1.001


def test_texts_are_cut_where_they_leave_the_reference(small_evaluation, small_report):
    texts = small_report["texts"]
    assert texts["prompts"] == list(small_evaluation.texts.prompts)
    assert set(texts["continuations"]) == {"reference", "none", "tensor", "attn_head", "channel"}
    reference = texts["continuations"]["reference"]
    assert all(text["rest"] == "" and text["same_tokens"] == 6 for text in reference)
    for name, written in texts["continuations"].items():
        assert [t["same_tokens"] for t in written] == small_evaluation.measured[name].same_tokens
        for text, other in zip(written, reference, strict=True):
            assert other["same"].startswith(text["same"])


def test_conditions_are_recorded(small_report):
    assert small_report["versions"]["torch"] == version("torch")
    assert {"python", "fp8kv", "transformers"} <= set(small_report["versions"])
    assert small_report["machine"].strip()
    created = datetime.fromisoformat(small_report["created"])
    age = datetime.now(timezone.utc) - created
    assert created.tzinfo is not None
    assert 0 <= age.total_seconds() + 1 < 24 * 3600
    assert small_report["data"]["layer_documents"] == 2
    described = small_report["variants"]["channel"]
    assert (described["kind"], described["strategy"], described["fp8_dtype"]) == (
        "fp8",
        "channel",
        "e4m3fn",
    )


def measured(kl, kind="fp8"):
    """Three documents of two tokens with this KL, a little apart."""
    nll, agrees = torch.zeros(1), torch.ones(2, dtype=torch.bool)
    documents = [Divergence(torch.full((2,), kl * (1 + i / 100)), agrees, nll) for i in range(3)]
    return Measured(Variant("", "", kind), documents)


def row(kl, what, kind="fp8", measurable=True):
    figure, one = Figure(value=kl, low=kl, high=kl), Figure(value=1.0, low=1.0, high=1.0)
    change = one.model_copy(update={"value": 0.001})
    named = {"description": what, "kind": kind, "measurable": measurable}
    return Row.model_construct(**named, kl=figure, ppl_change=change, top1=one)


def say(floor=1e-5, **variants):
    rows = {name: row(*parts) for name, parts in variants.items()}
    of = {name: measured(parts[0]) for name, parts in variants.items()}
    return Judgement(of, rows, floor).verdict()


def test_the_verdict_is_sentences():
    assert say(none=(0.5, "scale 1.0"), tensor=(0.01, "one scale per layer")) == (
        "FP8 KV cache, one scale per layer: the KL is 0.01 nats [0.01, 0.01], perplexity changes by "
        "+0.10%, and 100.0% of top-1 tokens agree. No other scales that engines load are measurably "
        "better. Scale 1.0 is measurably worse (KL 0.5)."
    )
    assert say(tensor=(0.01, "one scale per layer"), mine=(0.03, "", "given")) == (
        "FP8 KV cache, scales of 'mine': the KL is 0.03 nats [0.03, 0.03], perplexity changes by "
        "+0.10%, and 100.0% of top-1 tokens agree. One scale per layer is measurably better (KL 0.01)."
    )
    assert say(tensor=(1e-6, "one scale per layer", "fp8", False)) == (
        "FP8 KV cache, one scale per layer: it does not differ measurably from the model's own cache "
        "(KL 1e-06 nats, noise floor 1e-05)."
    )
    assert Judgement({}, {}).verdict() == "No FP8 KV cache was measured."


def test_every_field_is_documented(small_report):
    documented = (Path(__file__).parents[3] / "docs/evaluation.md").read_text()
    variant = small_report["variants"]["tensor"]
    names = {*small_report, *small_report["data"], *variant, *variant["kl_by_position"][0]}
    names |= {*variant["layers"][0], *small_report["layers"][0]["k"]}
    names |= {*small_report["texts"], *small_report["texts"]["continuations"]["tensor"][0]}
    missing = {n for n in names if not re.search(rf"`[^`]*\b{n}\b[^`]*`", documented)}
    assert missing == set()


def test_a_report_read_back_is_the_same(small_report):
    written = json.dumps(small_report)
    assert json.dumps(Report.model_validate_json(written).to_json()) == written
    assert {"layers", "strategy", "passkey"}.isdisjoint(small_report["variants"]["bf16"])
    assert "tasks" not in small_report


def test_the_schema_in_the_documentation_is_that_of_the_report():
    command = [sys.executable, "-m", "calib.evaluate.report"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    written = Path(__file__).parents[3] / "docs/report.schema.json"
    assert written.read_text() == made, "python -m calib.evaluate.report > docs/report.schema.json"


def test_the_report_holds_the_recipe_that_made_it(small_recipe, small_report):
    recipe = Recipe.model_validate(small_report["recipe"])
    assert recipe.data.seed == small_recipe.data.seed
    assert recipe.evaluation == small_recipe.evaluation
    assert recipe.data.seq_len == small_report["suite"]["seq_len"]
