"""Scales written again: every format into every other, bit for bit, or refused."""

import json
import re
import shutil

import pytest
import torch
from apply_cases import calibrated, config_of, damage, scales
from command_line import fp8kv, one_line_error, ran
from families import edit_json
from safetensors.torch import load_file

from calib.formats import FORMATS

SCALAR = ("vllm", "aphrodite", "sglang", "tgi", "modelopt", "trtllm")


SCALES = "model-fp8kv-scales.safetensors"


def convert(source, to, out, *flags):
    ran("convert", source, "--to", to, "-o", out, *flags)
    return out


def command_line(command, source, statistics, out, to="vllm"):
    """Convert, or repair by statistics."""
    flags = ("--stats", statistics) if command == "repair" else ()
    return fp8kv(command, source, *flags, "--to", to, "-o", out)


def test_there_and_back_again_is_exact(measured, tmp_path):
    """Through all formats, one after the other; test_round_trips.py takes them in any order."""
    assert {*SCALAR, "json", "fp8kv"} == {name for name, spec in FORMATS.items() if not spec.nvfp4}
    here = measured
    for name in SCALAR:
        here = convert(here, name, tmp_path / name)
        assert scales(here) == scales(measured), name
    back = convert(here, "vllm", tmp_path / "back")
    for name, expected in load_file(measured / SCALES).items():
        assert torch.equal(load_file(back / SCALES)[name], expected)
    assert config_of(back) == config_of(measured)


def test_what_a_format_cannot_hold_is_refused_or_reduced(measured, per_head, tmp_path):
    out = tmp_path / "out"
    one_line_error(fp8kv("convert", per_head, "--to", "tgi", "-o", out), "holds no query scales")
    for name in ("convert", "repair"):
        done = command_line(name, measured, measured, out, "fp8kv")
        one_line_error(done, "--to fp8kv holds the statistics of a calibration", "use fp8kv calibrate")
    assert not out.exists()
    convert(per_head, "tgi", out, "--without-q", "--reduce", "max")
    assert [(i, max(k), max(v)) for i, k, v, _ in scales(per_head)] == [
        (i, *k, *v) for i, k, v, _ in scales(out)
    ]


def test_per_head_scales_stay_what_they_are_and_json_holds_the_larger_of_k_and_v(
    measured, per_head, tmp_path
):
    out = convert(per_head, "aphrodite", tmp_path / "aphrodite")
    assert scales(out) == scales(per_head)
    assert config_of(out)["quantization_config"]["kv_cache_scheme"]["strategy"] == "attn_head"
    larger = [max(k, v) for _, k, v, _ in scales(measured)]
    out = convert(measured, "json", tmp_path / "json")
    assert [k for _, k, _, _ in scales(out)] == [pytest.approx(each) for each in larger]


@pytest.mark.parametrize(
    ("command", "to", "fp8_dtype", "ways_out"),
    [
        ("convert {} --without-q", "tgi", "e4m3fn", "Use --reduce max, or --to vllm or aphrodite"),
        ("repair {} --stats {}", "tgi", "e4m3fn", "holds no query scales. Use --to vllm"),
        ("repair {} --stats {}", "vllm", "e4m3fnuz", "Use --to tgi"),
        ("convert {} --without-q", "vllm", "e4m3fnuz", "Use --to tgi"),
        ("convert {} --without-q", "tgi", "e5m2", "holds e4m3fn or e4m3fnuz scales; these are for e5m2"),
        ("convert {} --without-q", "tgi", "e5m2", "Use a new calibration in format fp8kv"),
        ("convert {} --without-q", "tgi", "9", "kv_cache_torch_dtype of config.json is 'float8_9'"),
    ],
)
def test_a_refusal_names_flags_that_the_command_has(command, to, fp8_dtype, ways_out, per_head, tmp_path):
    source = shutil.copytree(per_head, tmp_path / "source")
    config = config_of(source)
    if fp8_dtype != "e4m3fn":
        config |= {"kv_cache_torch_dtype": f"float8_{fp8_dtype}"}
        config["quantization_config"].pop("kv_cache_scheme")
        (source / "config.json").write_text(json.dumps(config))
    words = command.replace("{}", str(source)).split()
    done = fp8kv(*words, "--to", to, "-o", tmp_path / "out")
    one_line_error(done, ways_out)
    named = set(re.findall(r"--[a-z][a-z0-9-]*", done.stderr))
    assert named <= set(re.findall(r"--[a-z][a-z0-9-]*", fp8kv(words[0], "--help").stdout))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["convert", "repair"])
def test_what_is_known_or_not_of_the_engine_is_said(command, measured, tmp_path):
    done = command_line(command, measured, measured, tmp_path / "sglang", "sglang")
    assert "note (sglang): needs SGLang 0.5.23 or newer" in done.stdout
    other = shutil.copytree(measured, tmp_path / "other")
    edit_json(other / "config.json", architectures=["OwnForCausalLM"])
    done = command_line(command, other, measured, tmp_path / "vllm")
    assert "warning: whether vLLM loads these scales is not known" in done.stdout
    assert "whether vLLM loads these scales" in (tmp_path / "vllm" / "README.md").read_text()
    edit_json(other / "config.json", architectures=["Qwen3ForCausalLM"])
    done = command_line(command, other, measured, tmp_path / "out", "sglang")
    one_line_error(done, "Use --to vllm for vLLM, or a new calibration in format fp8kv for the bundled")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["convert {} --to tgi", "strip {}", "repair {} --stats {}"])
def test_an_output_without_weights_is_told_where_they_are(command, model, measured, tmp_path):
    bare = calibrated(model, tmp_path / "bare", "--weights", "none")
    words = command.replace("{}", str(bare)).split()
    done = fp8kv(*words, "-o", tmp_path / "out")
    one_line_error(done, "--weights none", "put the source's weight files beside", "give the sourc")
    assert "download" not in done.stderr
    # and so it is
    shutil.copy(model / "model.safetensors", bare)
    ran(*words, "-o", tmp_path / "out")
    weights = load_file(next((tmp_path / "out").glob("model[.-]*safetensors")))
    assert weights["model.norm.weight"].shape == (64,)
    if command != "strip {}":
        assert scales(tmp_path / "out") == scales(measured)


def test_a_layer_without_scales_is_not_left_out_and_scales_that_nobody_measured_are_said(measured, tmp_path):
    gone = {f"model.layers.2.self_attn.{x}_scale": None for x in "kv"}
    broken = damage(measured, tmp_path / "broken", gone)
    done = fp8kv("convert", broken, "--to", "tgi", "-o", tmp_path / "out")
    one_line_error(done, "the k_scale of layer 2 is missing", "fp8kv repair")
    assert not (tmp_path / "out").exists()
    ones = {f"model.layers.{i}.self_attn.k_scale": 1.0 for i in range(3)}
    source = damage(measured, tmp_path / "ones", ones)
    done = ran("convert", source, "--to", "modelopt", "-o", tmp_path / "out")
    assert "warning: K scales are all 1.0: nothing was measured" in done.stdout
