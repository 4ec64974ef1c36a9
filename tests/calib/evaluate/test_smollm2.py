"""The figures on a real model, recomputed with plain transformers and an own FP8 rounding."""

import numpy as np
import pytest
import torch
from fake_quant import fake_quantized
from transformers import AutoModelForCausalLM, AutoTokenizer

from calib.data import load_data
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.summarize import summarize
from calib.recipe import DataRecipe, load_recipe

SUITE = Suite(4, 4, 128, 0, 0, (), (), 1)
NAMES = ["none", "e5m2", "tensor", "mse", "attn_head", "channel", "channel+k_center", "random"]


@pytest.fixture(scope="module")
def evaluation():
    choices = {"data.dataset": "builtin:python-docs", "device": "cpu"}
    recipe = load_recipe(None, {**choices, "evaluation.variants": NAMES})
    return evaluate("builtin:smollm2", recipe, suite=SUITE)


@pytest.fixture(scope="module")
def report(evaluation):
    return summarize(evaluation).to_json()


@pytest.fixture(scope="module")
def plain(smollm2_directory):
    return AutoModelForCausalLM.from_pretrained(smollm2_directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def documents(smollm2_directory):
    data = DataRecipe(dataset="builtin:python-docs", samples=8, seq_len=128)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_directory)
    return [torch.tensor(sample) for sample in load_data(data, tokenizer, None).samples[4:]]


def recomputed(model, documents, scales):
    """Mean KL per token in float64, and how often the likeliest token is the same."""
    kl, agreed = [], 0
    for document in documents:
        with torch.inference_mode():
            p = model(document[None], use_cache=False).logits[0].double().log_softmax(-1)
            with fake_quantized(model, scales):
                q = model(document[None], use_cache=False).logits[0].double().log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1))
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
    return torch.cat(kl).mean().item(), agreed


@pytest.mark.parametrize("name", ["none", "e5m2", "attn_head", "channel+k_center"])
def test_kl_and_agreement_are_those_of_plain_transformers(name, evaluation, report, plain, documents):
    scales = evaluation.measured[name].variant.scales
    kl, agreed = recomputed(plain, documents, scales)
    np.testing.assert_allclose(report["variants"][name]["kl"]["value"], kl, rtol=0.02)
    assert report["variants"][name]["top1_count"] == agreed


def test_what_is_known_of_this_model(report):
    kl = {name: row["kl"]["value"] for name, row in report["variants"].items()}
    assert kl["e5m2"] > 2 * kl["tensor"]
    assert kl["channel+k_center"] < kl["attn_head"]
    assert all(0.001 < kl[name] < 0.05 for name in ("none", "tensor", "attn_head", "random"))
    assert report["noise_floor"] < 1e-3
