"""What is said of the text that was read: how much, how much of it is new, what is unknown."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from calib.errors import InputError
from calib.scales.text_summary import SKETCH_BITS, TextSummary, text_warnings


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
    assert summary.unrepeated_tokens == len(beginnings)
    assert (summary.words, summary.word_tokens) == (12, 34)


ENOUGH = TextSummary.of(texts(), unknown={1}, words=(1500, 2048))
# changes that make a doubt, and the nearest that make none
DOUBTS = {
    "only 1,023 tokens were read": (
        {"tokens": 1023, "unrepeated_tokens": 1023},
        {"tokens": 1024, "unrepeated_tokens": 1024},
    ),
    "only 31 different tokens occur": ({"distinct_tokens": 31}, {"distinct_tokens": 32}),
    "the 32 samples are alike: 1,025 of 2,048": ({"unrepeated_tokens": 1023}, {"unrepeated_tokens": 1024}),
    "4,097 words became 2,048 tokens": ({"words": 4097}, {"words": 4096}),
    "10% of the tokens are the unknown token": ({"unknown_tokens": 205}, {"unknown_tokens": 204}),
}


@pytest.mark.parametrize(("said", "changes"), DOUBTS.items(), ids=DOUBTS)
def test_each_doubt_is_one_line_of_its_own(said, changes):
    doubtful, close = changes
    assert ENOUGH.warnings() == replace(ENOUGH, **close).warnings() == []
    (line,) = replace(ENOUGH, **doubtful).warnings()
    assert line.startswith(said)
    assert len(line.split()) <= 25


def test_next_to_nothing_is_refused():
    for samples in ([[*range(63)]], [[*range(15)] * 9]):
        with pytest.raises(InputError, match=r"are too few to calibrate on.*--allow-few-tokens"):
            TextSummary.of(samples).check()
    for samples in ([[*range(64)]], [[*range(16)] * 9], []):
        TextSummary.of(samples).check()


def test_a_refusal_names_the_cause():
    summary = TextSummary.of([[1]] * 14, words=(840, 14))
    with pytest.raises(InputError, match=r"14 tokens, 1 of them different.*840 words became 14"):
        summary.check()
    summary = TextSummary.of([[0] * 100], unknown={0}, words=(100, 100))
    with pytest.raises(InputError, match="100% of the tokens are the unknown token"):
        summary.check()


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
    """Every bit may stand for any of a dozen ids of a small vocabulary, whatever their order."""
    bits = [TextSummary.of([[token]]).sketch for token in range(32_000)]
    assert all(bit.bit_count() == 1 for bit in bits)
    sharing = Counter(bit.bit_length() for bit in bits)
    assert len(sharing) == SKETCH_BITS
    assert min(sharing.values()) >= 4
    (sample,) = texts(samples=1)
    shuffled = random.Random(1).sample(sample, len(sample))
    assert shuffled != sample
    summary, other = TextSummary.of([sample]), TextSummary.of([shuffled])
    assert replace(summary, records=None) == replace(other, records=None)


def test_of_old_statistics_only_the_number_of_tokens_is_known():
    assert text_warnings(None, 1024) == []
    (line,) = text_warnings(None, 100)
    assert line.startswith("only 100 tokens were read")
