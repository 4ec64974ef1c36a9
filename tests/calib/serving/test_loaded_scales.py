"""The plugin names every layer that does not compute with the files' scale, and no other."""

import json

import pytest
import torch
from safetensors.torch import save_file

from calib.engines.outcome import Place
from calib.files.stored_scales import read_scales
from calib.serving.loaded_scales import EngineLayer, compare

ONE = Place()


def files(tmp_path, k, v):
    """A directory with scales for K and V of every layer, and what is read from it."""
    tensors = {
        f"model.layers.{i}.self_attn.{letter}_scale": torch.tensor(scale).reshape(-1)
        for letter, scales in (("k", k), ("v", v))
        for i, scale in enumerate(scales)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return read_scales(tmp_path)


def layer(index, is_fp8, k, v, **others):
    """A layer of an engine that holds each scale once."""
    return EngineLayer(index, is_fp8, {"k_scale": k}, {"v_scale": v}, **others)


def held(k, v, is_fp8=True):
    return [layer(i, is_fp8, a, b) for i, (a, b) in enumerate(zip(k, v, strict=True))]


@pytest.fixture
def found(tmp_path):
    return files(tmp_path, [0.5, 0.375, 0.125], [0.0625, 0.09375, 0.75])


K, V = [(0.5,), (0.375,), (0.125,)], [(0.0625,), (0.09375,), (0.75,)]


def test_all_in_use_is_one_line(found):
    report = compare(held(K, V), found, ONE)
    assert (str(report), report.problems) == ("fp8kv: 6 of 6 KV scales in use, FP8 cache", [])


def test_rounding_through_bfloat16_is_no_difference(found):
    rounded = [(x[0] * (1 + 2**-9),) for x in K]
    assert compare(held(rounded, V), found, ONE).problems == []
    off = [(x[0] * (1 + 2**-6),) for x in K]
    assert compare(held(off, V), found, ONE).problems == [
        "K is not the file's in layers 0, 1, 2",
    ]


@pytest.mark.parametrize(
    ("k", "v", "problem"),
    [
        ([K[0], (1.0,), K[2]], V, "K is at 1.0: the engine dropped the file's scale in layer 1"),
        (K, [V[0], V[1], (1.5,)], "V is twice the file's in layer 2"),
        ([K[1], K[0], K[2]], V, "K is not the file's in layers 0, 1"),
        (V, V, "K is not the file's in layers 0, 1, 2"),
    ],
    ids=["dropped", "doubled", "layers crossed", "K and V crossed"],
)
def test_other_scales_are_named_with_their_layers(k, v, problem, found):
    report = compare(held(k, v), found, ONE)
    assert report.problems == [problem]
    assert report.used == 6 - len(problem.partition(" in layer")[2].split(", "))


def test_layers_that_the_files_leave_out_are_named(found):
    layers = [*held(K, V), layer(3, True, (1.0,), (1.0,))]
    assert compare(layers, found, ONE).problems == [
        "K has no scale in the files and is at 1.0 in layer 3",
        "V has no scale in the files and is at 1.0 in layer 3",
    ]


def test_layers_that_no_module_holds_are_named_unless_another_stage_may_hold_them(found):
    some = held(K, V)[:1]
    missing = ["the files have scales for layers 1, 2, which the engine lacks"]
    assert compare(some, found, ONE).problems == missing
    assert compare(some, found, ONE, stages=2).problems == []
    found.directory.config["num_hidden_layers"] = 1  # the others are draft layers
    assert compare(some, found, ONE).problems == []


def test_a_stage_without_attention_is_no_problem(found):
    report = compare([], found, ONE, stages=2)
    assert (str(report), report.problems) == ("fp8kv: no attention layer here", [])
    assert compare([], found, ONE).problems == [
        "the files have scales for layers 0, 1, 2, which the engine lacks"
    ]


def test_files_without_scales():
    assert len(compare(held([(1.0,)], [(1.0,)]), None, ONE).problems) == 2
    report = compare(held(K, V, is_fp8=False), None, ONE)
    assert (str(report), report.problems) == ("fp8kv: 3 layers in 16 bits", [])


@pytest.mark.parametrize("value", [0.0, 1e-30, -0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("place", [ONE, Place(fnuz=True)])
def test_scales_that_nobody_can_use_are_not_in_use(value, place, tmp_path):
    found = files(tmp_path, [value], [0.5])
    v = 0.5 * (2 if place.fnuz else 1)
    report = compare(held([(value,)], [(v,)]), found, place)
    assert report.problems == ["K has no usable scale in the files in layer 0"]


def test_v_may_take_the_scale_of_k_alone(tmp_path):
    found = files(tmp_path, [0.5], [])
    assert compare(held([(0.5,)], [(0.5,)]), found, ONE).problems == []
    assert compare(held([(0.5,)], [(1.0,)]), found, ONE).problems == [
        "V has no scale in the files and is at 1.0 in layer 0"
    ]
    assert compare(held([(0.5,)], [(0.25,)]), found, ONE).problems == ["V is not the file's in layer 0"]


def test_files_that_the_index_leaves_out_do_not_count(tmp_path):
    files(tmp_path, [0.5], [0.25])
    index = {"weight_map": {"model.layers.0.self_attn.k_scale": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    stale = {f"model.layers.{i}.self_attn.k_scale": torch.tensor([7.0]) for i in range(2)}
    save_file(stale, tmp_path / "z-old.safetensors")
    report = compare(held([(0.5,)], [(0.25,)]), read_scales(tmp_path), ONE)
    assert str(report) == "fp8kv: 2 of 2 KV scales in use, FP8 cache"


def test_scales_of_1_in_the_files_are_no_calibration(tmp_path):
    found = files(tmp_path, [1.0], [0.5])
    assert compare(held([(1.0,)], [(0.5,)]), found, ONE).problems == [
        "K is 1.0 in the files, which nobody measured in layer 0"
    ]


def test_layers_in_16_bits_are_counted_and_a_cache_in_16_bits_is_a_problem(found):
    some = [*held(K, V)[:2], layer(2, False, (1.0,), (1.0,))]
    report = compare(some, found, ONE)
    assert str(report) == "fp8kv: 4 of 4 KV scales in use, FP8 cache, 1 layers in 16 bits"
    assert compare(held(K, V, is_fp8=False), found, ONE).problems == [
        "the cache is not FP8, so no scale is used"
    ]


def test_a_stage_may_hold_nothing_but_layers_left_in_16_bits(found):
    left = held(K, V, is_fp8=False)[:1]
    assert compare(left, found, ONE, stages=2, is_fp8=True).problems == []
    for others in ({"stages": 2}, {"is_fp8": True}):
        problems = compare(left, found, ONE, **others).problems
        assert problems[0] == "the cache is not FP8, so no scale is used"


def test_other_caches_are_named(found):
    layers = [layer(i, False, (1.0,), (1.0,), cache="nvfp4") for i in range(3)]
    assert str(compare(layers, found, ONE)) == (
        "fp8kv: 3 layers in nvfp4; the cache is not FP8, so no scale is used"
    )


def test_on_fnuz_the_doubled_scale_is_the_right_one(found):
    place = Place(fnuz=True)
    doubled = [[(2 * x[0],) for x in scales] for scales in (K, V)]
    assert compare(held(*doubled), found, place).problems == []
    assert len(compare(held(K, V), found, place).problems) == 2


@pytest.mark.parametrize(
    ("ranks", "rank", "k"), [(2, 0, (0.5, 0.25)), (2, 1, (0.125, 1.5)), (8, 5, (0.125,))]
)
def test_a_rank_holds_its_own_heads(ranks, rank, k, tmp_path):
    found = files(tmp_path, [[0.5, 0.25, 0.125, 1.5]], [[0.5, 0.5, 0.5, 0.5]])
    place = Place(ranks)
    v = (0.5,) * len(k)
    assert compare(held([k], [v]), found, place, rank).problems == []
    other = (rank + ranks // 2) % ranks
    assert compare(held([k], [v]), found, place, other).problems == ["K is not the file's in layer 0"]


def test_a_query_scale_is_optional_and_engines_without_a_place_have_none(tmp_path):
    def problems(q, name="q"):
        tensors = {f"model.layers.0.self_attn.{x}_scale": torch.tensor([0.5]) for x in "kv"}
        tensors |= {"model.layers.0.self_attn.q_scale": torch.tensor(name)} if name != "q" else {}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        one = layer(0, True, (0.5,), (0.5,), q=q)
        report = compare([one], read_scales(tmp_path), ONE)
        assert report.used == 2  # of K and V
        return report.problems

    at_1, other = {"q_scale": (1.0,)}, {"q_scale": (0.25,)}
    assert problems(at_1) == problems(at_1, [0.0]) == problems({}, [0.25]) == []
    assert problems(other, [0.25]) == problems(other, [0.125, 0.25]) == []
    assert problems(at_1, [1.0]) == []
    assert problems(other) == ["Q is not from the files in layer 0"]
    assert problems(other, [0.0]) == ["Q has no usable scale in the files in layer 0"]
    assert problems(at_1, [0.25]) == ["Q is at 1.0: the engine dropped the file's scale in layer 0"]


def test_copies_that_are_wrong_in_different_ways_are_told_apart(found):
    mixed = {"a": (1.0,), "b": (0.375,), "c": (), "d": (0.75,)}
    layers = held(K, V)
    layers[1] = EngineLayer(1, True, mixed, {"v_scale": V[1]})
    report = compare(layers, found, ONE)
    assert report.problems == [
        "K's copy a is at 1.0: the engine dropped the file's scale in layer 1",
        "K's copy c is empty, which kernels take for 1.0 in layer 1",
        "K's copy d is twice the file's in layer 1",
    ]
    assert (report.used, report.total) == (5, 6)
    nowhere = compare([EngineLayer(0, True, {"k_scale": K[0]}, {})], found, ONE, stages=2)
    assert (nowhere.problems, nowhere.used) == (["V has no place in layer 0"], 1)
    files_less = compare(layers[1:2], None, ONE)
    assert files_less.problems[1] == "K's copy b is not from the files in layer 1"
