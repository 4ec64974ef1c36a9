"""`fp8kv compare`: the scales of two directories beside each other."""

import json

import pytest
from command_line import fp8kv, one_line_error, ran
from scale_directories import NVFP4, model

from calib.same_model.scale_ratios import compare_scales, ratio

PROJ = "{module}.{x}_proj.{x}_scale"


def printed(a, b):
    done = ran("compare", a, b)
    return " ".join(done.stdout.split())


def test_ratios_of_each_layer(tmp_path):
    a, doubled = model(tmp_path / "a"), model(tmp_path / "b", k=(1.0, 0.5), v=(0.125, 0.25))
    document = json.loads(fp8kv("compare", a, doubled, "--json").stdout)
    expected = [{"k": [2.0, 2.0], "v": [1.0, 1.0]}, {"k": [2.0, 2.0], "v": [4.0, 4.0]}]
    assert document == {
        "layers": [{"layer": i, "q": None, **each} for i, each in enumerate(expected)],
        "notes": [],
    }
    said = printed(a, doubled)
    assert "4" in said
    assert "note" not in said
    per_head = model(tmp_path / "heads", k=([0.5, 0.25], [0.25, 0.25]), v=([0.5, 0.125], [0.5, 0.5]))
    assert compare_scales(a, per_head).to_json()["layers"][0]["k"] == (0.5, 1.0)
    assert " to 1 " in printed(a, per_head)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0.5,), (0.25, 1.0), (0.5, 2.0)),
        ((0.25, 1.0), (0.5,), (0.5, 2.0)),
        ((0.5, 0.5), (0.5, 0.25), (0.5, 1.0)),
        ((0.5, 0.5), (0.5, 0.5, 0.5), None),
        ((0.0,), (0.5,), (float("inf"),) * 2),
        ((), (0.5,), None),
        ((0.5,), None, None),
    ],
)
def test_one_scale_stands_for_all_heads(a, b, expected):
    assert ratio(a, b) == expected


def test_what_is_missing_wrong_or_of_another_model_is_said(tmp_path):
    whole = model(tmp_path / "whole")
    wrong = model(tmp_path / "wrong", k=(-0.5, 0.25), num_key_value_heads=1)
    for a, b, name in ((whole, wrong, "B"), (wrong, whole, "A")):
        notes = compare_scales(a, b).notes
        assert f"{name}: K scales are negative in layer 0" in notes
        assert any(note.startswith("A and B are of other models: num_key_value_heads ") for note in notes)
        assert all(f"note: {note}" in printed(a, b) for note in notes)
    first = {
        "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.5}}},
        "model_type": "llama",
    }
    fewer = model(tmp_path / "fewer", k=(), json_file=first)
    assert "only A has scales of layer 1" in compare_scales(whole, fewer).notes
    assert "only B has scales of layer 1" in compare_scales(fewer, whole).notes
    other = {
        "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"7": 0.5}}},
        "model_type": "llama",
    }
    seventh = model(tmp_path / "seventh", k=(), json_file=other)
    one_line_error(fp8kv("compare", fewer, seventh), "have scales of no common layer")


def test_scales_of_other_kinds_are_said(tmp_path):
    scales = model(tmp_path / "scales")
    producer = {"name": "fp8kv", "nvfp4_kv_divisor": 448}
    values = model(tmp_path / "values", names=PROJ, config=NVFP4 | {"producer": producer})
    note = "A holds scales of e4m3fn, B values of an NVFP4 cache, absmax / 448"
    assert f"note: {note}" in printed(scales, values)
    assert compare_scales(values, scales).notes[0].startswith("A holds values of an NVFP4 cache")
