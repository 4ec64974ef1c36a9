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
    assert (batch.sample_ids, batch.num_tokens) == ((1, 2, 0), 59)
    expected = torch.tensor([[2] * 20, [3] * 20, [1] * 19 + [PAD]])
    assert torch.equal(batch.input_ids, expected)
    assert torch.equal(batch.attention_mask, (expected != PAD).long())
    assert batch.input_ids.dtype == batch.attention_mask.dtype == torch.int64


def test_every_sample_is_in_one_batch_and_padding_stays_below_five_percent():
    assert make_batches([], batch_size=7, pad_id=PAD) == []
    for short, groups in ((19, [(0, 1)]), (18, [(0,), (1,)])):  # 1/40 and 2/40 = 5 % are padding
        batches = make_batches(samples_of(20, short), batch_size=8, pad_id=PAD)
        assert [batch.sample_ids for batch in batches] == groups
    rng, read = random.Random(0), 0
    samples = samples_of(*(rng.randint(1, 300) for _ in range(200)))
    batches = make_batches(samples, batch_size=7, pad_id=PAD)
    assert sorted(i for batch in batches for i in batch.sample_ids) == list(range(200))
    assert max(len(batch.sample_ids) for batch in batches) == 7
    for batch in batches:
        assert 1 - batch.num_tokens / batch.input_ids.numel() < 0.05
        assert batch.first_token == read
        read += batch.num_tokens
        for row, i in enumerate(batch.sample_ids):
            assert batch.input_ids[row][batch.attention_mask[row].bool()].tolist() == samples[i]


def test_the_largest_batch_is_first_and_the_seed_orders_the_others():
    first, other, again = (
        [batch.sample_ids[0] for batch in make_batches(samples_of(*range(30, 60)), 1, PAD, seed=seed)]
        for seed in (1, 2, 1)
    )
    assert first == again != other
    for order in (first, other):
        assert order[0] == 29
        assert sorted(order) == [*range(30)]
        assert order[1:] != sorted(order[1:], reverse=True)


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
    assert len(make_batches(samples, size, PAD)) >= min(processes, len(samples))
    if len(make_batches(samples, 8, PAD)) >= processes:
        assert size == 8
    # what the user typed is obeyed, whatever follows from it
    assert shared_batch_size(DataRecipe(batch_size=7), "cpu", samples, processes) == 7
