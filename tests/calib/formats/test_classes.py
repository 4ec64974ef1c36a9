"""Each format calls scales as the engine's class of this model loads them, or is refused."""

import json

import pytest
from command_line import calibrate, fp8kv, one_line_error, ran, succeeded
from families import save_model, tiny_model, tiny_vision_language_model
from safetensors import safe_open

PLAIN, INNER = "self_attn.k_scale", "self_attn.attn.k_scale"


def save(family, directory):
    make = tiny_vision_language_model if family == "llama4" else tiny_model
    return save_model(make(family), directory / family)


def holds(output, name):
    with safe_open(output / "model-fp8kv-scales.safetensors", "pt") as file:
        return any(key.endswith(f".0.{name}") for key in file.keys())  # noqa: SIM118


@pytest.mark.parametrize(
    ("family", "engine", "name"),
    [
        ("llama", "sglang", PLAIN),
        ("qwen2", "sglang", INNER),
        ("qwen3_moe", "vllm", PLAIN),
        ("gpt2", "sglang", "attn.attn.k_scale"),
        ("llama4", "vllm", PLAIN),
    ],
)
def test_an_output_loads_in_the_engine_that_its_format_is_for(family, engine, name, tmp_path):
    out = tmp_path / "out"
    succeeded(calibrate(save(family, tmp_path), "-o", out, "--format", engine, "--quiet"))
    assert holds(out, name)
    ran("verify", out, "--engine", engine)


@pytest.mark.parametrize(
    ("family", "architecture"), [("qwen3", "Qwen3ForCausalLM"), ("gpt_oss", "GptOssForCausalLM")]
)
def test_where_nothing_loads_is_said_before_measuring(family, architecture, tmp_path, monkeypatch):
    monkeypatch.setattr("calib.capture.resume.calibrate", lambda *_, **__: pytest.fail("it measured"))
    one_line_error(
        calibrate(save(family, tmp_path), "-o", tmp_path / "out", "--format", "sglang"),
        f"SGLang's class {architecture} loads no KV scales",
        "(no place), so it would compute with 1.0. Use --format vllm for vLLM, or --format fp8kv",
    )
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
    as_json = calibrate(source, "-o", out, "--format", "sglang", "--json", "--overwrite")
    assert as_json.stderr == ""


def test_old_outputs_are_mended_by_convert_and_tgi_is_doubted(tmp_path):
    source, old, new = save("qwen2", tmp_path), tmp_path / "old", tmp_path / "new"
    done = calibrate(source, "-o", tmp_path / "tgi", "--format", "tgi", "--quiet")
    # its rules were not read for this class
    assert "whether TGI loads these scales is not known for Qwen2ForCausalLM" in done.stderr
    assert calibrate(source, "-o", old, "--format", "vllm", "--quiet").stderr == ""
    assert fp8kv("verify", old, "--engine", "sglang").exit_code == 1
    ran("convert", old, "--to", "sglang", "-o", new)
    ran("verify", new, "--engine", "sglang")
