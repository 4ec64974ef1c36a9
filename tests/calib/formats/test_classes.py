"""Each format calls scales, also of latents (MLA), as the engine's class of the model loads them."""

import json

import pytest
import torch
from command_line import calibrate, fp8kv, json_of, one_line_error, ran, succeeded
from families import LATENT, save_model, tiny_model, tiny_vision_language_model
from safetensors import safe_open

FLAG = "--model-impl transformers"
WAY_OUT = "fp8kv bake after fp8kv calibrate --format fp8kv, or --to"
PLAIN, INNER = "self_attn.k_scale", "self_attn.attn.k_scale"


def save(family, directory):
    make = tiny_vision_language_model if family == "llama4" else tiny_model
    return save_model(make(family), directory / family)


def holds(output, name):
    with safe_open(output / "model-fp8kv-scales.safetensors", "pt") as file:
        return any(key.endswith(f".0.{name}") for key in file.keys())  # noqa: SIM118


def test_an_output_loads_in_the_engine_of_its_format_or_it_is_said_before_measuring(tmp_path, monkeypatch):
    for family, engine, name in (
        ("llama", "sglang", PLAIN),
        ("qwen2", "sglang", INNER),
        ("qwen3_moe", "vllm", PLAIN),
        ("gpt2", "sglang", "attn.attn.k_scale"),
        ("llama4", "vllm", PLAIN),
    ):
        out = tmp_path / f"{family}-out"
        succeeded(calibrate(save(family, tmp_path), "-o", out, "--format", engine, "--quiet"))
        assert holds(out, name)
        ran("verify", out, "--engine", engine)
    monkeypatch.setattr("calib.capture.resume.calibrate", lambda *_, **__: pytest.fail("it measured"))
    deepseek = save_model(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]), tmp_path / "deepseek")
    way_out = "(no place), so it would compute with 1.0. Use --format vllm for vLLM, or --format fp8kv"
    for source, name, *said in (
        (save("qwen3", tmp_path), "sglang", "SGLang's class Qwen3ForCausalLM loads no KV scales", way_out),
        (save("gpt_oss", tmp_path), "sglang", "SGLang's class GptOssForCausalLM loads no KV scales", way_out),
        (deepseek, "vllm", "--format vllm:", "fp8kv bake after fp8kv calibrate --format fp8kv"),
    ):
        one_line_error(calibrate(source, "-o", tmp_path / "out", "--format", name), *said)
        assert not (tmp_path / "out").exists()


def test_a_class_that_was_never_run_gets_the_usual_name_and_a_warning(tmp_path):
    source, out = save("llama", tmp_path), tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["OwnForCausalLM"]}))
    done = succeeded(calibrate(source, "-o", out, "--format", "sglang"))
    printed = " ".join((done.stdout + done.stderr).split())
    assert "whether SGLang loads these scales is not known for OwnForCausalLM" in printed
    assert holds(out, PLAIN)
    assert fp8kv("verify", out, "--engine", "sglang").exit_code == 1
    quiet = calibrate(source, "-o", out, "--format", "sglang", "--quiet", "--overwrite")
    assert quiet.stdout == ""
    assert quiet.stderr.startswith("warning: whether SGLang loads these scales is not known for")
    assert calibrate(source, "-o", out, "--format", "sglang", "--json", "--overwrite").stderr == ""


def test_an_output_of_latents_is_served_as_its_card_says_and_as_verify_says(tmp_path):
    deepseek = save_model(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]), tmp_path / "model")
    out, again = tmp_path / "out", tmp_path / "again"
    done = succeeded(calibrate(deepseek, "-o", out, "--format", "modelopt"))
    command, card = f"vllm serve {out} --kv-cache-dtype fp8 {FLAG}", (out / "README.md").read_text()
    for said, whom in ((" ".join(done.stdout.split()), "serve with vLLM:"), (card, "for vLLM; strategy")):
        assert command in said
        assert whom in said
    (engine,) = json_of("verify", out, "--engine", "vllm")["engines"]
    assert engine["flag"] == FLAG
    # vLLM passes them through bfloat16
    layers = json.loads((out / "fp8kv_calibration.json").read_text())["layers"]
    expected = [torch.tensor(layer["k_scale"]).bfloat16().item() for layer in layers]
    assert [o["values"][0] for o in engine["layers"] if o["letter"] == "k"] == expected
    assert fp8kv("verify", out, "--engine", "sglang").exit_code == 1
    # convert writes them for no other engine
    one_line_error(fp8kv("convert", out, "--to", "vllm", "-o", again), "--to vllm:", f"Use {WAY_OUT}")
    ran("convert", out, "--to", "modelopt", "-o", again)
    assert f"vllm serve {again} --kv-cache-dtype fp8 {FLAG}\n" in (again / "README.md").read_text()
    ran("verify", again, "--engine", "vllm")
