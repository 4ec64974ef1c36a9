"""Divergence and intervals worked out by hand, in chunks and with kernels; the search for layers to skip."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from evaluations import variants_of
from families import FAMILIES, save_model, tiny_model, tiny_vision_language_model

from calib.divergence import ReferenceLogits
from calib.evaluate import measure
from calib.evaluate.layer_errors import poisson_interval
from calib.evaluate.measure import _only, compare_variants, search_layers
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.statistics import compare, difference, estimate, kl_by_position, quantile, ratio
from calib.evaluate.variants import REFERENCE, Setup
from calib.evaluate.verdict import _search_line, skip_argument
from calib.recipe import load_recipe


def document(seed, length):
    return torch.randint(1, 90, (length,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def test_chunks_give_what_one_pass_gives(monkeypatch):
    # float64, where chunks differ by what attention does in float32 alone; a document of which no K or V lies
    # so near the middle of two codes that this decides
    model, tokens = tiny_model("gemma3_text", **FAMILIES["gemma3_text"]).double(), document(1, 37)
    variants = [*variants_of(model, tokens).values()]
    setup = Setup(model, None, "torch")
    whole = compare_variants(setup, tokens, variants)
    monkeypatch.setattr(measure, "_TOKENS", 10)
    chunked = compare_variants(setup, tokens, variants)
    assert list(whole) == [REFERENCE, *(variant.name for variant in variants)]
    for name, divergence in whole.items():
        assert (divergence.kl.shape, divergence.nll.shape) == ((37,), (36,))
        torch.testing.assert_close(chunked[name].kl, divergence.kl, rtol=1e-3, atol=1e-8)
        torch.testing.assert_close(chunked[name].nll, divergence.nll, rtol=1e-4, atol=1e-5)
        assert torch.equal(chunked[name].agrees, divergence.agrees)
    assert whole["e5m2"].kl.mean() > 1.5 * whole["tensor"].kl.mean() > 0


@torch.inference_mode()
def test_the_kernels_give_the_same_figures():
    model, tokens = tiny_model("llama", num_hidden_layers=1), document(1, 8)
    tensor = [variants_of(model, tokens)["tensor"]]
    plain, kernels = (
        compare_variants(Setup(model, None, backend), tokens, tensor)["tensor"]
        for backend in ("torch", "triton")
    )
    assert not torch.equal(kernels.kl, plain.kl)  # they add in another order
    torch.testing.assert_close(kernels.kl, plain.kl, rtol=1e-3, atol=1e-8)


@torch.inference_mode()
def test_no_other_choice_of_layers_is_smaller():
    documents = [document(30, 30), document(20, 20)]
    model = tiny_model("llama", num_hidden_layers=4).eval()
    setup, variant = Setup(model, None, "torch"), variants_of(model, *documents)["tensor"]

    def mean_kl(skipped):
        only = _only(variant, set(range(4)) - set(skipped))
        kl = [compare_variants(setup, each, [only])[only.name].kl for each in documents]
        return torch.cat(kl).double().mean().item()

    kl_of = {skipped: mean_kl(skipped) for n in range(4) for skipped in combinations(range(4), n)}
    kl_of[0, 1, 2, 3] = 0.0
    for share in (0.0, 0.1, 0.3, 0.6, 1.5):
        budget = share * kl_of[()]
        found = search_layers(setup, [variant], documents, budget)
        assert len(found.skipped) == min(len(skipped) for skipped, kl in kl_of.items() if kl <= budget)
        assert found.kl == pytest.approx(kl_of[found.skipped], rel=1e-6)
        assert found.kl <= budget
        assert found.kl_of_all == pytest.approx(kl_of[()], rel=1e-6)
        for layer, kl in found.kl_alone.items():
            others = tuple(i for i in range(4) if i != layer)
            assert kl == pytest.approx(kl_of[others], rel=1e-6)
        if found.skipped:  # in vLLM's words, at the end of its line so that it can be copied
            assert _search_line(found).endswith(f" {skip_argument(found.skipped)}")
    assert skip_argument([3, 11]) == "--kv-cache-dtype-skip-layers 3 11"


@pytest.mark.parametrize("family", ["gpt_oss", "paligemma"])
def test_a_model_with_one_attention_implementation_has_one_control(family, tmp_path):
    options = FAMILIES.get(family)
    model = tiny_model(family, **options) if options else tiny_vision_language_model(family)
    choices = {"data.dataset": "random", "dtype": "float32", "evaluation.variants": ("tensor",)}
    recipe, path = load_recipe(None, choices), save_model(model, tmp_path / "model")
    found = evaluate(str(path), recipe, suite=Suite(3, 2, 24, 0, 5, (), (), 1))
    assert [name for name, m in found.measured.items() if m.variant.kind == "control"] == ["bf16"]
    assert any("one attention implementation" in line for line in found.warnings)


def test_divergence_of_two_small_distributions():
    reference = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]).log()
    variant = torch.tensor([[0.25, 0.75], [0.9, 0.1], [0.6, 0.4]]).log()
    found = compare(ReferenceLogits(reference), variant, torch.tensor([1, 0]))
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    last = 0.2 * math.log(0.2 / 0.6) + 0.8 * math.log(0.8 / 0.4)
    # the logits themselves are rounded
    torch.testing.assert_close(found.kl.float(), torch.tensor([first, 0.0, last]), rtol=1e-6, atol=1e-7)
    assert found.agrees.tolist() == [False, True, False]
    # the first distribution is of the second token, the second of the third
    torch.testing.assert_close(found.nll.float(), -torch.tensor([0.75, 0.9]).log())


def test_the_interval_covers_the_mean_19_times_in_20_and_quantiles_are_of_all_tokens():
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        # 40 documents that differ in level: tokens of one are alike
        documents = [rng.normal(rng.normal(3.0, 1.0), 0.1, size=30) for _ in range(40)]
        found = estimate(documents, seed=trial)
        covered += found.low <= 3.0 <= found.high
    # binomial: 190 expected, standard deviation 3; a bootstrap of 40 is a little narrow
    assert 178 <= covered <= 199
    assert estimate([np.arange(50.0), np.arange(50.0, 101.0)], quantile(0.99)).value == 99.0


def test_a_ratio_and_a_difference_of_means_are_resampled_by_document():
    rng = np.random.default_rng(0)
    weights = rng.uniform(1.0, 5.0, 50)
    found = ratio(3.0 * weights, weights)
    assert found.low == pytest.approx(found.value) == pytest.approx(found.high) == pytest.approx(3)
    spread = ratio(rng.normal(3.0, 1.0, 50) * weights, weights)
    # a mean of 50 documents is off by about 1 / sqrt(50)
    assert 0.3 < spread.high - spread.low < 1.0

    rng = np.random.default_rng(1)
    here = [rng.normal(2.0, 1.0, 50) for _ in range(40)]
    there = [rng.normal(1.0, 1.0, 30) for _ in range(30)]
    found = difference(here, there)
    assert found.value == pytest.approx(np.concatenate(here).mean() - np.concatenate(there).mean())
    assert found.low < found.value < found.high
    # variances of two means of 2,000 and 900 values add up; 1,000 resamples are within 10 %
    expected = 2 * 1.96 * (1 / 2000 + 1 / 900) ** 0.5
    assert found.high - found.low == pytest.approx(expected, rel=0.35)
    assert difference(there, here).value == -found.value


def test_positions_of_documents_of_different_lengths():
    documents = [np.arange(20.0), np.full(5, 7.0), np.full(40, 1.0)]
    first, second, third = kl_by_position(documents)
    assert (first.tokens, second.tokens, third.tokens) == (37, 20, 8)
    assert second.value == pytest.approx((16 + 17 + 18 + 19 + 16) / 20)
    assert (third.low, third.high) == (1.0, 1.0)  # one document alone


def test_poisson_intervals_are_the_tabulated_ones_and_leave_a_fortieth_on_each_side():
    # half the quantiles 0.025 of chi-square with 2 n degrees of freedom, and 0.975 with 2 n + 2, as
    # tables of the exact Poisson interval print them
    for events, ends in {0: (0.0, 3.6889), 1: (0.0253, 5.5716), 100: (81.3640, 121.6268)}.items():
        assert poisson_interval(events) == pytest.approx(ends, abs=5e-5), events
    for events in (1, 7, 10**6):
        low, high = (torch.tensor(x, dtype=torch.float64) for x in poisson_interval(events))
        # P(N >= events) at the lower end, P(N <= events) at the upper
        below = torch.special.gammainc(torch.tensor(float(events)).double(), low)
        above = torch.special.gammaincc(torch.tensor(events + 1.0).double(), high)
        assert (below.item(), above.item()) == pytest.approx((0.025, 0.025)), events
