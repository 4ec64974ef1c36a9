"""What tells two models apart: configs, marks of weights, quantised ones too; scales beside each other."""

import json
from base64 import b64encode
from pathlib import Path

import pytest
import torch
from apply_cases import copy, rescale_values, smooth
from coded_forms import FORMS
from command_line import fp8kv, json_of, one_line_error, ran
from families import LATENT, save_model, tiny_model
from scale_directories import NVFP4, PROJ, lines_of, model
from transformers import LlamaConfig, LlamaForCausalLM

from calib.errors import InputError
from calib.files.model_directory import open_model_directory
from calib.files.stored_scales import StoredLayer
from calib.same_model.check import ModelFacts, check_same_model, config_summary, directory_facts, known_config
from calib.same_model.mark_comparison import OtherWeightsError, compare_marks
from calib.same_model.marks import Marks, sample_head_rows, sample_rows, settings_of, take_marks
from calib.same_model.scale_ratios import ScaleComparison, compare_scales, ratio

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


def test_every_directory_says_what_it_can(tmp_path, monkeypatch):
    assert known_config(tmp_path) == {}
    for served, config in (("not/here", {}), (tmp_path / "served", QWEN)):  # of traffic
        (tmp_path / "fp8kv_watch.json").write_text(json.dumps({"model": str(served)}))
        (tmp_path / "served").mkdir(exist_ok=True)
        (tmp_path / "served/config.json").write_text(json.dumps(QWEN))
        assert known_config(tmp_path) == config
    monkeypatch.chdir(tmp_path / "served")
    for served in ("", ".", str(tmp_path / ("x" * 300)), "/\0"):
        (tmp_path / "fp8kv_watch.json").write_text(json.dumps({"model": served}))
        assert known_config(tmp_path) == {}
    (tmp_path / "served/config.json").write_text("{")
    (tmp_path / "fp8kv_watch.json").write_text(json.dumps({"model": str(tmp_path / "served")}))
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


def test_ratios_of_each_layer_where_one_scale_stands_for_all_heads(tmp_path):
    a, doubled = model(tmp_path / "a"), model(tmp_path / "b", k=(1.0, 0.5), v=(0.125, 0.25))
    expected = [{"k": [2.0, 2.0], "v": [1.0, 1.0]}, {"k": [2.0, 2.0], "v": [4.0, 4.0]}]
    layers = [{"layer": i, "q": None, **each} for i, each in enumerate(expected)]
    assert json_of("compare", a, doubled) == {"layers": layers, "notes": []}
    said = lines_of(ran("compare", a, doubled))
    assert said.endswith("scales differ in 2 of 2 layers, most in layer 1: V of B / A is 4")
    edited = model(tmp_path / "edited", k=(0.125, 0.25))
    one, rounded = (StoredLayer(0, k=(x,)) for x in (0.5, 0.5 + 2**-24))
    rounding = "in 1 of 1 layer, most in layer 0: K of B / A differs from 1 by 1.2e-07"
    assert rounding in ScaleComparison([(one, rounded)], []).summary
    assert "differ in 1 of 2 layers, most in layer 0: K of B / A is 0.25" in ran("compare", a, edited).stdout
    assert ran("compare", a, a).stdout.endswith("all scales are equal, of 2 layers\n")
    full, half = (StoredLayer(0, k=(0.5,), v=values) for values in ((0.5,), None))
    assert ScaleComparison([(full, half)], []).summary == "1 of the scales of K and V is in A or B alone"
    assert "note" not in said
    per_head = model(tmp_path / "heads", k=([0.5, 0.25], [0.25, 0.25]), v=([0.5, 0.125], [0.5, 0.5]))
    assert compare_scales(a, per_head).to_json()["layers"][0]["k"] == (0.5, 1.0)
    assert " to 1 " in lines_of(ran("compare", a, per_head))
    said = lines_of(ran("compare", a, model(tmp_path / "nan", k=(float("nan"), 0.25))))
    assert "│ not finite │" in said
    assert said.endswith("K of B / A is not finite")
    assert ratio((0.5,), (0.25, 1.0)) == ratio((0.25, 1.0), (0.5,)) == (0.5, 2.0)
    assert ratio((0.5, 0.5), (0.5, 0.25)) == (0.5, 1.0)
    assert ratio((0.0,), (0.5,)) == (float("inf"),) * 2
    assert str(ratio((0.5,), (0.5, float("nan")))) == "(nan, nan)"
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


GOLDEN = Path(__file__).parents[2] / "golden" / "quantized"
# as benchmarks/peers/tiny_llama.py makes them
SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
FITTING = [
    *("compressed-fp8-channel", "compressed-fp8-block", "compressed-int8-asymmetric", "compressed-nvfp4"),
    *("compressed-w4-asymmetric", "compressed-w4-ordered", "compressed-w3", "compressed-w8-channel"),
]


def marks_of(directory, layers=3, name="model.layers.{}.self_attn"):
    return take_marks(open_model_directory(directory), [name.format(i) for i in range(layers)])


@pytest.fixture(scope="module")
def marks(model):
    return marks_of(model)


def changed(name, change):
    return lambda tensors: change(tensors[f"model.{name}.weight"])


def scaled(name, factor, rows=slice(None)):
    return changed(name, lambda weight: weight[rows].mul_(factor))


def blended(name, share):
    """Each row with a little of the one before it."""
    return changed(name, lambda weight: weight.add_(share * weight.roll(1, 0)))


def norm_and_all_but_queries(tensors):
    scaled("layers.1.input_layernorm", 1 / 100)(tensors)
    for letter in "kv":
        scaled(f"{SELF}.{letter}_proj", 100)(tensors)


HALF, SELF, BIAS = slice(None, None, 2), "layers.1.self_attn", "model.layers.0.self_attn.v_proj.bias"
EDITS = [
    (scaled("layers.1.input_layernorm", 1.5, HALF), "^norms differ, and 'layers.1.self_attn"),
    (scaled("layers.1.post_attention_layernorm", 100), "^norms differ, and a row of 'layers.1.mlp.gate_proj"),
    (norm_and_all_but_queries, f"^norms differ, and a row of '{SELF}.q_proj.weight' is 0.01 times"),
    (scaled(f"{SELF}.q_proj", 10), f"^a row of '{SELF}.q_proj.weight' is .* times what it was$"),
    (scaled(f"{SELF}.k_proj", 1.1), "k_proj.weight' is 1.1 times what it was$"),
    (scaled(f"{SELF}.v_proj", 0.8), "v_proj.weight' is 0.8 times .*, as where AWQ moves factors"),
    (scaled(f"{SELF}.o_proj", 30), f"^a row of '{SELF}.o_proj.weight' is 30 times what it was$"),
    (changed(f"{SELF}.o_proj", lambda x: x.copy_(x.flip(0))), f"^'{SELF}.o_proj.weight' is .* from"),
    (blended(f"{SELF}.k_proj", 0.02), rf"^'{SELF}.k_proj.weight' is \d+% from what it was, more than round"),
    (blended("embed_tokens", 0.1), "'embed_tokens.weight' differs, which quantisation leaves alone$"),
    (lambda x: x.update({BIAS: torch.ones(32)}), "'layers.0.self_attn.v_proj.bias' is only in the second"),
    (scaled("norm", 1.1), "'norm.weight' differs"),
]


@pytest.mark.parametrize(("edit", "message"), EDITS)
def test_another_model_of_the_same_sizes_is_refused(edit, message, model, marks, tmp_path):
    with pytest.raises(OtherWeightsError, match=message):
        compare_marks(marks, marks_of(copy(model, tmp_path / "other", edit)))


def test_tensors_that_one_side_lacks_or_that_have_another_shape_are_refused(model, marks, tmp_path):
    other = marks_of(copy(model, tmp_path / "other", lambda x: x.update({BIAS: torch.zeros(32)})))
    assert compare_marks(marks, other) == compare_marks(other, marks)
    del other.tensors["norm.weight"]
    with pytest.raises(OtherWeightsError, match="'norm.weight' is only in the model that was measured"):
        compare_marks(marks, other)
    name = f"{SELF}.k_proj.weight"
    narrow = marks.tensors | {name: marks.tensors[name].model_copy(update={"shape": [32, 32]})}
    with pytest.raises(OtherWeightsError, match=r"k_proj.weight' is \[32, 64\] there and \[32, 32\] here"):
        compare_marks(marks, marks.model_copy(update={"tensors": narrow}))
    with pytest.raises(InputError, match=f"^'{name}' holds NaN or Inf; download the model again"):
        marks_of(copy(model, tmp_path / "broken", scaled(f"{SELF}.k_proj", float("nan"))))


@pytest.mark.parametrize("form", [None, *FITTING])
def test_quantised_weights_fit_behind_smoothed_norms_but_no_rescaled_values(form, model, marks, tmp_path):
    def edited(name, edit):
        directory = copy(model, tmp_path / name, edit)
        return marks_of(FORMS[form].quantise(directory, tmp_path / f"{name}-plain") if form else directory)

    same = compare_marks(marks, edited("same", lambda tensors: None))
    assert same.layers_with_moved_factors == 0
    assert same.largest_error > 0 if form else same.largest_error == 0
    assert compare_marks(marks, edited("smooth", smooth)).layers_with_moved_factors == 3
    for name, edit in (
        ("halved", lambda tensors: rescale_values(tensors, 0.5)),
        ("smooth, too", lambda tensors: (rescale_values(tensors, 1.2), smooth(tensors))),
    ):
        with pytest.raises(OtherWeightsError, match=r"v_proj.*AWQ"):
            compare_marks(marks, edited(name, edit))


@pytest.mark.parametrize("form", ["compressed-fp8-channel", "compressed-int8"])
def test_another_model_behind_codes_of_eight_bits(form, model, marks, tmp_path):
    other = copy(model, tmp_path / "other", blended("layers.1.self_attn.k_proj", 0.1))
    with pytest.raises(OtherWeightsError, match=r"^'layers.1.self_attn.k_proj.weight' .* more than"):
        compare_marks(marks, marks_of(FORMS[form].quantise(other, tmp_path / "plain")))


def test_each_head_of_many_is_looked_at(tmp_path):
    options = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 8, "num_hidden_layers": 1}
    many = save_model(tiny_model("llama", **options), tmp_path / "many")
    for head in (1, 6, 15):
        rows = slice(8 * head, 8 * head + 8)
        other = copy(many, tmp_path / f"{head}", scaled("layers.0.self_attn.v_proj", 4, rows))
        with pytest.raises(OtherWeightsError, match=r"a row of '.*v_proj.weight' is 4 times"):
            compare_marks(marks_of(many, 1), marks_of(other, 1))


# the weight that makes V, or the latent and k_pe; and rows of it
CACHED = {
    "phi3": ("self_attn.qkv_proj", slice(96, None)),
    "olmo2": ("self_attn.v_proj", HALF),
    "mixtral": ("self_attn.v_proj", HALF),
    "starcoder2": ("self_attn.v_proj", HALF),
    "gpt_neox": ("attention.query_key_value", HALF),
    "qwen3": ("self_attn.k_norm", HALF),
    "minicpm3": ("self_attn.kv_a_proj_with_mqa", slice(0, 16)),
    "deepseek_v3": ("self_attn.kv_a_proj_with_mqa", slice(16, 24)),
}


@pytest.mark.parametrize("family", CACHED)
def test_every_family_has_marks_of_what_makes_k_and_v(family, tmp_path):
    model = save_model(tiny_model(family, **LATENT.get(family, {})), tmp_path / "model")
    above = "gpt_neox" if family == "gpt_neox" else "model"
    weight, rows = CACHED[family]
    module = f"{above}.layers.{{}}.{weight.partition('.')[0]}"
    marks = marks_of(model, name=module)
    assert compare_marks(marks, marks_of(copy(model, tmp_path / "copy"), name=module)).largest_error == 0
    name = f"layers.1.{weight}.weight"
    other = copy(model, tmp_path / "other", lambda tensors: tensors[f"{above}.{name}"][rows].mul_(1.2))
    with pytest.raises(OtherWeightsError, match=f"'{name}'"):
        compare_marks(marks, marks_of(other, name=module))


def test_a_vocabulary_may_have_grown(tmp_path):
    def grow(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.cat([tensors[name], tensors[name][:20]])

    model = save_model(tiny_model("llama", vocab_size=300), tmp_path / "model")
    grown = copy(model, tmp_path / "grown", grow, {"vocab_size": 320})
    assert compare_marks(marks_of(model), marks_of(grown)).largest_error == 0


def began_with(directory, **shape):
    torch.manual_seed(0)
    shape |= {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 64}
    shape |= {"tie_word_embeddings": True, "max_position_embeddings": 256, "initializer_range": 0.2}
    LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16).save_pretrained(directory)
    return marks_of(directory, 2)


def test_checkpoints_of_quantisation_tools_beside_the_model_they_began_with(tmp_path):
    base = began_with(tmp_path / "narrow", **SHAPE)
    cases = (("fp8", 0, 0.03), ("w4a16", 0, 0.1), ("w4a16-awq", 2, 0.1), ("w8a8-smoothquant", 2, 0.02))
    for case, moved, error in cases:
        found = compare_marks(base, marks_of(next(GOLDEN.glob(f"llmcompressor-*/{case}")), 2))
        assert found.layers_with_moved_factors == moved, case
        assert 0.005 < found.largest_error < error, case
        assert found.largest_factor < 0.05, case
    theirs = marks_of(next(GOLDEN.glob("gptqmodel-*/awq-w4")), 2)
    with pytest.raises(OtherWeightsError, match=r"v_proj.*AWQ"):
        compare_marks(began_with(tmp_path / "wide", **WIDE), theirs)
