"""The plugin names every layer that does not compute with the files' scale, and no other."""

from itertools import zip_longest
from pathlib import Path

import pytest

from calib.engines.outcome import Place
from calib.files.model_directory import ModelDirectory
from calib.files.stored_scales import StoredLayer, StoredScales
from calib.serving.loaded_scales import EngineLayer, compare

ONE = Place()
K, V = [(0.5,), (0.375,), (0.125,)], [(0.0625,), (0.09375,), (0.75,)]
AT_1 = [(1.0,)] * 3


def files(k=K, v=V, q=()):
    """The scales of every layer in the files."""
    layers = [StoredLayer(i, *scales) for i, scales in enumerate(zip_longest(k, v, q))]
    return StoredScales(ModelDirectory(Path(), {}, {}), layers)


def held(k, v, is_fp8=True, **others):
    """Layers of an engine that holds each scale once."""
    pairs = enumerate(zip(k, v, strict=True))
    return [EngineLayer(i, is_fp8, {"k_scale": a}, {"v_scale": b}, **others) for i, (a, b) in pairs]


def times(factor, scales):
    return [(factor * x[0],) for x in scales]


@pytest.mark.parametrize(
    ("k", "v", "problems"),
    [
        (K, V, []),
        (times(1 + 2**-9, K), V, []),  # rounded through bfloat16
        (times(1 + 2**-6, K), V, ["K is not the file's in layers 0, 1, 2"]),
        ([K[0], (1.0,), K[2]], V, ["K is at 1.0: the engine dropped the file's scale in layer 1"]),
        (K, [V[0], V[1], (1.5,)], ["V is twice the file's in layer 2"]),
        ([K[1], K[0], K[2]], V, ["K is not the file's in layers 0, 1"]),
        (V, V, ["K is not the file's in layers 0, 1, 2"]),
    ],
)
def test_other_scales_are_named_with_their_layers(k, v, problems):
    report = compare(held(k, v), files(), ONE)
    assert report.problems == problems
    wrong = sum(problem.count(",") + 1 for problem in problems)
    assert str(report) == "; ".join([f"fp8kv: {6 - wrong} of 6 KV scales in use, FP8 cache", *problems])


def test_layers_that_only_the_files_or_only_the_engine_has_are_named():
    found = files()
    assert compare(held([*K, (1.0,)], [*V, (1.0,)]), found, ONE).problems == [
        "K has no scale in the files and is at 1.0 in layer 3",
        "V has no scale in the files and is at 1.0 in layer 3",
    ]
    some, missing = held(K, V)[:1], "the files have scales for layers {}, which the engine lacks"
    assert compare(some, found, ONE).problems == [missing.format("1, 2")]
    assert compare(some, found, ONE, stages=2).problems == []  # which another stage may hold
    assert compare([], found, ONE).problems == [missing.format("0, 1, 2")]
    report = compare([], found, ONE, stages=2)
    assert (str(report), report.problems) == ("fp8kv: no attention layer here", [])
    found.directory.config["num_hidden_layers"] = 1  # the others are draft layers
    assert compare(some, found, ONE).problems == []


def test_files_without_scales():
    assert len(compare(held(AT_1[:1], AT_1[:1]), None, ONE).problems) == 2
    report = compare(held(K, V, is_fp8=False), None, ONE)
    assert (str(report), report.problems) == ("fp8kv: 3 layers in 16 bits", [])


def test_scales_that_nobody_can_use_or_measured_are_not_in_use():
    for value, problem in (
        (0.0, "K has no usable scale in the files in layer 0"),
        (float("nan"), "K has no usable scale in the files in layer 0"),
        (1.0, "K is 1.0 in the files, which nobody measured in layer 0"),
    ):
        found = files([(value,)], [(0.5,)])
        assert compare(held([(value,)], [(0.5,)]), found, ONE).problems == [problem]


def test_v_may_take_the_scale_of_k_alone():
    found = files([(0.5,)], [])
    for v, problems in (
        (0.5, []),
        (1.0, ["V has no scale in the files and is at 1.0 in layer 0"]),
        (0.25, ["V is not the file's in layer 0"]),
    ):
        assert compare(held([(0.5,)], [(v,)]), found, ONE).problems == problems


def test_layers_in_16_bits_are_counted_and_a_whole_cache_in_16_bits_is_a_problem():
    whole = held(K, V, is_fp8=False)
    report = compare([*held(K, V)[:2], whole[2]], files(), ONE)
    assert str(report) == "fp8kv: 4 of 4 KV scales in use, FP8 cache, 1 layers in 16 bits"
    problem = "the cache is not FP8, so no scale is used"
    assert compare(whole, files(), ONE).problems == [problem]
    # a stage may hold nothing but layers left in 16 bits
    assert compare(whole[:1], files(), ONE, stages=2, is_fp8=True).problems == []
    for others in ({"stages": 2}, {"is_fp8": True}):
        assert compare(whole[:1], files(), ONE, **others).problems[0] == problem
    nvfp4 = held(AT_1, AT_1, is_fp8=False, cache="nvfp4")
    assert str(compare(nvfp4, files(), ONE)) == f"fp8kv: 3 layers in nvfp4; {problem}"


def test_on_fnuz_the_doubled_scale_is_the_right_one():
    place = Place(fnuz=True)
    assert compare(held(times(2, K), times(2, V)), files(), place).problems == []
    problem = "is not doubled for an FP8 type that ends at 240 in layers 0, 1, 2"
    assert compare(held(K, V), files(), place).problems == [f"K {problem}", f"V {problem}"]


@pytest.mark.parametrize(
    ("ranks", "rank", "k"), [(2, 0, (0.5, 0.25)), (2, 1, (0.125, 1.5)), (8, 5, (0.125,))]
)
def test_a_rank_holds_its_own_heads(ranks, rank, k):
    found = files([(0.5, 0.25, 0.125, 1.5)], [(0.5,) * 4])
    layers, place = held([k], [(0.5,) * len(k)]), Place(ranks)
    assert compare(layers, found, place, rank).problems == []
    other = (rank + ranks // 2) % ranks
    assert compare(layers, found, place, other).problems == ["K is not the file's in layer 0"]


@pytest.mark.parametrize(
    ("held_q", "file_q", "problems"),
    [
        (1.0, None, []),
        (1.0, (0.0,), []),
        (None, (0.25,), []),  # an engine without a place for it
        (0.25, (0.25,), []),
        (0.25, (0.125, 0.25), []),
        (1.0, (1.0,), []),
        (0.25, None, ["Q is not from the files in layer 0"]),
        (0.25, (0.0,), ["Q has no usable scale in the files in layer 0"]),
        (1.0, (0.25,), ["Q is at 1.0: the engine dropped the file's scale in layer 0"]),
    ],
)
def test_a_query_scale_is_optional(held_q, file_q, problems):
    found = files([(0.5,)], [(0.5,)], [file_q])
    q = {"q_scale": (held_q,)} if held_q else {}
    report = compare(held([(0.5,)], [(0.5,)], q=q), found, ONE)
    assert (report.problems, report.used) == (problems, 2)  # of K and V


def test_copies_that_are_wrong_in_different_ways_are_told_apart():
    mixed = {"a": (1.0,), "b": (0.375,), "c": (), "d": (0.75,)}
    layers = held(K, V)
    layers[1] = EngineLayer(1, True, mixed, {"v_scale": V[1]})
    report = compare(layers, files(), ONE)
    assert report.problems == [
        "K's copy a is at 1.0: the engine dropped the file's scale in layer 1",
        "K's copy c is empty, which kernels take for 1.0 in layer 1",
        "K's copy d is twice the file's in layer 1",
    ]
    assert (report.used, report.total) == (5, 6)
    nowhere = compare([EngineLayer(0, True, {"k_scale": K[0]}, {})], files(), ONE, stages=2)
    assert (nowhere.problems, nowhere.used) == (["V has no place in layer 0"], 1)
    files_less = compare(layers[1:2], None, ONE)
    assert files_less.problems[1] == "K's copy b is not from the files in layer 1"
