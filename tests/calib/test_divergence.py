"""KL of any two rows of float32 logits, against arithmetic of 400 digits."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from calib.divergence import ReferenceLogits, divergence
from calib.evaluate.statistics import compare

# what a probability loses that is subnormal in float64, times the largest difference
_SUBNORMAL = 1e-280
_WIDE = (1e-30, 1e-3, 1.0, 20.0, 300.0, 1e4, 1e20, 3e38)
LARGEST = float(torch.finfo(torch.float32).max)


def exact(expected, found):
    with mpmath.workdps(400):
        logs = []
        for row in (expected, found):
            row = [mpmath.mpf(float(x)) for x in row]
            whole = mpmath.log(sum(mpmath.exp(x - max(row)) for x in row))
            logs.append([x - max(row) - whole for x in row])
        return float(sum(mpmath.exp(p) * (p - q) for p, q in zip(*logs, strict=True)))


def check(expected, found):
    rows = torch.tensor([[expected], [found]])
    assert divergence(*rows).item() == pytest.approx(exact(*rows[:, 0].tolist()), rel=1e-6, abs=_SUBNORMAL)


@st.composite
def pairs(draw):
    """Two rows: apart, or one a rounding, a shift or a nudge away from the other."""
    length = draw(st.integers(1, 6))
    sizes = st.sampled_from([float(np.float32(x)) for x in _WIDE])
    numbers = sizes.flatmap(lambda size: st.floats(-size, size, width=32, allow_subnormal=False))
    one = st.lists(numbers, min_size=length, max_size=length)
    expected, other = np.array(draw(one), np.float32), np.array(draw(one), np.float32)
    with np.errstate(over="ignore"):
        ways = (
            other,
            np.nextafter(expected, other),
            expected + np.float32(1e-7) * np.sign(other),
            expected + other[0],
            np.where(other > 0, expected, other),
        )
    found = ways[draw(st.integers(0, len(ways) - 1))]
    return expected.tolist(), found.clip(-LARGEST, LARGEST).tolist()


@settings(max_examples=400, deadline=None)
@given(pairs())
@example(([0.0, -90.0, -90.0], [-0.5, 0.0, 0.0]))
@example(([0.0, -120.0], [-3.0, 10.0]))
@example(([0.0, -740.0], [0.0, -40.0]))
@example(([3e38, 3e38], [1.0, 0.0]))
@example(([3e38, -3e38], [-3e38, 3e38]))
@example(([1e-3, 1e-3 + 2e-10], [5.0, 5.0]))
@example(([0.0, 1e-8, -60.0], [1e-15, 1e-8, -59.9]))
@example(([0.0, 0.0, -20.0], [1e-7, 0.0, -20.0]))
def test_every_pair_of_finite_logits_has_its_kl(pair):
    check(*pair)


def test_a_large_vocabulary_does_not_overflow_and_equal_ones_have_none_at_any_size():
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0))
    for size, change in ((1e-30, 1.0), (1e-3, 1e-7), (1.0, 1e-7), (20.0, 1e-3), (300.0, 1.0), (3e38, 1e-3)):
        expected = torch.linspace(-1, 1, 400) * size
        check(expected.tolist(), (expected * (1 + change * noise)).clamp(-LARGEST, LARGEST).tolist())
    kl = divergence(torch.tensor([[LARGEST, -LARGEST]]), torch.tensor([[-LARGEST, LARGEST]]))
    assert kl.item() == pytest.approx(2 * LARGEST, rel=1e-12)
    for size in _WIDE:
        logits = torch.randn(3, 1000).clamp(-1, 1) * size
        assert divergence(logits, logits.clone()).tolist() == [0.0] * 3
    reference = torch.tensor([[0.0, 3e38], [200.0, 0.0]])
    found = compare(ReferenceLogits(reference), reference, torch.tensor([0, 1]))
    assert (found.nll.tolist(), found.kl.tolist()) == (pytest.approx([3e38, 200.0], rel=1e-6), [0.0, 0.0])


def test_a_masked_vocabulary_counts_for_nothing():
    torch.manual_seed(0)
    expected, noise, masked = torch.randn(4, 60) * 5, torch.randn(4, 60), torch.arange(60) % 3 == 0
    for change in (1.0, 1e-6):
        rows = [x.masked_fill(masked, -math.inf) for x in (expected, expected + change * noise)]
        whole = divergence(*(x[:, ~masked].contiguous() for x in rows))
        assert (whole > 0).all()
        torch.testing.assert_close(divergence(*rows), whole, rtol=1e-6, atol=0)


def test_what_only_one_of_two_masks_or_what_is_no_number():
    expected, found = torch.tensor([[0.0, 1.0, -2.0]]), torch.tensor([[0.0, 1.0, -math.inf]])
    assert divergence(expected, found).tolist() == [math.inf]  # the reference gives it a chance
    # e**-900 is 0 in float64, and still a chance
    assert divergence(expected - torch.tensor([0, 0, 900.0]), found).tolist() == [math.inf]
    q = 1 - 1 / (1 + math.exp(-2) / (1 + math.e))
    assert divergence(found, expected).item() == pytest.approx(-math.log1p(-q), rel=1e-6)
    good = torch.zeros(2, 3)
    for bad in (math.nan, math.inf):
        spoiled = torch.tensor([[0.0, bad, 0.0], [0.0, 0.0, 0.0]])
        for pair in ((good, spoiled), (spoiled, good), (spoiled, spoiled)):
            assert divergence(*pair).isnan().tolist() == [True, False]
    # what the reference cannot say is not known, whatever the variant rules out
    assert divergence(torch.tensor([[math.nan, 0.0, 1.0]]), found).isnan().all()
    nothing = torch.full((1, 3), -math.inf)
    assert divergence(nothing, nothing).isnan().all()
