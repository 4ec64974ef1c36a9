"""What is said of the text that was read, and what a record of it tells of other text."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from calib.errors import InputError
from calib.scales.text_summary import MAX_RUNS, SKETCH_BITS, TextRecord, TextSummary


def texts(samples=32, length=64, vocabulary=500, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(samples)]


@pytest.mark.parametrize("skip_first", [0, 3])
def test_counts(skip_first):
    samples = [*texts(), *texts(), [1, 2, 3], [1, 2, 3, 4], [1, 2, 9, 9, 9], [], [7]]
    summary = TextSummary.of(samples, skip_first, unknown={9, 5}, words=(12, 34))
    counted = [token for sample in samples for token in sample[skip_first:]]
    assert summary.tokens == len(counted)
    assert summary.samples == sum(len(sample) > skip_first for sample in samples)
    assert summary.distinct_tokens == len({*counted})
    assert summary.unknown_tokens == counted.count(9) + counted.count(5)
    # tokens that differ in themselves or in what is before them have a K of their own
    beginnings = {tuple(s[: n + 1]) for s in samples for n in range(skip_first, len(s))}
    assert (summary.unrepeated_tokens, (summary.words, summary.word_tokens)) == (len(beginnings), (12, 34))


ENOUGH = TextSummary.of(texts(), unknown={1}, words=(1500, 2048))


def test_each_doubt_is_one_line_of_its_own():
    for said, field, doubtful, close in (
        ("only 1,023 tokens were read", "tokens", 1023, 1024),
        ("only 31 different tokens occur", "distinct_tokens", 31, 32),
        ("the 32 samples are alike: 1,025 of 2,048", "unrepeated_tokens", 1023, 1024),
        ("4,097 words became 2,048 tokens", "words", 4097, 4096),
        ("10% of the tokens are the unknown token", "unknown_tokens", 205, 204),
    ):
        assert ENOUGH.warnings() == replace(ENOUGH, **{field: close}).warnings() == []
        (line,) = replace(ENOUGH, **{field: doubtful}).warnings()
        assert line.startswith(said)
        assert len(line.split()) <= 25


def test_next_to_nothing_is_refused_for_a_cause():
    for samples in ([[*range(63)]], [[*range(15)] * 9]):
        with pytest.raises(InputError, match=r"are too few to calibrate on.*--allow-few-tokens"):
            TextSummary.of(samples).check()
    for samples in ([[*range(64)]], [[*range(16)] * 9], []):
        TextSummary.of(samples).check()
    with pytest.raises(InputError, match=r"14 tokens, 1 of them different.*840 words became 14"):
        TextSummary.of([[1]] * 14, words=(840, 14)).check()
    with pytest.raises(InputError, match="100% of the tokens are the unknown token"):
        TextSummary.of([[0] * 100], unknown={0}, words=(100, 100)).check()


@pytest.mark.parametrize("vocabulary", [10, 500, 3000])
def test_of_joined_texts_different_tokens_are_estimated(vocabulary):
    """Exact where one text holds the other's tokens, or few collide; within 10% elsewhere."""
    parts = [texts(seed=seed, vocabulary=vocabulary) for seed in range(3)]
    whole = TextSummary.of([*parts[0], *parts[1], *parts[2]], unknown={3}, words=(300, 600))
    one, two, three = (TextSummary.of(part, unknown={3}, words=(100, 200)) for part in parts)
    for joined in (one.join(two).join(three), three.join(one).join(two)):
        assert joined.distinct_tokens == pytest.approx(whole.distinct_tokens, rel=0.1)
        # samples of other runs are taken to differ
        estimated = {"distinct_tokens": 0, "unrepeated_tokens": 0, "records": None}
        assert replace(joined, **estimated) == replace(whole, **estimated)
        assert whole.unrepeated_tokens <= joined.unrepeated_tokens <= joined.tokens
        assert len(joined.records) == 3
    assert one.join(one).distinct_tokens == one.distinct_tokens


def test_the_sketch_tells_no_token_apart_from_many_others():
    bits = [TextSummary.of([[token]]).sketch for token in range(32_000)]
    assert all(bit.bit_count() == 1 for bit in bits)
    sharing = Counter(bit.bit_length() for bit in bits)
    assert len(sharing) == SKETCH_BITS
    assert min(sharing.values()) >= 4
    one, other = (TextSummary.of([tokens]) for tokens in ([5, 7, 6], [6, 5, 7]))
    assert replace(one, records=None) == replace(other, records=None)


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
    # fewer tokens than a run are known as a whole, and never known to be new
    record = TextRecord.of([[5, 6, 7], sample(0)])
    assert record.has_read([5, 6, 7])
    assert record.has_read([5, 6]) is record.has_read(sample(0)[-10:]) is None


def test_a_long_text_keeps_a_record_of_some_kilobytes():
    texts = [sample(seed, 2048) for seed in range(500)]  # a million tokens, as the default recipe reads
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


def test_system_prompts_are_told_from_samples_that_differ_in_their_ends_alone():
    prompt = sample(0, 200)
    record = TextRecord.of([prompt + sample(seed, 60) for seed in range(1, 30)])
    assert not any(record.has_read(prompt + sample(seed, 60)) for seed in range(50, 90))
    assert all(record.has_read(prompt + sample(seed, 60)) for seed in range(1, 30))
    longer = TextRecord.of([sample(1), sample(1) + sample(2), sample(1) + sample(3)])
    assert longer.has_read(sample(1))  # which is no prompt: it was read as a chat of its own
    # chats with several answers each, or documents in two versions
    prompts = [sample(seed, 400) for seed in range(10)]
    for answers in (2, 4):
        ends = iter(sample(seed, 40) for seed in range(100, 200))
        record = TextRecord.of([prompt + next(ends) for prompt in prompts for _ in range(answers)])
        assert all(record.has_read(prompt + next(ends)) for prompt in prompts)


def test_a_record_is_salted_by_its_text_and_none_if_damaged():
    one, other = TextRecord.of([sample(0)]), TextRecord.of([sample(0), sample(1)])
    assert one.salt != other.salt
    assert not {*one._hashes.tolist()} <= {*other._hashes.tolist()}
    fields = one.model_dump()
    assert TextRecord.model_validate(fields) == one
    for broken in ({"runs": "%"}, {"one_in": 0}, {"below": 0}, {"salt": -1}, {"tokens": "5"}):
        with pytest.raises(ValidationError):
            TextRecord.model_validate(fields | broken)
