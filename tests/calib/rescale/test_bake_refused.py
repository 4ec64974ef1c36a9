"""What `fp8kv bake` refuses, and what other commands know of a baked model."""

import json
import shutil

import pytest
import torch
from baking import bake, calibrated, model_directory, seen
from command_line import calibrate, fp8kv, one_line_error, ran
from families import save_model, tiny_model
from safetensors.torch import load_file

from calib.rescale import factors

IS_BAKED = "is baked for fp8"


def test_a_baked_model_says_what_it_is_and_how_to_serve_it(llama, tmp_path):
    shown = fp8kv("verify", llama.baked, "--engine", "lmdeploy")
    assert "baked: right at 1.0" in " ".join(shown.stdout.split())
    card = (llama.baked / "README.md").read_text()
    for line in (f"vllm serve {llama.baked} --kv-cache-dtype fp8", "--quant-policy 16", "trtllm-serve"):
        assert line in card
    # other weights beside the same document are none
    other = shutil.copytree(llama.baked, tmp_path / "other")
    shutil.copy(llama.source / "model.safetensors", other / "model.safetensors")
    one_line_error(fp8kv("verify", other), "holds no KV-cache scales")


def test_wider_weights_are_served_as_such(tmp_path):
    source, baked = model_directory(tmp_path / "source", "gemma3_text"), tmp_path / "baked"
    scales = calibrated(source, tmp_path / "scales")
    assert bake(source, scales, baked, "--for", "fp8", "--dtype", "float32").exit_code == 0
    card = (baked / "README.md").read_text()
    assert f"vllm serve {baked} --kv-cache-dtype fp8 --dtype float32\n" in card
    assert "trtllm-serve" not in card  # which has no such flag


def test_one_is_compared_with_what_was_measured(llama, tmp_path):
    after = calibrated(llama.baked, tmp_path / "after", "--strategy", "attn_head")
    done = fp8kv("verify", llama.baked, "--against", after, "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["problems"]) == (0, [])
    assert [0.5 < x <= 1 for fit in found["against"] for x in fit["used"].values()] == [True] * 6
    done = fp8kv("verify", llama.baked, "--against", llama.scales, "--json")
    assert done.exit_code == 1
    problems = json.loads(done.stdout)["problems"]
    assert any("measured on the model that was baked" in problem for problem in problems)


def test_scales_of_something_else(llama, tmp_path):
    out = tmp_path / "out"
    other = save_model(tiny_model("llama").to(torch.bfloat16), tmp_path / "other")
    one_line_error(bake(other, llama.scales, out, "--for", "fp8"), "do not fit")
    one_line_error(bake(llama.scales, llama.scales, out, "--for", "fp8"), "has KV scales", "strip")
    one_line_error(bake(llama.source, llama.source, out, "--for", "fp8"), "statistics")
    one_line_error(bake(llama.baked, llama.scales, out, "--for", "fp8"), IS_BAKED)
    assert not out.exists()
    # nor is the calibration replaced
    scales = shutil.copytree(llama.scales, tmp_path / "scales")
    done = bake(llama.source, scales, scales, "--for", "fp8", "--overwrite")
    one_line_error(done, "would mix with the calibration")
    assert (scales / "fp8kv_stats.safetensors").exists()


def test_large_models_are_told_apart(tmp_path):
    # files of which sampled blocks are all of the embedding
    model = tiny_model("llama", vocab_size=60000, tie_word_embeddings=True, num_hidden_layers=2)
    source = save_model(model.bfloat16(), tmp_path / "source")
    scales = calibrated(source, tmp_path / "scales")
    assert bake(source, scales, tmp_path / "baked", "--for", "fp8").exit_code == 0
    assert fp8kv("stress", source, "-o", tmp_path / "twin").exit_code == 0
    done = bake(tmp_path / "twin", scales, tmp_path / "no", "--for", "fp8")
    one_line_error(done, "do not fit")
    # and no file of ours makes a model baked
    shutil.copy(tmp_path / "baked" / "fp8kv_bake.json", source)
    one_line_error(fp8kv("verify", source), "holds no KV-cache scales: no tensor")


def test_in_place_keeps_what_it_replaces(llama, tmp_path):
    source = shutil.copytree(llama.source, tmp_path / "source")
    before = seen(source)[0]
    flags = ("--scales", llama.scales, "--for", "fp8", "--in-place")
    done = ran("bake", source, *flags, "--json")
    backup = tmp_path / "source.before-fp8kv"
    assert json.loads(done.stdout)["backup"] == str(backup)
    assert torch.equal(seen(source)[0], before)
    old, new = (load_file(d / "model.safetensors") for d in (backup, source))
    assert any(not torch.equal(old[name], new[name]) for name in old)
    one_line_error(fp8kv("bake", source, *flags), IS_BAKED)
    refused = fp8kv("bake", "builtin:smollm2", *flags)
    one_line_error(refused, "--in-place writes into a local directory")


def test_a_model_that_needs_no_baking(llama, tmp_path):
    baked = shutil.copytree(llama.baked, tmp_path / "baked")
    (baked / "fp8kv_bake.json").unlink()
    done = bake(baked, calibrated(baked, tmp_path / "again"), tmp_path / "out", "--for", "fp8")
    one_line_error(done, "nothing to bake")
    assert not (tmp_path / "out").exists()


def test_other_commands_know_a_baked_model_with_scales_and_without(llama, tmp_path):
    no, again, copy = (tmp_path / name for name in ("no", "again", "copy"))
    one_line_error(fp8kv("apply", llama.scales, llama.baked, "-o", no), IS_BAKED)
    for command in (("inspect", llama.baked), ("convert", llama.baked, "--to", "sglang", "-o", no)):
        one_line_error(fp8kv(*command), f"needs none: it {IS_BAKED}")
    done = calibrate(llama.baked, "-o", again, "--dtype", "float32")
    assert f"this model {IS_BAKED}" in done.stdout + done.stderr
    one_line_error(bake(again, llama.scales, no, "--for", "fp8"), IS_BAKED)
    assert fp8kv("strip", again, "-o", tmp_path / "stripped").exit_code == 0
    one_line_error(bake(tmp_path / "stripped", llama.scales, no, "--for", "fp8"), IS_BAKED)
    ran("generate", again, "text", "--scales", again, "--device", "cpu")
    assert fp8kv("convert", again, "--to", "sglang", "-o", copy).exit_code == 0
    ran("repair", copy, "--stats", again, "-o", tmp_path / "mended")
    one_line_error(fp8kv("repair", copy, "--stats", llama.scales, "-o", no), "do not fit")


def test_scales_of_the_source_are_not_used_with_what_is_baked_of_it(llama, tmp_path):
    baked = shutil.copytree(llama.baked, tmp_path / "baked")
    for file in ("fp8kv_calibration.json", "fp8kv_stats.safetensors"):
        shutil.copy(llama.scales / file, baked)
    for command, scales in (
        (("generate", llama.baked, "text"), llama.scales),
        (("eval", llama.baked, "--dataset", "random"), llama.scales),
        (("generate", baked, "text"), llama.scales),
        (("generate", baked, "text"), baked),
    ):
        done = fp8kv(*command, "--scales", scales, "--device", "cpu")
        one_line_error(done, f"{IS_BAKED}, and the scales in", "were not measured on it")


@pytest.mark.parametrize("form", ["tgi", "json"])
def test_scales_beside_the_weights(form, llama, tmp_path):
    out = calibrated(llama.source, tmp_path / "out", "--format", form)
    if form == "json":
        source = shutil.copytree(llama.source, tmp_path / "source")
        shutil.copy(out / "kv_cache_scales.json", source)
        out = source
    stress = fp8kv("stress", out, "-o", tmp_path / "no")
    for done in (bake(out, llama.scales, tmp_path / "no", "--for", "fp8"), stress):
        file = "('kv_cache_scales.json')" if form == "json" else ""
        one_line_error(done, "has KV scales", file, "fp8kv strip")


def test_weights_that_would_not_be_baked(llama, tmp_path):
    source = shutil.copytree(llama.source, tmp_path / "source")
    (source / "original").mkdir()
    shutil.copy(source / "model.safetensors", source / "original" / "consolidated.safetensors")
    in_place = fp8kv("bake", source, "--scales", llama.scales, "--for", "fp8", "--in-place")
    one_line_error(in_place, "holds 'original/consolidated.safetensors' too")
    assert bake(source, llama.scales, tmp_path / "out", "--for", "fp8").exit_code == 0
    assert not (tmp_path / "out" / "original").exists()
    (source / "adapter_config.json").write_text("{}")
    one_line_error(bake(source, llama.scales, tmp_path / "no", "--for", "fp8"), "merge adapters first")


def test_statistics_far_below_what_the_model_computes(llama, tmp_path, monkeypatch):
    octave = factors.octave_factor
    monkeypatch.setattr(factors, "octave_factor", lambda scale: octave(scale) * 1024)
    done = bake(llama.source, llama.scales, tmp_path / "out", "--for", "fp8")
    one_line_error(done, "at 1.0, beyond FP8", "calibrate again")
    assert not (tmp_path / "out").exists()
