"""Figures and warnings a user acts on, of scales and of the text that was read; what a record of it tells."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from calib.commands.calibrate import layer_rows
from calib.errors import InputError
from calib.recipe import load_recipe
from calib.scales.observers import AbsMax
from calib.scales.places import BUCKETS, POSITION_BUCKETS
from calib.scales.scales import SharedAttention
from calib.scales.stats import KVStats, LayerStats, TensorStats
from calib.scales.summary import summarize, warnings_for
from calib.scales.text_summary import MAX_RUNS, SKETCH_BITS, TextRecord, TextSummary

RECIPE = load_recipe(None)


def stats(*k_heads, v=1.0, shared=None):
    layers = {}
    for i, heads in enumerate(k_heads):
        k = TensorStats(torch.tensor(heads, dtype=torch.float32)[:, None].repeat(1, 2))
        other = TensorStats(torch.full((len(heads), 2), v))
        layers[f"layers.{i}.self_attn"] = LayerStats(i, 1024, k, other, other)
    return KVStats(layers, shared or {})


def derive(measured, strategy="tensor"):
    return measured.scales(strategy=strategy, observer=AbsMax())


def warn(measured, strategy="tensor", recipe=RECIPE):
    return warnings_for(measured, derive(measured, strategy), recipe)


def test_a_row_has_the_layers_figures():
    measured = stats([112.0, 448.0], v=224.0)
    (row,) = summarize(measured, derive(measured))
    assert layer_rows([row]) == [("0", "448", "224", "1", "0.5", "25%", "100%")]
    (row,) = summarize(measured, derive(measured, "attn_head"))
    assert (row.k_range_used, row.k_scale) == (1.0, 1.0)


def test_what_a_recipe_or_unscaled_fp8_clips_is_said():
    quiet = stats([10.0, 12.0, 9.0])
    assert warn(quiet) == warn(quiet, recipe=load_recipe(None, {"headroom": 1.5})) == []
    (warning,) = warn(quiet, recipe=load_recipe(None, {"headroom": 0.5}))
    assert warning.startswith("headroom 0.5: scales hold 50% of the largest values that were seen")
    (warning,) = warn(quiet, recipe=load_recipe(None, {"observer.name": "percentile"}))
    assert "clips the largest K, which is known to hurt" in warning
    assert warn(stats([448.0, 440.0])) == []
    (warning,) = warn(stats([10.0, 12.0], [500.0, 600.0]))
    assert warning.startswith("K scale > 1 in layer 1: unscaled FP8 would clip there")
    for layers, named in ((6, "layers 0, 1, 2, 3, 4, 5"), (7, "7 layers")):
        (warning,) = warn(stats(*[[600.0, 600.0]] * layers))
        assert f"K scale > 1 in {named}:" in warning


def test_outlier_heads_and_dead_heads_are_named():
    (warning,) = warn(stats([1.0, 1.0, 20.0], [1.0, 2.0, 1.0]))
    said = "K: one head is 20x the others in layer 0; use --strategy attn_head where the engine reads it"
    assert warning == said
    assert warn(stats([1.0, 1.0, 20.0]), "attn_head") == warn(stats([1.0, 1.0, 19.0])) == []
    covered = ["K: a head or channel held only zeros in layer 0; it takes the layer's largest scale"]
    assert warn(stats([0.0, 3.0, 3.0]), "attn_head") == warn(stats([0.0, 3.0]), "channel") == covered
    for heads in ([0.0, 3.0], [0.0, 0.0, 3.0]):
        (warning,) = warn(stats(heads))
        assert warning == "K: a head held only zeros in layer 0; the layer's one scale is for it too"
    assert "20x the others in layer 0" in warn(stats([0.0, 1.0, 1.0, 20.0]))[0]


def test_shared_layers_and_layers_of_less_text_are_named():
    both = stats([1.0, 1.0], [1.0, 1.0])
    few = replace(both.layers["layers.1.self_attn"], tokens=1000)
    assert warn(replace(both, layers={**both.layers, "layers.1.self_attn": few})) == [
        "only 1,000 of 1,024 tokens were counted in layer 1: the scales there rest on less text"
    ]
    shared = {"layers.1.self_attn": SharedAttention(1, "layers.0.self_attn")}
    assert warn(stats([1.0, 1.0], shared=shared)) == [
        "layers.1.self_attn shares the cache of layers.0.self_attn: left out, it gets that layer's scales"
    ]


EVERYWHERE = {0: 9.0, 3: 9.0}


def seen_at(curve, positions=EVERYWHERE, read=2048):
    """Statistics of one layer of two heads, whose places are given by bucket."""

    def part(curve, positions):
        tables = torch.zeros(2, BUCKETS), torch.zeros(2, POSITION_BUCKETS)
        for table, values in zip(tables, (curve, positions), strict=True):
            for bucket, value in values.items():
                table[:, bucket] = torch.tensor(value)
        return TensorStats(torch.full((2, 2), 9.0), curve=tables[0], positions=tables[1])

    k, v = part(curve, positions), part({0: 9.0}, EVERYWHERE)
    return KVStats({"layers.7.self_attn": LayerStats(7, read, k, v, v, read=read)})


def test_growth_in_the_last_half_and_first_tokens_that_set_a_scale_alone_are_named():
    assert warn(seen_at({0: 6.0, 10: 9.0})) == [
        "K: still grew by up to 50% in the last 1,025 of 2,048 tokens in layer 7; calibrate on more text"
    ]
    assert warn(seen_at({0: 6.0, 9: 9.0})) == []  # in the first half
    assert warn(seen_at({0: 8.6, 10: 9.0})) == []  # by less than 5 %
    (few,) = warn(seen_at({0: 6.0, 9: 9.0}, read=1023))
    assert few.startswith("only 1,023 tokens were read, too few")
    one_head = seen_at({0: [9.0, 3.0], 10: [4.0, 4.0]})  # one head grew, the layer did not
    assert warn(one_head) == []
    assert "by up to 33%" in warn(one_head, "attn_head")[0]
    (warning,) = warn(seen_at({0: 9.0}, {0: 9.0, 1: 2.0, 5: 3.0}))
    assert warning.startswith("K: the first token of a sample is up to 3x all others in layer 7")
    assert warn(seen_at({0: 9.0}, {0: 9.0, 1: 2.0, 5: 5.0})) == []
    assert warn(seen_at({0: 9.0}, {0: 3.0, 1: 9.0})) == []
    # it sets the scale of one head, and not the layer's
    one_head = seen_at({0: 9.0}, {0: [9.0, 4.0], 1: [9.0, 1.0]})
    assert warn(one_head) == []
    assert "up to 4x all others" in warn(one_head, "attn_head")[0]


def texts(samples=32, length=64, vocabulary=500, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(samples)]


@pytest.mark.parametrize("skip_first", [0, 3])
def test_counts_of_text(skip_first):
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
