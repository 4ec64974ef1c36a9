"""Tails: chances against samples of known distributions, and the headroom made of them."""

import pytest
import torch

from calib.errors import InputError
from calib.scales.tail import TAIL, Tail, headroom_for, largest

TOKENS = 4096


def of(values):
    """The tail of `values` [groups, tokens]."""
    return Tail.of(largest(values, values[:, :0]), values.shape[-1], per_head=True)


def exponential(groups=400, tokens=TOKENS, seed=0):
    uniform = torch.rand(groups, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return 5 - uniform.log()


def test_the_largest_of_parts_are_those_of_the_whole_in_any_order():
    values = exponential(3)
    expected = values.sort(descending=True).values[:, :TAIL]
    parts = values.split([1, 5, 1000, TOKENS - 1006], dim=-1)
    for order in ((0, 1, 2, 3), (3, 0, 2, 1)):
        held = values[:, :0]
        for i in order:
            held = largest(held, parts[i])
        assert torch.equal(held, expected)
    # one group of all heads has the largest of them
    whole = Tail.of(expected, TOKENS, per_head=False)
    assert torch.equal(whole.top[0], values.flatten().sort(descending=True).values[:TAIL])
    # fewer values than a tail holds are filled up with zeros
    held = largest(torch.tensor([[3.0, 7.0]]), torch.tensor([[5.0]]))
    assert (held.shape, held[0, :4].tolist()) == ((1, TAIL), [7.0, 5.0, 3.0, 0.0])


def test_the_chance_is_that_of_an_exponential_distribution_within_its_error():
    """Of each sample the truth is known: e**-(largest - 5)."""
    tail = of(exponential())
    truth = torch.exp(5 - tail.largest)

    def within_a_factor_of_3(chance):
        return float(((chance / truth).log().abs() < torch.tensor(3.0).log()).double().mean())

    # the count alone says the same of every sample; a largest value's chance varies by e**1.28
    assert within_a_factor_of_3(torch.tensor(1 / TOKENS)) < 0.7
    assert within_a_factor_of_3(tail.chance) > 0.85


def test_the_chance_is_counted_below_the_largest_and_falls_by_the_decay_beyond_it():
    tail = of(exponential(5))
    between = (tail.top[:, 9] + tail.top[:, 10]) / 2
    assert (tail.chance_above(between) * TOKENS).tolist() == [10] * 5
    assert torch.all(tail.chance_above(tail.top[:, -1] / 4) <= 1)
    further = tail.chance_above(tail.largest + tail.decay)
    # two roundings of a scale are between both levels
    generalised_pareto = (1 + 0.2) ** (-1 / 0.2)
    torch.testing.assert_close(further, tail.chance * generalised_pareto, rtol=1e-4, atol=0)


def test_what_more_tokens_reach_grows_with_them_and_is_about_right():
    values = exponential(tokens=5 * TOKENS)
    tail, true = of(values[:, :TOKENS]), values[:, TOKENS:].amax(-1)
    reached = tail.reached_in(4 * TOKENS)
    assert torch.all(reached >= tail.largest)
    assert torch.all(tail.reached_in(100 * TOKENS) > reached)
    # the largest of so many is within 1.3 of its mode by one standard deviation
    assert (reached - true).mean().abs() < 0.5
    assert (tail.largest - true).mean() < -1


def test_a_value_that_returns_is_an_end_and_zeros_clip_nothing():
    values = exponential(1)
    tied = values.clone()
    tied[:, :9] = values.amax()
    # the slope becomes flatter, and the root of nine is taken off
    assert float(of(tied).decay / of(values).decay) > 1
    assert float(of(tied).chance / of(values).chance) < 0.7
    zeros = of(torch.zeros(1, TOKENS, dtype=torch.float64))
    assert (zeros.chance_above(torch.ones(1)).tolist(), zeros.reached_in(TOKENS).tolist()) == ([0], [0])


def test_headroom_is_the_smallest_that_keeps_the_chance_or_refused():
    tails = [of(exponential(3, seed=1)), of(exponential(2, seed=2))]

    def clipped(factor):
        return sum(float(t.chance_above(t.largest * factor).sum()) for t in tails)

    for chance in (1e-4, 1e-6):
        factor = headroom_for(tails, chance)
        assert clipped(factor) <= chance < clipped(factor - 2e-4)
    assert headroom_for([of(exponential(1))], 0.1) == 1.0
    with pytest.raises(InputError, match="1,023 tokens are too few .* 1,024 or more"):
        of(exponential(1, tokens=1023))
    of(exponential(1, tokens=1024))
    top = torch.linspace(1, 1000, TAIL).flip(0)[None]
    with pytest.raises(InputError, match="headroom over 16 .* give --headroom a number"):
        headroom_for([Tail.of(top, 2000, per_head=True)], 1e-300)
