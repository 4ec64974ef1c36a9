"""What `fp8kv bake` refuses, and what other commands know of a baked model."""

import json
import shutil

import pytest
import torch
from baking import bake, calibrated, model_directory, seen
from command_line import calibrate, fp8kv, one_line_error
from families import save_model, tiny_model
from safetensors.torch import load_file

from calib.rescale import factors


def test_a_baked_model_is_not_baked_again_and_says_what_it_is(tmp_path):
    source = model_directory(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "scales")
    baked = tmp_path / "baked"
    assert bake(source, scales, baked, "--for", "fp8").exit_code == 0
    one_line_error(bake(baked, scales, tmp_path / "again", "--for", "fp8"), "is baked for fp8")
    shown = fp8kv("verify", baked, "--engine", "lmdeploy")
    assert "baked: right at 1.0" in " ".join(shown.stdout.split())
    card = (baked / "README.md").read_text()
    for line in (f"vllm serve {baked} --kv-cache-dtype fp8", "--quant-policy 16", "trtllm-serve"):
        assert line in card
    # other weights beside the same document are none
    shutil.copy(source / "model.safetensors", baked / "model.safetensors")
    one_line_error(fp8kv("verify", baked), "holds no KV-cache scales")


def test_scales_of_something_else(tmp_path):
    source = model_directory(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "scales")
    other = save_model(tiny_model("llama").to(torch.bfloat16), tmp_path / "other")
    one_line_error(bake(other, scales, tmp_path / "out", "--for", "fp8"), "do not fit")
    one_line_error(bake(scales, scales, tmp_path / "out", "--for", "fp8"), "has KV scales", "strip")
    one_line_error(bake(source, source, tmp_path / "out", "--for", "fp8"), "statistics")
    assert not (tmp_path / "out").exists()


def test_in_place_keeps_what_it_replaces(tmp_path):
    source = model_directory(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "scales")
    before = seen(source)[0]
    done = fp8kv("bake", source, "--scales", scales, "--for", "fp8", "--in-place", "--json")
    assert done.exit_code == 0, done.stderr
    backup = tmp_path / "source.before-fp8kv"
    assert json.loads(done.stdout)["backup"] == str(backup)
    assert torch.equal(seen(source)[0], before)
    old, new = (load_file(d / "model.safetensors") for d in (backup, source))
    assert any(not torch.equal(old[name], new[name]) for name in old)
    again = fp8kv("bake", source, "--scales", scales, "--for", "fp8", "--in-place")
    one_line_error(again, "is baked for fp8")
    refused = fp8kv("bake", "builtin:smollm2", "--scales", scales, "--for", "fp8", "--in-place")
    one_line_error(refused, "--in-place writes into a local directory")


def test_a_model_that_needs_no_baking(tmp_path):
    source = model_directory(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "scales")
    assert bake(source, scales, tmp_path / "baked", "--for", "fp8").exit_code == 0
    (tmp_path / "baked" / "fp8kv_bake.json").unlink()
    again = calibrated(tmp_path / "baked", tmp_path / "again")
    done = bake(tmp_path / "baked", again, tmp_path / "out", "--for", "fp8")
    one_line_error(done, "nothing to bake")
    assert not (tmp_path / "out").exists()


def test_other_commands_know_a_baked_model(tmp_path):
    source = model_directory(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "scales")
    baked = tmp_path / "baked"
    assert bake(source, scales, baked, "--for", "fp8").exit_code == 0
    one_line_error(fp8kv("apply", scales, baked, "-o", tmp_path / "no"), "is baked for fp8")
    for command in ("inspect", ("convert", "--to", "sglang", "-o", tmp_path / "no")):
        name, *flags = [command] if isinstance(command, str) else command
        one_line_error(fp8kv(name, baked, *flags), "needs none: it is baked for fp8")
    done = calibrate(baked, "-o", tmp_path / "after")
    assert "this model is baked for fp8" in done.stdout + done.stderr


def test_large_models_are_told_apart(tmp_path):
    # files of which sampled blocks are all of the embedding
    torch.manual_seed(0)
    source = save_model(
        tiny_model("llama", vocab_size=60000, tie_word_embeddings=True).bfloat16(),
        tmp_path / "source",
    )
    scales = calibrated(source, tmp_path / "scales")
    assert bake(source, scales, tmp_path / "baked", "--for", "fp8").exit_code == 0
    assert fp8kv("stress", source, "-o", tmp_path / "twin").exit_code == 0
    done = bake(tmp_path / "twin", scales, tmp_path / "no", "--for", "fp8")
    one_line_error(done, "do not fit")
    # and no file of ours makes a model baked
    shutil.copy(tmp_path / "baked" / "fp8kv_bake.json", source)
    one_line_error(fp8kv("verify", source), "holds no KV-cache scales: no tensor")


def test_a_baked_model_stays_one_with_scales_and_without(tmp_path):
    source = model_directory(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "scales")
    baked = tmp_path / "baked"
    assert bake(source, scales, baked, "--for", "fp8").exit_code == 0
    again = calibrated(baked, tmp_path / "again")
    one_line_error(bake(again, scales, tmp_path / "no", "--for", "fp8"), "is baked for fp8")
    assert fp8kv("strip", again, "-o", tmp_path / "stripped").exit_code == 0
    one_line_error(bake(tmp_path / "stripped", scales, "no", "--for", "fp8"), "is baked for fp8")
    for command in ("generate", "eval"):
        prompt = ("text",) if command == "generate" else ("--dataset", "random")
        done = fp8kv(command, baked, *prompt, "--scales", scales, "--device", "cpu")
        one_line_error(done, "is baked for fp8, and the scales in", "were not measured on it")
    own = fp8kv("generate", again, "text", "--scales", again, "--device", "cpu")
    assert own.exit_code == 0, own.stderr
    copy = tmp_path / "copy"
    assert fp8kv("convert", again, "--to", "sglang", "-o", copy).exit_code == 0
    mended = fp8kv("repair", copy, "--stats", again, "-o", tmp_path / "mended")
    assert mended.exit_code == 0, mended.stderr
    one_line_error(fp8kv("repair", copy, "--stats", scales, "-o", tmp_path / "no"), "do not fit")
    for file in ("fp8kv_calibration.json", "fp8kv_stats.safetensors"):
        shutil.copy(scales / file, baked)
    for directory in (scales, baked):
        done = fp8kv("generate", baked, "text", "--scales", directory, "--device", "cpu")
        one_line_error(done, "is baked for fp8, and the scales in", "were not measured on it")


@pytest.mark.parametrize("command", ["bake", "stress"])
@pytest.mark.parametrize("form", ["tgi", "json"])
def test_scales_beside_the_weights(command, form, tmp_path):
    source = model_directory(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "scales", "--format", "fp8kv")
    out = calibrated(source, tmp_path / "out", "--format", form)
    if form == "json":
        shutil.copy(out / "kv_cache_scales.json", source)
        out = source
    flags = ("--scales", scales, "--for", "fp8") if command == "bake" else ()
    done = fp8kv(command, out, *flags, "-o", tmp_path / "no")
    one_line_error(done, "has KV scales", "fp8kv strip")


def test_weights_that_would_not_be_baked(tmp_path):
    source = model_directory(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "scales")
    (source / "original").mkdir()
    shutil.copy(source / "model.safetensors", source / "original" / "consolidated.safetensors")
    in_place = fp8kv("bake", source, "--scales", scales, "--for", "fp8", "--in-place")
    one_line_error(in_place, "holds 'original/consolidated.safetensors' too")
    assert bake(source, scales, tmp_path / "out", "--for", "fp8").exit_code == 0
    assert not (tmp_path / "out" / "original").exists()
    (source / "adapter_config.json").write_text("{}")
    one_line_error(bake(source, scales, tmp_path / "no", "--for", "fp8"), "merge adapters first")


def test_the_calibration_is_not_replaced(tmp_path):
    source = model_directory(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "scales")
    done = bake(source, scales, scales, "--for", "fp8", "--overwrite")
    one_line_error(done, "would mix with the calibration")
    assert (scales / "fp8kv_stats.safetensors").exists()


def test_statistics_far_below_what_the_model_computes(tmp_path, monkeypatch):
    source = model_directory(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "scales")
    octave = factors.octave_factor
    monkeypatch.setattr(factors, "octave_factor", lambda scale: octave(scale) * 1024)
    done = bake(source, scales, tmp_path / "out", "--for", "fp8")
    one_line_error(done, "at 1.0, beyond FP8", "calibrate again")
    assert not (tmp_path / "out").exists()
