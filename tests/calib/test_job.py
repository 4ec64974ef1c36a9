"""The whole job on a tiny model: what is written, that it repeats, and what it refuses early."""

import json

import pytest
from families import save_model, tiny_model, tiny_vision_language_model

from calib.errors import Fp8kvError
from calib.files.names import STATS_FILE
from calib.job import default_output, run
from calib.recipe import load_recipe

SMALL = {"data.dataset": "random", "data.samples": 6, "data.seq_len": 32, "device": "cpu"}
SCALES = "model-fp8kv-scales.safetensors"


def recipe(**changes):
    return load_recipe(None, {**SMALL, **{k.replace("__", "."): v for k, v in changes.items()}})


def test_an_output_holds_what_the_design_says_and_its_recipe_reproduces_it(model, tmp_path):
    asked = recipe(strategy="attn_head", observer__name="mse", targets="qkv")
    result = run(str(model), asked, tmp_path / "out")
    names = "README.md config.json fp8kv_calibration.json fp8kv_source generation_config.json tokenizer.json "
    names += "model-00001-of-00001.safetensors model.safetensors.index.json tokenizer_config.json"
    assert {path.name for path in result.output.iterdir()} == {*names.split(), SCALES, STATS_FILE}
    report = json.loads((result.output / "fp8kv_calibration.json").read_text())
    assert (report["recipe"], report["recipe"]["dtype"]) == (result.recipe.model_dump(mode="json"), "float32")
    assert report["recipe"]["data"]["batch_size"] == 4096 // 32
    assert report["dataset"]["tokens"] == result.tokens == 6 * 32
    assert len(report["dataset"]["fingerprint"]) == 64
    assert f"vllm serve {result.output}" in (result.output / "README.md").read_text()
    again = run(str(model), load_recipe(str(result.output / "fp8kv_calibration.json")), tmp_path / "again")
    for name in (SCALES, STATS_FILE):
        assert (result.output / name).read_bytes() == (again.output / name).read_bytes()
    other = run(str(model), recipe(observer__name="mse", data__seed=1), tmp_path / "other")
    assert (result.output / STATS_FILE).read_bytes() != (other.output / STATS_FILE).read_bytes()


def test_what_must_fail_fails_before_it_takes_long(tmp_path, monkeypatch):
    model = save_model(tiny_model("gpt_neox"), tmp_path / "neox")
    for step, changes, message in (
        ("capture.resume.calibrate", {"export__formats": ["trtllm"]}, "only under self_attn or mixer"),
        ("capture.resume.calibrate", {"headroom": "auto"}, "192 tokens are too few to tell what others may"),
        ("job.load_model", {"strategy": "attn_head", "export__formats": ["tgi"]}, "--reduce"),
        ("job.load_model", {"data__dataset": "./gone.jsonl"}, "gone.jsonl"),
        ("job.load_model", {"data__seq_len": 257}, "--seq-len 257 is longer than the model's 256 positions"),
    ):
        monkeypatch.setattr(f"calib.{step}", lambda *_, **__: pytest.fail("it was called"))
        with pytest.raises(Fp8kvError, match=message):
            run(str(model), recipe(**changes), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_the_default_length_is_cut_to_the_models_positions_and_the_output_named_after_it(model, tmp_path):
    for name in ("builtin:smollm2", "HuggingFaceTB/smollm2", "./models/smollm2/"):
        assert str(default_output(name, "tensor")) == "smollm2-fp8kv-tensor"
    short = {"data.dataset": "random", "data.samples": 2, "device": "cpu"}
    result = run(str(model), load_recipe(None, short), tmp_path / "out")
    assert result.tokens == 2 * 256
    assert "samples are cut to the model's 256 positions; the default is 2048 tokens" in result.warnings[0]
    saved = json.loads((tmp_path / "out" / "fp8kv_calibration.json").read_text())
    assert saved["recipe"]["data"]["seq_len"] == 256
    assert result.warnings[0] in saved["warnings"]
    assert run(str(model), load_recipe(None, short | {"data.seq_len": 256}), tmp_path / "all").tokens == 512


def test_a_calibration_of_paligemma_says_what_vllm_caches(tmp_path):
    model = save_model(tiny_vision_language_model("paligemma"), tmp_path / "model")
    (said,) = (each for each in run(str(model), recipe(), tmp_path / "out").warnings if "PaliGemma" in each)
    assert "positions from 1" in said
    assert "vLLM does neither" in said
