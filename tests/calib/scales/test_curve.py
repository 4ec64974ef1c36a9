"""Buckets of tokens, and runs joined one after the other."""

import random
from itertools import chain

import pytest
import torch

from calib.errors import InputError
from calib.scales.places import BUCKETS, POSITION_BUCKETS, bucket_of, first_of
from calib.scales.stats import KVStats, LayerStats, TensorStats, bucket_indices


def test_buckets_are_powers_of_two():
    held = {bucket: [i for i in range(63) if bucket_of(i) == bucket] for bucket in range(6)}
    assert held == {
        0: [0], 1: [1, 2], 2: [3, 4, 5, 6], 3: [*range(7, 15)], 4: [*range(15, 31)],
        5: [*range(31, 63)],
    }  # fmt: skip
    assert [first_of(bucket) for bucket in held] == [tokens[0] for tokens in held.values()]


def test_buckets_of_many_tokens_are_exact_to_the_last():
    edges = [2**b - 1 + d for b in range(1, BUCKETS) for d in (-1, 0, 1)]
    assert bucket_indices(torch.tensor(edges)).tolist() == [bucket_of(i) for i in edges]


def run(values, read=None):
    """Statistics of one layer of one head that saw `values`, token by token."""
    curve, positions = torch.zeros(1, BUCKETS), torch.zeros(1, POSITION_BUCKETS)
    for i, value in enumerate(values):
        curve[0, bucket_of(i)] = max(value, curve[0, bucket_of(i)])
    positions[0, 0] = max(values)
    k = TensorStats(torch.tensor([[max(values)]]), curve=curve, positions=positions)
    tokens = len(values)
    return KVStats({"a": LayerStats(0, tokens, k, k, TensorStats(k.amax), read=read or tokens)})


def reached(stats, layer="a"):
    """The amax after each bucket."""
    return stats.layers[layer].k.curve[0].cummax(0).values.tolist()


def test_a_second_run_comes_after_the_first():
    joined = run([1.0] * 5).join(run([2.0, 1.0, 3.0]))
    # tokens 5; 6 and 7: of the last two nobody knows which was the largest
    assert reached(joined)[:5] == [1.0, 1.0, 2.0, 3.0, 3.0]
    assert (joined.tokens, joined.layers["a"].tokens_read) == (8, 8)
    other = run([2.0, 1.0, 3.0]).join(run([1.0] * 5))
    assert reached(other)[:4] == [2.0, 3.0, 3.0, 3.0]


def test_tokens_that_no_statistic_counts_were_read_nevertheless():
    joined = run([1.0] * 5, read=100).join(run([2.0]))
    assert joined.layers["a"].k.curve[0].nonzero().flatten().tolist() == [0, 1, 2, bucket_of(100)]
    assert (joined.tokens, joined.layers["a"].tokens_read) == (6, 101)


@pytest.mark.parametrize("seed", range(20))
def test_a_joined_curve_is_never_above_that_of_one_run_and_ends_with_it(seed):
    rng = random.Random(seed)
    parts = [[float(rng.randint(1, 9999)) for _ in range(rng.randint(1, 300))] for _ in range(3)]
    joined = run(parts[0]).join(run(parts[1])).join(run(parts[2]))
    whole = run([*chain.from_iterable(parts)])
    pairs = [*zip(reached(joined), reached(whole), strict=True)]
    assert all(one <= other for one, other in pairs)
    assert pairs[bucket_of(sum(map(len, parts)) - 1)][0] == max(map(max, parts))
    assert pairs[-1][0] == pairs[-1][1]
    for field in ("amax", "positions"):
        one, other = (getattr(s.layers["a"].k, field) for s in (joined, whole))
        assert torch.equal(one, other)


def test_parts_of_one_run_keep_their_places():
    one, other = run([5.0, 1.0, 2.0]), run([1.0, 7.0, 1.0, 9.0])
    merged = one.merge(other)
    assert merged.layers["a"].k.curve[0, :3].tolist() == [5.0, 7.0, 9.0]


def test_what_only_one_side_knows_of_places_is_dropped():
    plain = TensorStats(torch.tensor([[2.0]]))
    old = KVStats({"a": LayerStats(0, 3, plain, plain, plain)})
    for combined in (run([1.0]).join(old), old.join(run([1.0])), old.merge(run([1.0]))):
        layer = combined.layers["a"]
        assert layer.k.curve is layer.v.positions is None
        assert (layer.tokens, layer.tokens_read) == (4, 4)
        assert layer.k.amax.item() == 2.0


def test_runs_of_different_models_do_not_join():
    other = KVStats({"b": run([1.0]).layers["a"]})
    with pytest.raises(InputError, match="of different models"):
        run([1.0]).join(other)


def test_a_latent_and_its_k_pe_grow_together():
    one, other = (run(values).layers["a"].k for values in ([3.0, 1.0], [2.0, 5.0]))
    both = LayerStats(0, 2, one, other, one, latent=True).join_latent()
    assert both.curve[0, :2].tolist() == [3.0, 5.0]
    assert both.positions[0, 0] == 5.0
