"""Batches hold every sample once, in a fixed order, with less than 5 % padding."""

import random

import pytest
import torch

from calib.data import make_batches, resolve_batch_size
from calib.data.batches import shared_batch_size
from calib.errors import InputError
from calib.recipe import DataRecipe

PAD = 99


def samples_of(*lengths):
    return [[i + 1] * length for i, length in enumerate(lengths)]


def test_rows_are_padded_on_the_right_and_masked():
    (batch,) = make_batches([[1] * 19, [2] * 20, [3] * 20], batch_size=3, pad_id=PAD)
    assert batch.sample_ids == (1, 2, 0)
    expected = torch.tensor([[2] * 20, [3] * 20, [1] * 19 + [PAD]])
    assert torch.equal(batch.input_ids, expected)
    assert torch.equal(batch.attention_mask, (expected != PAD).long())
    assert batch.input_ids.dtype == batch.attention_mask.dtype == torch.int64
    assert (batch.num_tokens, bool(batch.attention_mask.all())) == (59, False)


@pytest.mark.parametrize(
    ("short", "groups"),
    [(19, [(0, 1)]), (18, [(0,), (1,)])],  # 1/40 and 2/40 = 5 % are padding
)
def test_a_batch_closes_before_its_padding_reaches_five_percent(short, groups):
    batches = make_batches(samples_of(20, short), batch_size=8, pad_id=PAD)
    assert [batch.sample_ids for batch in batches] == groups


def test_every_sample_is_in_one_batch_and_padding_stays_low():
    assert make_batches([], batch_size=7, pad_id=PAD) == []
    rng = random.Random(0)
    samples = samples_of(*(rng.randint(1, 300) for _ in range(200)))
    batches = make_batches(samples, batch_size=7, pad_id=PAD)
    assert sorted(i for batch in batches for i in batch.sample_ids) == list(range(200))
    assert max(len(batch.sample_ids) for batch in batches) == 7
    for batch in batches:
        assert 1 - batch.num_tokens / batch.input_ids.numel() < 0.05
        for row, i in enumerate(batch.sample_ids):
            assert batch.input_ids[row][batch.attention_mask[row].bool()].tolist() == samples[i]


def test_the_largest_batch_is_first_and_the_seed_orders_the_others():
    samples = samples_of(*range(30, 60))
    orders = {}
    for seed in (1, 2, 1):
        batches = make_batches(samples, 1, PAD, seed=seed)
        order = [batch.sample_ids[0] for batch in batches]
        assert order[0] == 29
        assert sorted(order) == [*range(30)]
        assert orders.setdefault(seed, order) == order
    assert orders[1] != orders[2]
    for order in orders.values():
        assert order[1:] != sorted(order[1:], reverse=True)


def test_the_first_token_of_a_batch_is_counted_by_the_real_ones_before_it():
    batches = make_batches(samples_of(40, 39, 20, 10, 9, 1), 2, PAD)
    assert not all(batch.attention_mask.all() for batch in batches)
    read = 0
    for batch in batches:
        assert batch.first_token == read
        read += sum(map(len, (row[row != PAD] for row in batch.input_ids)))
    assert read == 119


def test_samples_that_are_skipped_whole_are_not_read():
    batches = make_batches(samples_of(3, 2, 8, 4), 1, PAD, skip_first=3)
    assert sorted(batch.sample_ids for batch in batches) == [(2,), (3,)]
    assert {batch.skip_first for batch in batches} == {3}
    with pytest.raises(InputError, match=r"data.skip_first 8 leaves nothing.* has 8 tokens; set"):
        make_batches(samples_of(3, 8), 1, PAD, skip_first=8)


def test_auto_reads_as_many_tokens_at_once_as_the_device_likes():
    def size(batch_size, seq_len, device_type):
        return resolve_batch_size(DataRecipe(batch_size=batch_size, seq_len=seq_len), device_type)

    assert [size("auto", 512, "cpu"), size("auto", 512, "cuda"), size("auto", 100_000, "cuda")] == [8, 32, 1]
    assert size(3, 512, "cuda") == 3


@pytest.mark.parametrize("processes", [1, 3, 8, 40])
@pytest.mark.parametrize("lengths", [[512] * 40, [512] * 9, [*range(20, 400, 7)]])
def test_auto_gives_every_process_a_batch_and_is_left_alone_where_it_does(lengths, processes):
    samples, auto = samples_of(*lengths), DataRecipe(seq_len=512)
    size = shared_batch_size(auto, "cpu", samples, processes)
    batches = len(make_batches(samples, size, PAD))
    assert batches >= min(processes, len(samples))
    if len(make_batches(samples, 8, PAD)) >= processes:
        assert size == 8
    # what the user typed is obeyed, whatever follows from it
    assert shared_batch_size(DataRecipe(batch_size=7), "cpu", samples, processes) == 7
