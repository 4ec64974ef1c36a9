"""What a record of text tells of other text."""

import pydoc_data.topics

import numpy as np
import pytest
from pydantic import ValidationError

from calib.scales.text_summary import MAX_RUNS, TextRecord


def sample(seed, length=256):
    return np.random.default_rng(seed).integers(50_000, size=length).tolist()


def test_what_was_read_is_known_wherever_it_begins():
    texts = [sample(seed) for seed in range(20)]
    record = TextRecord.of(texts)
    assert record == TextRecord.of(texts[::-1])
    joined = [token for text in texts for token in text]
    assert all(record.has_read(joined[i : i + 100]) for i in range(0, 5000, 77))
    assert not any(record.has_read(sample(seed)) for seed in range(100, 300))
    # of texts whose beginning was read, all is known
    for cut in (64, 128):
        record = TextRecord.of([text[:cut] for text in texts])
        assert all(record.has_read(text) for text in texts), cut


def test_a_text_of_fewer_tokens_than_a_run_is_known_as_a_whole():
    record = TextRecord.of([[5, 6, 7], sample(0)])
    assert record.has_read([5, 6, 7])
    assert record.has_read([5, 6]) is None  # nor is it known to be new
    assert record.has_read(sample(0)[-10:]) is None


def test_a_long_text_keeps_a_record_of_some_kilobytes():
    """A million tokens, as the default recipe reads."""
    texts = [sample(seed, 2048) for seed in range(500)]
    record = TextRecord.of(texts)
    assert MAX_RUNS / 2 < len(record._hashes) <= MAX_RUNS
    assert len(record.runs) < 30_000
    told = [record.has_read(text[1000:1256]) for text in texts]
    assert False not in told
    assert told.count(None) < 0.05 * len(told)  # none of whose runs was kept: e^-3.8
    longer = [text + sample(seed + 512, 8 * 2048) for seed, text in enumerate(texts[:50])]
    assert all(map(record.has_read, longer))  # cut by a larger --seq-len
    others = [record.has_read(sample(seed)) for seed in range(1000, 2000)]
    assert others.count(True) < 0.01 * len(others)


def test_chats_with_one_system_prompt_are_told_apart():
    prompt = sample(0, 200)
    record = TextRecord.of([prompt + sample(seed, 60) for seed in range(1, 30)])
    assert not any(record.has_read(prompt + sample(seed, 60)) for seed in range(50, 90))
    assert all(record.has_read(prompt + sample(seed, 60)) for seed in range(1, 30))
    longer = TextRecord.of([sample(1), sample(1) + sample(2), sample(1) + sample(3)])
    assert longer.has_read(sample(1))  # which is no prompt: it was read as a chat of its own


@pytest.mark.parametrize("answers", [2, 4])
def test_samples_that_differ_in_their_ends_alone_are_known(answers):
    """Chats with several answers each, or documents in two versions, are no system prompts."""
    prompts = [sample(seed, 400) for seed in range(10)]
    ends = iter(sample(seed, 40) for seed in range(100, 200))
    record = TextRecord.of([prompt + next(ends) for prompt in prompts for _ in range(answers)])
    assert all(record.has_read(prompt + next(ends)) for prompt in prompts)


def test_prose_by_the_same_authors_is_new():
    """Of Python's documentation, whose topics repeat parts of each other, what does not."""
    numbers = dict[str, int]()
    topics = sorted({*pydoc_data.topics.topics.values()})
    texts = [[numbers.setdefault(w, len(numbers)) for w in topic.split()] for topic in topics]
    texts = [text for text in texts if len(text) >= 100]
    record = TextRecord.of(texts[::2])
    runs = {tuple(text[i : i + 16]) for text in texts[::2] for i in range(len(text) - 15)}
    new, copies = [], []
    for text in texts[1::2]:
        share = sum(tuple(text[j : j + 16]) in runs for j in range(len(text) - 15)) / (len(text) - 15)
        new += [text] if share < 0.05 else []
        copies += [text] if share > 0.5 else []
    assert len(new) > 20
    assert not any(record.has_read(text) for text in new)
    assert copies
    assert all(record.has_read(text) for text in copies)


def test_the_salt_changes_with_the_text():
    one, other = TextRecord.of([sample(0)]), TextRecord.of([sample(0), sample(1)])
    assert one.salt != other.salt
    assert not {*one._hashes.tolist()} <= {*other._hashes.tolist()}


def test_a_record_that_is_damaged_is_none():
    fields = TextRecord.of([sample(0)]).model_dump()
    assert TextRecord.model_validate(fields) == TextRecord.of([sample(0)])
    for broken in ({"runs": "%"}, {"one_in": 0}, {"below": 0}, {"salt": -1}, {"tokens": "5"}):
        with pytest.raises(ValidationError):
            TextRecord.model_validate(fields | broken)
