"""KL, agreement and intervals, against values worked out by hand, in float64 or in printed tables."""

import math

import numpy as np
import pytest
import torch

from calib.divergence import ReferenceLogits
from calib.evaluate.layer_errors import poisson_interval
from calib.evaluate.statistics import compare, difference, estimate, kl_by_position, quantile, ratio


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
