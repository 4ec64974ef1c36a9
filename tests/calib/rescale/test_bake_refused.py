"""What `fp8kv bake` refuses, and what other commands know of a baked model."""

import shutil

import torch
from baking import bake, calibrated
from command_line import calibrate, fp8kv, json_of, one_line_error, ran, succeeded
from families import save_model, tiny_model

from calib.rescale import factors

IS_BAKED = "is baked for fp8"


def test_a_baked_model_says_how_to_serve_it_and_is_compared_with_what_was_measured(llama, tmp_path):
    shown = fp8kv("verify", llama.baked, "--engine", "lmdeploy")
    assert "baked: right at 1.0" in " ".join(shown.stdout.split())
    card = (llama.baked / "README.md").read_text()
    for line in (f"vllm serve {llama.baked} --kv-cache-dtype fp8", "--quant-policy 16", "trtllm-serve"):
        assert line in card
    # other weights beside the same document are none
    other = shutil.copytree(llama.baked, tmp_path / "other")
    shutil.copy(llama.source / "model.safetensors", other / "model.safetensors")
    one_line_error(fp8kv("verify", other), "holds no KV-cache scales")
    after = calibrated(llama.baked, tmp_path / "after", "--strategy", "attn_head")
    found = json_of("verify", llama.baked, "--against", after)
    assert found["problems"] == []
    few = "only 128 tokens were read, too few to tell"
    assert any(few in line for line in found["warnings"])
    assert few in " ".join(llama.shown.split())
    assert [0.5 < x <= 1 for fit in found["against"] for x in fit["used"].values()] == [True] * 6
    problems = json_of("verify", llama.baked, "--against", llama.scales, status=1)["problems"]
    assert any("measured on the model that was baked" in problem for problem in problems)


def test_scales_of_something_else(llama, tmp_path):
    other = save_model(tiny_model("llama").to(torch.bfloat16), tmp_path / "other")
    needless = shutil.copytree(llama.baked, tmp_path / "needless")
    (needless / "fp8kv_bake.json").unlink()
    beside = shutil.copytree(llama.source, tmp_path / "beside")
    json_file = calibrated(llama.source, tmp_path / "json", "--format", "json") / "kv_cache_scales.json"
    shutil.copy(json_file, beside)
    one_line_error(fp8kv("stress", beside, "-o", tmp_path / "out"), "has KV scales", "fp8kv strip")
    for model, scales, said in (
        (other, llama.scales, "do not fit"),
        (llama.scales, llama.scales, "has KV scales"),
        (beside, llama.scales, "has KV scales ('kv_cache_scales.json')"),
        (llama.source, llama.source, "statistics"),
        (llama.baked, llama.scales, IS_BAKED),
        (needless, calibrated(needless, tmp_path / "again"), "nothing to bake"),
    ):
        one_line_error(bake(model, scales, tmp_path / "out", "--for", "fp8"), said)
        assert not (tmp_path / "out").exists()
    # nor is the calibration replaced
    scales = shutil.copytree(llama.scales, tmp_path / "scales")
    done = bake(llama.source, scales, scales, "--for", "fp8", "--overwrite")
    one_line_error(done, "would mix with the calibration")
    assert (scales / "fp8kv_stats.safetensors").exists()


def test_other_commands_know_a_baked_model_with_scales_and_without(llama, tmp_path):
    no, again, copy = (tmp_path / name for name in ("no", "again", "copy"))
    one_line_error(fp8kv("apply", llama.scales, llama.baked, "-o", no), IS_BAKED)
    for command in (("inspect", llama.baked), ("convert", llama.baked, "--to", "sglang", "-o", no)):
        one_line_error(fp8kv(*command), f"needs none: it {IS_BAKED}")
    done = calibrate(llama.baked, "-o", again, "--dtype", "float32")
    assert f"this model {IS_BAKED}" in done.stdout + done.stderr
    one_line_error(bake(again, llama.scales, no, "--for", "fp8"), IS_BAKED)
    ran("strip", again, "-o", tmp_path / "stripped")
    one_line_error(bake(tmp_path / "stripped", llama.scales, no, "--for", "fp8"), IS_BAKED)
    ran("generate", again, "text", "--scales", again, "--device", "cpu")
    ran("convert", again, "--to", "sglang", "-o", copy)
    ran("repair", copy, "--stats", again, "-o", tmp_path / "mended")
    one_line_error(fp8kv("repair", copy, "--stats", llama.scales, "-o", no), "do not fit")


def test_scales_of_the_source_are_not_used_with_what_is_baked_of_it(llama, tmp_path):
    baked = shutil.copytree(llama.baked, tmp_path / "baked")
    for file in ("fp8kv_calibration.json", "fp8kv_stats.safetensors"):
        shutil.copy(llama.scales / file, baked)
    for command, scales in (
        (("eval", llama.baked, "--dataset", "random"), llama.scales),
        (("generate", baked, "text"), llama.scales),
        (("generate", baked, "text"), baked),
    ):
        done = fp8kv(*command, "--scales", scales, "--device", "cpu")
        one_line_error(done, f"{IS_BAKED}, and the scales in", "were not measured on it")


def test_weights_that_would_not_be_baked(llama, tmp_path):
    source = shutil.copytree(llama.source, tmp_path / "source")
    (source / "original").mkdir()
    shutil.copy(source / "model.safetensors", source / "original" / "consolidated.safetensors")
    in_place = fp8kv("bake", source, "--scales", llama.scales, "--for", "fp8", "--in-place")
    one_line_error(in_place, "holds 'original/consolidated.safetensors' too")
    succeeded(bake(source, llama.scales, tmp_path / "out", "--for", "fp8"))
    assert not (tmp_path / "out" / "original").exists()
    (source / "adapter_config.json").write_text("{}")
    one_line_error(bake(source, llama.scales, tmp_path / "no", "--for", "fp8"), "merge adapters first")


def test_in_place_keeps_what_it_replaces(llama, tmp_path):
    source, backup = shutil.copytree(llama.source, tmp_path / "source"), tmp_path / "source.before-fp8kv"
    flags = ("--scales", llama.scales, "--for", "fp8", "--in-place")
    assert json_of("bake", source, *flags)["backup"] == str(backup)
    for kept, directory in ((llama.source, backup), (llama.baked, source)):
        assert (directory / "model.safetensors").read_bytes() == (kept / "model.safetensors").read_bytes()
    one_line_error(fp8kv("bake", source, *flags), IS_BAKED)
    one_line_error(fp8kv("bake", "builtin:smollm2", *flags), "--in-place writes into a local directory")


def test_statistics_far_below_what_the_model_computes(llama, tmp_path, monkeypatch):
    octave = factors.octave_factor
    monkeypatch.setattr(factors, "octave_factor", lambda scale: octave(scale) * 1024)
    done = bake(llama.source, llama.scales, tmp_path / "out", "--for", "fp8")
    one_line_error(done, "at 1.0, beyond FP8", "calibrate again")
    assert not (tmp_path / "out").exists()
