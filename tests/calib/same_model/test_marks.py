"""What tells two models apart: configs, marks of rows of weights; and the scales of two beside each other."""

import json
from base64 import b64encode

import pytest
from command_line import fp8kv, json_of, one_line_error, ran
from scale_directories import NVFP4, PROJ, lines_of, model

from calib.errors import InputError
from calib.files.model_directory import open_model_directory
from calib.same_model.check import ModelFacts, check_same_model, config_summary, directory_facts, known_config
from calib.same_model.marks import Marks, sample_head_rows, sample_rows, settings_of, take_marks
from calib.same_model.scale_ratios import compare_scales, ratio

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64}
LLAVA = {"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": 64}}


def check(one, other):
    check_same_model(ModelFacts("one", one), ModelFacts("other", other))


def test_configs_that_may_be_of_one_model_pass():
    flat = {"model_type": "qwen2_vl"}  # of old, and the same model saved again
    for one, other in (
        (LLAMA, {}),
        ({}, {}),
        (LLAMA, LLAVA),  # its language model, served alone
        (LLAMA, LLAMA | {"architectures": ["OwnForCausalLM"]}),
        (LLAMA, {"model_type": "llama"}),
        (LLAMA, LLAMA | {"hidden_size": None, "quantization_config": {}, "vocab_size": 1}),
        (flat, flat | {"text_config": {"model_type": "t"}}),
    ):
        check(one, other)
        check(other, one)
        check(config_summary(one), other)


def test_configs_that_differ_are_refused():
    for one, other, message in (
        (LLAMA, QWEN, "model_type llama, that of 'other' qwen2"),
        (QWEN, LLAVA, "model_type qwen2, that of 'other' llama"),
        (LLAMA, LLAMA | {"hidden_size": 128}, "hidden_size 64, that of 'other' 128"),
        (LLAMA | {"model_type": None}, QWEN, r"architectures \['LlamaForCausalLM'\]"),
    ):
        for said in (one, config_summary(one)):
            with pytest.raises(InputError, match=f"^'one' is of another model: its config says {message}"):
                check(said, other)


def test_every_directory_says_what_it_can(tmp_path):
    assert known_config(tmp_path) == {}
    (tmp_path / "kv_cache_scales.json").write_text(json.dumps({"model_type": "llama"}))
    assert directory_facts(tmp_path) == ModelFacts(str(tmp_path), {"model_type": "llama"})
    (tmp_path / "fp8kv_calibration.json").write_text(json.dumps({"config": QWEN}))
    assert known_config(tmp_path) == QWEN
    (tmp_path / "config.json").write_text(json.dumps(LLAVA))
    assert known_config(tmp_path) == LLAVA


def test_settings_that_change_k_and_v_are_compared_in_whatever_words(model, tmp_path):
    def check_settings(change):
        config = json.loads((model / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        one, other = settings_of(model, config), settings_of(tmp_path, config | change)
        check_same_model(ModelFacts("one", settings=one), ModelFacts("other", settings=other))

    yarn = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    for change, said in (
        ({"rope_scaling": yarn}, "rope_parameters {'"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-06, that of 'other' 1e-05"),
        ({"hidden_act": "relu"}, "hidden_act silu, that of 'other' relu"),
    ):
        with pytest.raises(InputError, match=f"'one' is of another model: its config says {said}"):
            check_settings(change)
    older = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None, "dtype": None}
    check_settings(older | {"use_cache": False, "eos_token_id": 7, "max_position_embeddings": 512})


def test_keys_and_values_in_fused_weights_and_every_head_of_eight_are_sampled():
    falcons, neox, phi = (((71, 1, 64, False), (128, 8, 64, True)), (64, 64, 96, True), (40, 10, 128, False))
    for heads, kv_heads, head_dim, grouped in (*falcons, neox, phi):
        letters = "q" * heads + "k" * kv_heads + "v" * kv_heads
        if grouped:
            letters = ("q" * (heads // kv_heads) + "kv") * kv_heads
        found = [letters[at // head_dim] for at in sample_head_rows(len(letters) * head_dim, heads, head_dim)]
        assert min(found.count("k"), found.count("v")) >= 4
        assert len(found) <= 24
    for head_dim in (64, 128):
        assert {row // head_dim for row in sample_rows(8 * head_dim, 8)} == {*range(8)}
    assert sample_rows(3, 8) == [0, 1, 2]


def mark(values=bytes(128), **change):
    """Marks of one weight for K, of which one row was sampled."""
    text = b64encode(values).decode() if isinstance(values, bytes) else values
    return {"tensors": {"a.k_proj.weight": {"shape": [2, 2], "bits": 16, "values": text} | change}}


def test_damaged_marks_are_refused(model):
    modules = [f"model.layers.{i}.self_attn" for i in range(3)]
    saved = take_marks(open_model_directory(model), modules).model_dump()
    marks = Marks.from_json(json.loads(json.dumps(saved)), "")
    assert (marks.model_dump(), marks.layers, marks.version) == (saved, 3, 3)
    assert Marks.from_json(saved | mark(), "")
    not_finite, cut_off = mark(b"\x80\x7f" * 64), mark(bytes(126))
    damage = [{"layers": "3"}, {"tensors": {}}, {"version": 1}, mark("?"), mark(b""), not_finite, cut_off]
    for change in (*damage, mark(5), mark(bits=17), mark(shape=[2, 2, 2])):
        with pytest.raises(InputError, match=r"^the marks in a file are damaged \(.+\)$") as found:
            Marks.from_json(saved | change, "a file")
        assert "pydantic" not in str(found.value)


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
