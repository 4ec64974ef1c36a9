"""Scales written again: every format into every other, bit for bit, or refused."""

import itertools
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from apply_cases import calibrated, scales
from command_line import fp8kv, one_line_error
from families import save_model, tiny_model
from quantized_models import modelopt
from safetensors.torch import load_file, save_file

from calib.formats import FORMATS
from calib.scales.observers import AbsMax
from calib.scales.stats import KVStats
from calib.scales.stats_file import load_stats, save_stats

SCALAR = ("vllm", "aphrodite", "sglang", "tgi", "modelopt", "trtllm")
PER_HEAD = ("vllm", "aphrodite")


@pytest.fixture(scope="module")
def tensor(model, tmp_path_factory):
    return calibrated(model, tmp_path_factory.mktemp("calibrated") / "tensor")


@pytest.fixture(scope="module")
def attn_head(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("calibrated") / "attn_head"
    return calibrated(model, out, "--strategy", "attn_head", "--targets", "qkv")


def convert(source, to, out, *flags):
    done = fp8kv("convert", source, "--to", to, "-o", out, *flags)
    assert done.exit_code == 0, done.stderr
    return out


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(SCALAR, 2)])
def test_there_and_back_again_is_exact(first, second, tensor, tmp_path):
    there = convert(tensor, first, tmp_path / "first")
    onwards = convert(there, second, tmp_path / "second")
    assert scales(there) == scales(onwards) == scales(tensor)
    back = convert(onwards, "vllm", tmp_path / "back")
    for name, expected in load_file(tensor / "model-fp8kv-scales.safetensors").items():
        assert torch.equal(load_file(back / "model-fp8kv-scales.safetensors")[name], expected)
    config = json.loads((back / "config.json").read_text())
    assert config == json.loads((tensor / "config.json").read_text())


def test_per_head_scales_with_queries_stay_what_they_are(attn_head, tmp_path):
    out = convert(attn_head, "aphrodite", tmp_path / "out")
    assert scales(out) == scales(attn_head)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["strategy"] == "attn_head"


def test_json_holds_the_larger_of_k_and_v(tensor, tmp_path):
    out = convert(tensor, "json", tmp_path / "out")
    assert [(i, max(k, v)) for i, k, v, _ in scales(tensor)] == [
        (i, pytest.approx(k)) for i, k, _, _ in scales(out)
    ]


def test_what_a_format_cannot_hold_is_refused_or_reduced(attn_head, tmp_path):
    out = tmp_path / "out"
    one_line_error(fp8kv("convert", attn_head, "--to", "tgi", "-o", out), "holds no query scales")
    command = ("convert", attn_head, "--to", "tgi", "-o", out, "--without-q")
    one_line_error(fp8kv(*command), "Use --reduce max")
    assert not out.exists()
    convert(attn_head, "tgi", out, "--without-q", "--reduce", "max")
    assert [(i, max(k), max(v)) for i, k, v, _ in scales(attn_head)] == [
        (i, *k, *v) for i, k, v, _ in scales(out)
    ]


@pytest.mark.parametrize("to", SCALAR)
def test_strip_leaves_the_model_as_it_was(to, model, tensor, tmp_path):
    converted = convert(tensor, to, tmp_path / "converted")
    done = fp8kv("strip", converted, "-o", tmp_path / "plain")
    assert done.exit_code == 0, done.stderr
    plain = tmp_path / "plain"
    assert json.loads((plain / "config.json").read_text()) == json.loads((model / "config.json").read_text())
    assert not {"hf_quant_config.json", "kv_cache_scales.json"} & {p.name for p in plain.iterdir()}
    weights = load_file(plain / "model.safetensors")
    source = load_file(model / "model.safetensors")
    assert weights.keys() == source.keys()
    assert [path.name for path in plain.glob("*.safetensors")] == ["model.safetensors"]
    one_line_error(fp8kv("inspect", plain), "holds no KV-cache scales")


def damage(directory, out, changes):
    """A copy whose scales are changed; None takes one away."""
    shutil.copytree(directory, out)
    path = out / "model-fp8kv-scales.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        tensors[name] = None if value is None else torch.full_like(tensors[name], value)
    save_file({n: t for n, t in tensors.items() if t is not None}, path, {"format": "pt"})
    index = json.loads((out / "model.safetensors.index.json").read_text())
    for name, value in changes.items():
        if value is None:
            del index["weight_map"][name]
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


@pytest.mark.parametrize("kind", ["tensor", "attn_head"])
def test_repair_replaces_what_is_bad_and_nothing_else(kind, request, tmp_path):
    good = request.getfixturevalue(kind)
    bad = {
        "model.layers.0.self_attn.k_scale": 0.0,
        "model.layers.1.self_attn.v_scale": float("nan"),
        # with strategy tensor nothing is left of this layer
        "model.layers.2.self_attn.k_scale": None,
        "model.layers.2.self_attn.v_scale": None,
    }
    broken = damage(good, tmp_path / "broken", bad)
    one_line_error(fp8kv("convert", broken, "--to", "tgi", "-o", tmp_path / "x"), "fp8kv repair")
    done = fp8kv("repair", broken, "--stats", good, "-o", tmp_path / "repaired")
    assert done.exit_code == 0, done.stderr
    replaced = re.findall("replaced: model.layers.(.*), now", done.stdout)
    assert [each.split(", 0.")[0] for each in replaced if "2" in each] == [
        "2.self_attn k: missing",
        "2.self_attn v: missing",
    ]
    assert len(replaced) == 4
    assert scales(tmp_path / "repaired") == scales(good)


FNUZ = ("--format", "tgi", "--fp8-dtype", "e4m3fnuz")
BAD = {"model.layers.0.self_attn.k_scale": 0.0, "model.layers.1.self_attn.v_scale": float("nan")}


def test_repair_of_fnuz_scales_is_for_fnuz(model, tmp_path):
    good = calibrated(model, tmp_path / "good", *FNUZ)
    broken = damage(good, tmp_path / "broken", BAD)
    done = fp8kv("repair", broken, "--stats", good, "--to", "tgi", "-o", tmp_path / "repaired")
    assert done.exit_code == 0, done.stderr
    assert scales(tmp_path / "repaired") == scales(good)
    config = json.loads((tmp_path / "repaired" / "config.json").read_text())
    assert config["kv_cache_torch_dtype"] == "float8_e4m3fnuz"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("float8_e5m2", "holds e4m3fn or e4m3fnuz scales; these are for e5m2"),
        ("float9", "kv_cache_torch_dtype of config.json is 'float9'"),
    ],
)
@pytest.mark.parametrize("command", ["repair", "convert"])
def test_scales_for_another_fp8_type_are_not_taken_for_e4m3fn(command, named, message, model, tmp_path):
    good = calibrated(model, tmp_path / "good", "--format", "tgi")
    config = json.loads((good / "config.json").read_text())
    (good / "config.json").write_text(json.dumps(config | {"kv_cache_torch_dtype": named}))
    flags = ("--stats", good) if command == "repair" else ()
    done = fp8kv(command, good, *flags, "--to", "tgi", "-o", tmp_path / "out")
    one_line_error(done, message)
    assert not (tmp_path / "out").exists()


def with_amax(directory, out, layer, letter, heads, value):
    """The statistics of a calibration, in which some heads of a layer held only `value`."""
    stats = load_stats(directory)
    name, seen = [*stats.layers.items()][layer]
    amax = getattr(seen, letter).amax.clone()
    amax[heads] = value
    whole = {"k": seen.k, "v": seen.v}
    whole[letter] = replace(whole[letter], amax=amax)
    # as in files of version 1, since they would be of another amax
    plain = {which: replace(x, curve=None, positions=None, tail=None) for which, x in whole.items()}
    changed = replace(seen, **plain)
    save_stats(KVStats({**stats.layers, name: changed}, stats.shared), out)
    return out


def test_repair_covers_a_dead_head_as_derivation_does(attn_head, tmp_path):
    broken = damage(attn_head, tmp_path / "broken", {"model.layers.0.self_attn.k_scale": 0.0})
    statistics = with_amax(attn_head, tmp_path / "stats.safetensors", 0, "k", 1, 0.0)
    done = fp8kv("repair", broken, "--stats", statistics, "-o", tmp_path / "repaired")
    assert done.exit_code == 0, done.stderr
    derived = load_stats(statistics).scales(strategy="attn_head", observer=AbsMax())
    expected = derived.layers["model.layers.0.self_attn"].k.tolist()
    assert [*scales(tmp_path / "repaired")[0][1]] == expected
    assert expected[1] == max(expected)
    assert scales(tmp_path / "repaired")[1:] == scales(attn_head)[1:]


@pytest.mark.parametrize("kind", ["tensor", "attn_head"])
def test_statistics_of_zeros_give_no_scale_and_none_is_needed_elsewhere(kind, request, tmp_path):
    good = request.getfixturevalue(kind)
    statistics = with_amax(good, tmp_path / "stats.safetensors", 0, "k", slice(None), 0.0)
    broken = damage(good, tmp_path / "broken", {"model.layers.0.self_attn.k_scale": 0.0})
    command = ("repair", broken, "--stats", statistics, "-o", tmp_path / "out")
    one_line_error(fp8kv(*command), "model.layers.0.self_attn K: only zeros were seen")
    assert not (tmp_path / "out").exists()
    # a layer that needs no repair needs no statistics
    other = damage(good, tmp_path / "other", {"model.layers.1.self_attn.k_scale": 0.0})
    done = fp8kv("repair", other, "--stats", statistics, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert scales(tmp_path / "out") == scales(good)


def test_statistics_of_other_heads_repair_nothing(attn_head, tmp_path):
    other = save_model(tiny_model("llama", num_key_value_heads=4), tmp_path / "other")
    statistics = calibrated(other, tmp_path / "statistics", "--strategy", "attn_head")
    done = fp8kv("repair", attn_head, "--stats", statistics, "-o", tmp_path / "out")
    one_line_error(done, f"'{statistics}' is of another model: its config says num_key_value_heads")
    bare = shutil.copyfile(statistics / "fp8kv_stats.safetensors", tmp_path / "bare.safetensors")
    done = fp8kv("repair", attn_head, "--stats", bare, "-o", tmp_path / "out")
    one_line_error(done, "is of another model: layer 0 has K heads 4, and 2 in")


@pytest.mark.parametrize(
    ("command", "to", "fp8_dtype", "ways_out"),
    [
        (
            "convert {} --without-q",
            "tgi",
            "e4m3fn",
            "Use --reduce max, or --to vllm or aphrodite",
        ),
        ("repair {} --stats {}", "tgi", "e4m3fn", "holds no query scales. Use --to vllm"),
        ("repair {} --stats {}", "vllm", "e4m3fnuz", "Use --to tgi"),
        ("convert {} --without-q", "vllm", "e4m3fnuz", "Use --to tgi"),
        ("convert {} --without-q", "tgi", "e5m2", "Use a new calibration in format fp8kv"),
    ],
)
def test_a_refusal_names_flags_that_the_command_has(command, to, fp8_dtype, ways_out, attn_head, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(attn_head, source)
    config = json.loads((source / "config.json").read_text())
    if fp8_dtype != "e4m3fn":
        config |= {"kv_cache_torch_dtype": f"float8_{fp8_dtype}"}
        config["quantization_config"].pop("kv_cache_scheme")
        (source / "config.json").write_text(json.dumps(config))
    words = command.replace("{}", str(source)).split()
    done = fp8kv(*words, "--to", to, "-o", tmp_path / "out")
    one_line_error(done, f"--to {to}", ways_out)
    named = set(re.findall(r"--[a-z][a-z0-9-]*", done.stderr))
    assert named <= set(re.findall(r"--[a-z][a-z0-9-]*", fp8kv(words[0], "--help").stdout))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [1e-50, 1e39])
def test_a_scale_beyond_float32_is_of_no_use(value, tensor, tmp_path):
    broken = damage(tensor, tmp_path / "broken", {})
    path = broken / "model-fp8kv-scales.safetensors"
    wide = {n: torch.full_like(t, value, dtype=torch.float64) for n, t in load_file(path).items()}
    save_file(wide, path)
    done = fp8kv("convert", broken, "--to", "tgi", "-o", tmp_path / "out")
    one_line_error(done, "a scale is finite and positive")
    done = fp8kv("repair", broken, "--stats", tensor, "-o", tmp_path / "repaired")
    assert done.exit_code == 0, done.stderr
    assert scales(tmp_path / "repaired") == scales(tensor)


@pytest.mark.parametrize("command", ["convert {} --to tgi", "strip {}", "repair {} --stats {}"])
def test_an_output_without_weights_is_told_where_they_are(command, model, tensor, tmp_path):
    bare = calibrated(model, tmp_path / "bare", "--weights", "none")
    words = command.replace("{}", str(bare)).split()
    done = fp8kv(*words, "-o", tmp_path / "out")
    one_line_error(done, "--weights none", "put the source's weight files beside", "give the sourc")
    assert "download" not in done.stderr
    # and so it is
    shutil.copy(model / "model.safetensors", bare)
    done = fp8kv(*words, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    weights = load_file(next((tmp_path / "out").glob("model[.-]*safetensors")))
    assert weights["model.norm.weight"].shape == (64,)
    if command != "strip {}":
        assert scales(tmp_path / "out") == scales(tensor)


@pytest.mark.parametrize("command", ["convert", "repair"])
def test_scales_alone_make_no_fp8kv_output(command, tensor, tmp_path):
    flags = ("--stats", tensor) if command == "repair" else ()
    done = fp8kv(command, tensor, *flags, "--to", "fp8kv", "-o", tmp_path / "out")
    one_line_error(done, "--to fp8kv", "fp8kv calibrate")
    assert not (tmp_path / "out").exists()


def test_a_layer_without_scales_is_not_left_out(tensor, tmp_path):
    gone = {f"model.layers.2.self_attn.{x}_scale": None for x in "kv"}
    broken = damage(tensor, tmp_path / "broken", gone)
    done = fp8kv("convert", broken, "--to", "tgi", "-o", tmp_path / "out")
    one_line_error(done, "the k_scale of layer 2 is missing")
    assert not (tmp_path / "out").exists()


def with_class(directory, to, architectures):
    """A copy of a checkpoint whose config.json names other classes."""
    shutil.copytree(directory, to)
    config = json.loads((to / "config.json").read_text()) | {"architectures": architectures}
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize("command", ["convert", "repair"])
@pytest.mark.parametrize("named", [["OwnForCausalLM"], None, ["LlamaForCausalLM"] * 2])
def test_a_class_that_is_not_known_is_said(named, command, tensor, tmp_path):
    unknown = with_class(tensor, tmp_path / "unknown", named)
    flags = ("--stats", tensor) if command == "repair" else ()
    done = fp8kv(command, unknown, *flags, "--to", "vllm", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert "warning: whether vLLM loads these scales is not known" in done.stdout
    assert "whether vLLM loads these scales" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("command", ["convert", "repair"])
def test_what_surprises_of_a_format_is_said(command, tensor, tmp_path):
    flags = ("--stats", tensor) if command == "repair" else ()
    done = fp8kv(command, tensor, *flags, "--to", "sglang", "-o", tmp_path / "out")
    assert "note (sglang): needs SGLang 0.5.23 or newer" in done.stdout
    assert "for older ones use --to modelopt" in done.stdout


@pytest.mark.parametrize("command", ["convert", "repair"])
def test_a_class_that_loads_nothing_is_refused(command, tensor, tmp_path):
    dropped = with_class(tensor, tmp_path / "dropped", ["Qwen3ForCausalLM"])
    flags = ("--stats", tensor) if command == "repair" else ()
    done = fp8kv(command, dropped, *flags, "--to", "sglang", "-o", tmp_path / "out")
    one_line_error(done, "Use --to vllm for vLLM, or a new calibration in format fp8kv for the bundled")
    assert not (tmp_path / "out").exists()


def test_statistics_of_another_model_repair_nothing(tensor, tmp_path):
    other = save_model(tiny_model("llama", num_hidden_layers=2), tmp_path / "other")
    statistics = calibrated(other, tmp_path / "statistics")
    done = fp8kv("repair", tensor, "--stats", statistics, "-o", tmp_path / "out")
    one_line_error(done, "is of another model: it has 2 layers")


@pytest.mark.parametrize("layout", ["vllm", "fp8kv"])
def test_statistics_of_another_family_repair_nothing(layout, tensor, tmp_path):
    other = save_model(tiny_model("qwen2"), tmp_path / "other")
    statistics = calibrated(other, tmp_path / "statistics", "--format", layout)
    broken = damage(tensor, tmp_path / "broken", {"model.layers.0.self_attn.v_scale": None})
    done = fp8kv("repair", broken, "--stats", statistics, "-o", tmp_path / "out")
    one_line_error(
        done,
        f"'{statistics}' is of another model: its config says model_type qwen2, that of '{broken}' llama",
    )
    assert not (tmp_path / "out").exists()


def test_statistics_alone_must_have_the_channels_of_the_weights(tensor, tmp_path):
    other = save_model(tiny_model("llama", head_dim=8), tmp_path / "other")
    statistics = calibrated(other, tmp_path / "statistics") / "fp8kv_stats.safetensors"
    bare = shutil.copyfile(statistics, tmp_path / "bare.safetensors")
    broken = damage(tensor, tmp_path / "broken", {"model.layers.0.self_attn.v_scale": None})
    done = fp8kv("repair", broken, "--stats", bare, "-o", tmp_path / "out")
    one_line_error(done, "is of another model: layer 0 has K channels 16, and 32 in")


def test_compare_shows_ratios(tensor, attn_head, tmp_path):
    doubled = damage(tensor, tmp_path / "doubled", {})
    path = doubled / "model-fp8kv-scales.safetensors"
    save_file({n: 2 * t for n, t in load_file(path).items()}, path)
    document = json.loads(fp8kv("compare", tensor, doubled, "--json").stdout)
    assert [layer["k"] for layer in document["layers"]] == [[2.0, 2.0]] * 3
    printed = fp8kv("compare", tensor, attn_head)
    assert printed.exit_code == 0
    assert " to 1 " in " ".join(printed.stdout.split())


def test_only_known_formats_are_tested():
    nvfp4 = {name for name, spec in FORMATS.items() if spec.nvfp4}  # test_absmax.py
    assert set(SCALAR) | {"json", "fp8kv"} == set(FORMATS) - nvfp4
    assert {n for n, f in FORMATS.items() if "attn_head" in f.strategies} == {*PER_HEAD, "fp8kv"}


@pytest.mark.parametrize("value", [1e30, 1e-43])
def test_what_verify_calls_garbage_is_repaired_and_not_converted(value, tensor, tmp_path):
    name = "model.layers.0.self_attn.k_scale"
    broken = damage(tensor, tmp_path / "broken", {name: value})
    assert "nobody wrote" in fp8kv("verify", broken).stdout
    one_line_error(fp8kv("convert", broken, "--to", "tgi", "-o", tmp_path / "x"), "fp8kv repair")
    done = fp8kv("repair", broken, "--stats", tensor, "-o", tmp_path / "repaired")
    assert "replaced: model.layers.0.self_attn k" in done.stdout
    assert scales(tmp_path / "repaired") == scales(tensor)


def test_scales_that_nobody_measured_are_converted_with_a_warning(tensor, tmp_path):
    ones = {f"model.layers.{i}.self_attn.k_scale": 1.0 for i in range(3)}
    source = damage(tensor, tmp_path / "ones", ones)
    done = fp8kv("convert", source, "--to", "modelopt", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert "warning: K scales are all 1.0: nothing was measured" in done.stdout


def test_scales_that_contradict_each_other_are_a_problem(tensor, tmp_path):
    both = damage(tensor, tmp_path / "both", {})
    path = both / "model-fp8kv-scales.safetensors"
    name = "model.layers.0.self_attn.k_proj.k_scale"
    save_file({**load_file(path), name: torch.tensor([0.5])}, path, {"format": "pt"})
    index = json.loads((both / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = path.name
    (both / "model.safetensors.index.json").write_text(json.dumps(index))
    done = fp8kv("verify", both, "--engine", "vllm")
    assert done.exit_code == 1
    assert "two values for the K scale of layer 0: " in done.stdout


def test_codes_that_only_hf_quant_config_names_get_no_config_of_plain_weights(
    tensor, tiny_directory, tmp_path
):
    modelopt(tiny_directory, config=False)
    convert = fp8kv("convert", tiny_directory, "--to", "vllm", "-o", tmp_path / "out")
    file = tiny_directory / "model.safetensors"
    zero = {"model.layers.0.self_attn.k_proj.k_scale": torch.zeros(1)}
    save_file(load_file(file) | zero, file, {"format": "pt"})
    flags = ("--stats", tensor, "--to", "vllm", "-o", tmp_path / "out")
    for done in (convert, fp8kv("repair", tiny_directory, *flags)):
        one_line_error(done, "has no quantization_config", "or a new calibration in format fp8kv")
    assert not (tmp_path / "out").exists()


def test_compare_says_what_is_missing_wrong_or_of_another_model(tensor, tmp_path):
    attention = "model.layers.{}.self_attn.{}_scale".format
    changes = {attention(1, "k"): -0.5, attention(2, "k"): None, attention(2, "v"): None}
    wrong = damage(tensor, tmp_path / "wrong", changes)
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 1}))
    for first, second, letter, other in ((tensor, wrong, "B", "A"), (wrong, tensor, "A", "B")):
        notes = json.loads(fp8kv("compare", first, second, "--json").stdout)["notes"]
        assert f"{letter}: K scales are negative in layer 1" in notes
        assert f"only {other} has scales of layer 2" in notes
        assert any(each.startswith("A and B are of other models: ") for each in notes)
        printed = " ".join(fp8kv("compare", first, second).stdout.split())
        assert all(f"note: {note}" in printed for note in notes)


def test_compare_says_where_scales_are_of_other_kinds(tensor, tmp_path):
    alike = " ".join(fp8kv("compare", tensor, tensor).stdout.split())
    assert "note" not in alike
    other = convert(tensor, "vllm-nvfp4", tmp_path / "nvfp4")
    said = " ".join(fp8kv("compare", tensor, other).stdout.split())
    assert "note: A holds scales of e4m3fn, B values of an NVFP4 cache, absmax / 448" in said
    notes = json.loads(fp8kv("compare", other, tensor, "--json").stdout)["notes"]
    assert notes[0].startswith("A holds values of an NVFP4 cache")
