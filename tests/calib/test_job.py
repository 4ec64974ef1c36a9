"""The whole job on a tiny model: what is written, that it repeats, and what it refuses early."""

import json

import pytest
import torch
from families import (
    HYBRIDS,
    SHARED_KV,
    save_model,
    tiny_model,
    tiny_vision_language_model,
)
from safetensors.torch import load_file

from calib.choices import FORMATS
from calib.errors import InputError, UnsupportedExportError
from calib.files.names import STATS_FILE
from calib.job import default_output, run
from calib.progress import Progress
from calib.recipe import load_recipe, recipe_names
from calib.scales.stats_file import load_scales, load_stats

SMALL = {"data.dataset": "random", "data.samples": 6, "data.seq_len": 32, "device": "cpu"}


def recipe(**changes):
    return load_recipe(None, {**SMALL, **{k.replace("__", "."): v for k, v in changes.items()}})


def test_an_output_holds_what_the_design_says(tiny_directory, tmp_path):
    result = run(str(tiny_directory), recipe(strategy="attn_head"), tmp_path / "out")
    assert {path.name for path in result.output.iterdir()} == {
        "README.md",
        "config.json",
        "fp8kv_calibration.json",
        "fp8kv_source",
        STATS_FILE,
        "generation_config.json",
        "model-00001-of-00001.safetensors",
        "model-fp8kv-scales.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    report = json.loads((result.output / "fp8kv_calibration.json").read_text())
    assert report["recipe"] == result.recipe.model_dump(mode="json")
    assert report["recipe"]["dtype"] == "float32"
    assert report["recipe"]["data"]["batch_size"] == 4096 // 32
    assert report["dataset"]["tokens"] == result.tokens == 6 * 32
    assert len(report["dataset"]["fingerprint"]) == 64
    assert f"vllm serve {result.output}" in (result.output / "README.md").read_text()


def test_written_scales_are_amax_over_448(tiny_directory, tmp_path):
    out = run(str(tiny_directory), recipe(strategy="attn_head"), tmp_path / "out").output
    written = load_file(out / "model-fp8kv-scales.safetensors")
    layers = load_stats(out).layers
    assert len(written) == 6
    for name, layer in layers.items():
        for which in "kv":
            expected = getattr(layer, which).amax.amax(-1) / 448
            assert torch.equal(written[f"{name}.{which}_scale"].flatten(), expected)
            assert torch.equal(getattr(load_scales(out).layers[name], which), expected)


@pytest.mark.parametrize("observer", ["absmax", "mse"])
def test_the_saved_recipe_reproduces_the_scales_bit_for_bit(observer, tiny_directory, tmp_path):
    first = run(str(tiny_directory), recipe(observer__name=observer, targets="qkv"), tmp_path / "first")
    saved = load_recipe(str(first.output / "fp8kv_calibration.json"))
    second = run(str(tiny_directory), saved, tmp_path / "second")
    for name in ("model-fp8kv-scales.safetensors", STATS_FILE):
        assert (first.output / name).read_bytes() == (second.output / name).read_bytes()


def test_another_seed_gives_other_scales(tiny_directory, tmp_path):
    outs = [run(str(tiny_directory), recipe(data__seed=s), tmp_path / f"{s}").output for s in (1, 2)]
    files = [(out / STATS_FILE).read_bytes() for out in outs]
    assert files[0] != files[1]


def test_several_formats_fill_a_directory_each(tiny_directory, tmp_path):
    formats = list(FORMATS)
    result = run(str(tiny_directory), recipe(export__formats=formats), tmp_path / "out")
    assert {path.name for path in result.output.iterdir()} == set(FORMATS)
    json_files = {path.name for path in (result.output / "json").iterdir()}
    own = {"README.md", "fp8kv_calibration.json", STATS_FILE}
    assert json_files == {*own, "kv_cache_scales.json"}
    assert {path.name for path in (result.output / "fp8kv").iterdir()} == own
    assert (result.output / "sglang" / "kv_cache_scales.json").exists()
    assert result.directories["tgi"] == result.output / "tgi"


def test_channel_scales_are_for_our_runtime(tiny_directory, tmp_path):
    result = run(str(tiny_directory), recipe(strategy="channel", export__formats=["fp8kv"]), tmp_path / "out")
    scales = load_scales(result.output).layers["model.layers.0.self_attn"]
    assert scales.k.shape == (2, 16)


def test_a_hybrid_model_gets_scales_for_its_attention_layer(tmp_path):
    source = save_model(tiny_model("qwen3_next", **HYBRIDS["qwen3_next"]), tmp_path / "hybrid")
    out = run(str(source), recipe(), tmp_path / "out").output
    written = load_file(out / "model-fp8kv-scales.safetensors")
    assert sorted(written) == [f"model.layers.1.self_attn.{w}_scale" for w in "kv"]


def test_a_layer_that_shares_kv_gets_its_owners_scales_for_the_engine(tmp_path):
    source = save_model(tiny_model("gemma3n_text", **SHARED_KV), tmp_path / "shared")
    result = run(str(source), recipe(), tmp_path / "out")
    assert [row.layer_idx for row in result.layers] == [0, 1]
    assert any("shares the cache of model.layers.1.self_attn" in w for w in result.warnings)
    written = load_file(result.output / "model-fp8kv-scales.safetensors")
    owner, sharer = (written[f"model.layers.{i}.self_attn.k_scale"] for i in (1, 2))
    assert torch.equal(owner, sharer)


def test_an_output_calibrated_again_replaces_its_scales(tiny_directory, tmp_path):
    first = run(str(tiny_directory), recipe(), tmp_path / "first").output
    again = run(str(first), recipe(headroom=2.0), tmp_path / "again").output
    one, two = (load_file(out / "model-fp8kv-scales.safetensors") for out in (first, again))
    assert one.keys() == two.keys()
    assert all(torch.equal(two[name], one[name] * 2) for name in one)
    index = json.loads((again / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(json.loads((first / "model.safetensors.index.json").read_text())["weight_map"])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"strategy": "attn_head", "export__formats": ["tgi"]}, UnsupportedExportError, "--reduce"),
        ({"data__dataset": "./gone.jsonl"}, InputError, "gone.jsonl"),
        ({"data__seq_len": 999}, InputError, "256 positions"),
    ],
)
def test_what_must_fail_fails_before_the_weights_are_read(
    changes, error, message, tiny_directory, tmp_path, monkeypatch
):
    monkeypatch.setattr("calib.job.load_model", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(error, match=message):
        run(str(tiny_directory), recipe(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_that_must_fail_fails_before_calibration(tmp_path, monkeypatch):
    source = save_model(tiny_model("gpt_neox"), tmp_path / "neox")
    monkeypatch.setattr("calib.capture.resume.calibrate", lambda *_, **__: pytest.fail("it was calibrated"))
    with pytest.raises(UnsupportedExportError, match="only under self_attn or mixer"):
        run(str(source), recipe(export__formats=["trtllm"]), tmp_path / "out")


def test_progress_counts_every_token(tiny_directory, tmp_path):
    stages, steps = [], []
    progress = Progress(lambda *stage: stages.append(stage), steps.append)
    run(str(tiny_directory), recipe(data__batch_size=4), tmp_path / "out", progress=progress)
    assert stages == [("load", None, ""), ("calibrate", 192, "tokens"), ("write", None, "")]
    assert steps == [128, 64]


@pytest.mark.parametrize(
    ("model", "directory"),
    [
        ("builtin:smollm2", "smollm2-fp8kv-tensor"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct-fp8kv-tensor"),
        ("./models/mine/", "mine-fp8kv-tensor"),
    ],
)
def test_default_output(model, directory):
    assert str(default_output(model, recipe().strategy)) == directory


def test_the_default_length_is_cut_to_the_models_positions(tiny_directory, tmp_path):
    short = {"data.dataset": "random", "data.samples": 2, "device": "cpu"}
    result = run(str(tiny_directory), load_recipe(None, short), tmp_path / "out")
    assert result.tokens == 2 * 256
    assert "samples are cut to the model's 256 positions; the default is 2048 tokens" in (result.warnings[0])
    saved = json.loads((tmp_path / "out" / "fp8kv_calibration.json").read_text())
    assert saved["recipe"]["data"]["seq_len"] == 256
    assert result.warnings[0] in saved["warnings"]


@pytest.mark.parametrize("name", recipe_names())
def test_a_bundled_recipe_asks_for_no_length(name, tiny_directory, tmp_path):
    changes = {"data.dataset": "random", "data.split": None, "data.samples": 2, "device": "cpu"}
    result = run(str(tiny_directory), load_recipe(name, changes), tmp_path / "out")
    assert result.tokens == 2 * 256


def test_a_length_of_the_users_own_recipe_is_refused(tiny_directory, tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text("data: {dataset: random, seq_len: 2048}\ndevice: cpu\n")
    with pytest.raises(InputError, match="--seq-len 2048 is longer than the model's 256 positions"):
        run(str(tiny_directory), load_recipe(str(recipe)), tmp_path / "out")


def test_a_calibration_of_paligemma_says_what_vllm_caches(tmp_path):
    source = save_model(tiny_vision_language_model("paligemma"), tmp_path / "model")
    warnings = run(str(source), recipe(), tmp_path / "out").warnings
    assert [
        each for each in warnings if "PaliGemma's positions from 1" in each and "vLLM does neither" in each
    ]
