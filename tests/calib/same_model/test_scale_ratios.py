"""`fp8kv compare`: the scales of two directories beside each other."""

from command_line import fp8kv, json_of, one_line_error, ran
from scale_directories import NVFP4, PROJ, lines_of, model

from calib.same_model.scale_ratios import compare_scales, ratio


def test_ratios_of_each_layer(tmp_path):
    a, doubled = model(tmp_path / "a"), model(tmp_path / "b", k=(1.0, 0.5), v=(0.125, 0.25))
    expected = [{"k": [2.0, 2.0], "v": [1.0, 1.0]}, {"k": [2.0, 2.0], "v": [4.0, 4.0]}]
    layers = [{"layer": i, "q": None, **each} for i, each in enumerate(expected)]
    assert json_of("compare", a, doubled) == {"layers": layers, "notes": []}
    said = lines_of(ran("compare", a, doubled))
    assert "4" in said
    assert "note" not in said
    per_head = model(tmp_path / "heads", k=([0.5, 0.25], [0.25, 0.25]), v=([0.5, 0.125], [0.5, 0.5]))
    assert compare_scales(a, per_head).to_json()["layers"][0]["k"] == (0.5, 1.0)
    assert " to 1 " in lines_of(ran("compare", a, per_head))


def test_one_scale_stands_for_all_heads():
    assert ratio((0.5,), (0.25, 1.0)) == ratio((0.25, 1.0), (0.5,)) == (0.5, 2.0)
    assert ratio((0.5, 0.5), (0.5, 0.25)) == (0.5, 1.0)
    assert ratio((0.0,), (0.5,)) == (float("inf"),) * 2
    for a, b in (((0.5, 0.5), (0.5, 0.5, 0.5)), ((), (0.5,)), ((0.5,), None)):
        assert ratio(a, b) is None


def test_what_is_missing_wrong_or_of_another_model_is_said(tmp_path):
    whole = model(tmp_path / "whole")
    wrong = model(tmp_path / "wrong", k=(-0.5, 0.25), num_key_value_heads=1)
    for a, b, name in ((whole, wrong, "B"), (wrong, whole, "A")):
        notes = compare_scales(a, b).notes
        assert f"{name}: K scales are negative in layer 0" in notes
        assert any(note.startswith("A and B are of other models: num_key_value_heads ") for note in notes)
        assert all(f"note: {note}" in lines_of(ran("compare", a, b)) for note in notes)
    caches = [{"dtype": "float8_e4m3fn", "scaling_factor": {"0": {layer: 0.5}}} for layer in "07"]
    first, seventh = (
        model(tmp_path / f"{i}", k=(), json_file={"kv_cache": cache, "model_type": "llama"})
        for i, cache in enumerate(caches)
    )
    assert "only A has scales of layer 1" in compare_scales(whole, first).notes
    assert "only B has scales of layer 1" in compare_scales(first, whole).notes
    one_line_error(fp8kv("compare", first, seventh), "have scales of no common layer")
    producer = {"name": "fp8kv", "nvfp4_kv_divisor": 448}
    values = model(tmp_path / "values", names=PROJ, config=NVFP4 | {"producer": producer})
    said = lines_of(ran("compare", whole, values))
    assert "note: A holds scales of e4m3fn, B values of an NVFP4 cache, absmax / 448" in said
    assert compare_scales(values, whole).notes[0].startswith("A holds values of an NVFP4 cache")
