"""Each format calls scales as the engine's class of this model loads them, or is refused."""

import json

import pytest
from command_line import calibrate, fp8kv, one_line_error
from families import save_model, tiny_model, tiny_vision_language_model
from safetensors import safe_open

PLAIN, INNER = "self_attn.k_scale", "self_attn.attn.k_scale"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny models by family, made once."""
    made = {}

    def model(family):
        if family not in made:
            directory = tmp_path_factory.mktemp("models") / family
            make = tiny_vision_language_model if family == "llama4" else tiny_model
            made[family] = save_model(make(family), directory)
        return made[family]

    return model


def names(output):
    with safe_open(output / "model-fp8kv-scales.safetensors", "pt") as file:
        return {name.partition(".0.")[2] for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    ("family", "engine", "name"),
    [
        ("llama", "vllm", PLAIN),
        ("llama", "sglang", PLAIN),
        ("qwen2", "sglang", INNER),
        ("olmo2", "sglang", INNER),
        ("gemma2", "sglang", PLAIN),
        ("qwen3_moe", "vllm", PLAIN),
        ("gpt2", "sglang", "attn.attn.k_scale"),
        ("llama4", "vllm", PLAIN),
    ],
)
def test_an_output_loads_in_the_engine_that_its_format_is_for(family, engine, name, models, tmp_path):
    out = tmp_path / "out"
    done = calibrate(models(family), "-o", out, "--format", engine, "--quiet")
    assert done.exit_code == 0, done.stderr
    assert name in names(out)
    checked = fp8kv("verify", out, "--engine", engine)
    assert checked.exit_code == 0, checked.stdout


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_where_nothing_loads_is_said_before_measuring(family, models, tmp_path, monkeypatch):
    monkeypatch.setattr("calib.capture.resume.calibrate", lambda *_, **__: pytest.fail("it measured"))
    done = calibrate(models(family), "-o", tmp_path / "out", "--format", "sglang")
    architecture = json.loads((models(family) / "config.json").read_text())["architectures"][0]
    one_line_error(
        done,
        f"SGLang's class {architecture} loads no KV scales",
        "(no place), so it would compute with 1.0. Use --format vllm for vLLM, or --format fp8kv",
    )
    assert not (tmp_path / "out").exists()


def renamed(directory, architecture):
    """A tiny Llama whose config.json names another class."""
    source = save_model(tiny_model("llama"), directory)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    return source


def test_a_class_that_was_never_run_gets_the_usual_name_and_a_warning(tmp_path):
    source, out = renamed(tmp_path / "model", "OwnForCausalLM"), tmp_path / "out"
    done = calibrate(source, "-o", out, "--format", "sglang")
    assert done.exit_code == 0
    printed = " ".join((done.stdout + done.stderr).split())
    assert "whether SGLang loads these scales is not known for OwnForCausalLM" in printed
    assert PLAIN in names(out)
    assert fp8kv("verify", out, "--engine", "sglang").exit_code == 1
    quiet = calibrate(source, "-o", out, "--format", "sglang", "--quiet", "--overwrite")
    assert (quiet.exit_code, quiet.stdout) == (0, "")
    assert quiet.stderr.startswith("warning: whether SGLang loads these scales is not known for")
    as_json = calibrate(source, "-o", out, "--format", "sglang", "--json", "--overwrite")
    assert as_json.stderr == ""


def test_names_that_the_class_was_never_run_with_are_said(tmp_path):
    source = renamed(tmp_path / "model", "LlavaForConditionalGeneration")  # its names have a prefix
    done = calibrate(source, "-o", tmp_path / "out", "--format", "vllm")
    assert done.exit_code == 0
    printed = " ".join((done.stdout + done.stderr).split())
    assert "it was never run with attention called 'model.layers.0.self_attn'" in printed
    assert fp8kv("verify", tmp_path / "out", "--engine", "vllm").exit_code == 1


def test_tgi_is_doubted_for_classes_that_its_rules_were_not_read_for(models, tmp_path):
    for family, doubted in (("llama", False), ("qwen2", True)):
        done = calibrate(models(family), "-o", tmp_path / family, "--format", "tgi", "--quiet")
        said = "whether TGI loads these scales is not known for Qwen2ForCausalLM" in done.stderr
        assert (done.exit_code, said) == (0, doubted)


def test_old_outputs_are_mended_by_convert(models, tmp_path):
    old = tmp_path / "old"
    assert calibrate(models("qwen2"), "-o", old, "--format", "vllm", "--quiet").exit_code == 0
    assert fp8kv("verify", old, "--engine", "sglang").exit_code == 1
    new = tmp_path / "new"
    assert fp8kv("convert", old, "--to", "sglang", "-o", new).exit_code == 0
    assert fp8kv("verify", new, "--engine", "sglang").exit_code == 0
