"""Each format calls scales, also of latents (MLA), as the engine's class of the model loads them."""

import json
from dataclasses import replace

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error, ran, succeeded
from engine_fixtures import make_scales
from families import LATENT, save_model, tiny_model, tiny_vision_language_model
from safetensors import safe_open

from calib.choices import FORMATS as NAMES
from calib.errors import UnsupportedExportError
from calib.formats import FORMATS, export

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


@pytest.fixture
def nothing_is_measured(monkeypatch):
    monkeypatch.setattr("calib.capture.resume.calibrate", lambda *_, **__: pytest.fail("it measured"))


def test_where_nothing_loads_is_said_before_measuring(nothing_is_measured, tmp_path):
    deepseek = save_model(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]), tmp_path / "deepseek")
    way_out = "(no place), so it would compute with 1.0. Use --format vllm for vLLM, or --format fp8kv"
    for source, name, *said in (
        (save("qwen3", tmp_path), "sglang", "SGLang's class Qwen3ForCausalLM loads no KV scales", way_out),
        (save("gpt_oss", tmp_path), "sglang", "SGLang's class GptOssForCausalLM loads no KV scales", way_out),
        (deepseek, "vllm", "--format vllm:", BAKE),
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


WEIGHTS = [f"model.layers.{i}.self_attn.kv_b_proj.weight" for i in range(2)]
FLAG = "--model-impl transformers"
BAKE = "fp8kv bake after fp8kv calibrate --format fp8kv"


@pytest.fixture
def of_latents(make_checkpoint):
    def make(architecture="DeepseekV3ForCausalLM", **config):
        config = {"architectures": [architecture], "kv_lora_rank": 16} | config
        return make_checkpoint(config, WEIGHTS)

    return make


def scales():
    """One scale per layer, of the latent and k_pe together."""
    made = make_scales()
    layers = {n: replace(one, v=one.k, latent=True) for n, one in made.layers.items()}
    return replace(made, layers=layers)


REASONS = {
    "vllm": "own classes load no scales of latents .* or --format modelopt with vLLM's",
    "vllm-nvfp4": r"or vLLM's --kv-cache-dtype fp8_ds_mla, .* \(DeepSeek-V3.2, GLM-5\)",
    "sglang": "SGLang stores latents .* without their scales, .* its answers are wrong",
    "aphrodite": "whether Aphrodite computes with scales of latents is not known",
    "json": "no engine is known to read scales of latents .* from kv_cache_scales.json",
    "trtllm": "TensorRT-LLM's PyTorch backend computes .* with 1.0",
}


def refused(scales, source, name, message):
    with pytest.raises(UnsupportedExportError, match=message) as found:
        export(scales, source, name)
    assert "\n" not in str(found.value)


def test_a_format_whose_engine_reads_no_latents_is_refused_with_the_reason_and_the_way_out(
    of_latents, make_checkpoint
):
    assert [name for name in NAMES if not FORMATS[name].latent] == ["modelopt", "fp8kv"]
    source = of_latents()
    for name in (name for name in NAMES if FORMATS[name].latent):
        refused(scales(), source, name, f"--format {name}: .* Use {BAKE}")
        refused(scales(), source, name, REASONS.get(name, "latents"))
        # scales that do not say so are known by the model's config
        refused(make_scales(), source, name, "MLA|latents")
    # and scales that say so by themselves
    refused(scales(), make_checkpoint(), "vllm", "MLA|latents")


def test_modelopt_holds_latents_for_vllms_other_backend(of_latents):
    made = export(scales(), of_latents("Glm4MoeLiteForCausalLM"), "modelopt")
    assert {name: tensor.tolist() for name, tensor in made.tensors.items()} == {
        f"model.layers.{i}.self_attn.{x}_proj.{x}_scale": [0.25 + i] for i in range(2) for x in "kv"
    }
    assert (made.flags, made.doubts) == (FLAG, ())
    assert made.notes[0].startswith(f"serve with {FLAG}: vLLM's own class computes with 1.0")
    # a class that vLLM lacks needs no flag
    made = export(scales(), of_latents("YoutuForCausalLM"), "modelopt")
    assert (made.flags, made.notes) == ("", ("these scales are of latents (MLA), for vLLM alone",))
    assert export(scales(), of_latents("AXK2ForCausalLM"), "modelopt").tensors


def test_latents_have_the_name_that_arrives(make_checkpoint):
    # as LongCat's, of which there are two in a layer: with both it is refused
    modules = [f"model.layers.{i}.self_attn.0" for i in range(2)]
    config = {"architectures": ["LongcatFlashForCausalLM"], "kv_lora_rank": 16}
    source = make_checkpoint(config, [f"{module}.kv_b_proj.weight" for module in modules])
    made = export(make_scales(modules=modules), source, "modelopt")
    assert {*made.tensors} == {f"{module}.{x}_scale" for module in modules for x in "kv"}
    assert made.flags == FLAG
    both = make_scales(modules=[*modules, "model.layers.0.self_attn.1"])
    refused(both, source, "modelopt", "several attention modules")


def test_modelopt_is_refused_where_latents_were_not_seen_to_arrive(of_latents):
    not_known = "loads scales of latents .* of {} is not known, or"
    for family, config, message in (
        ("MiniCPM3", {}, not_known),  # K and V in vLLM
        ("DeepseekV4", {}, not_known),  # not built
        ("Own", {}, not_known),
        ("AXK2", {"index_topk": 8}, "and uses scales of .* as its attention is sparse"),
        ("DeepseekV3", {"quantization_config": {"quant_method": "fp8"}}, "would replace"),
    ):
        architecture = f"{family}ForCausalLM"
        said = rf"{message.format(architecture)}.*\. Use {BAKE}"
        refused(scales(), of_latents(architecture, **config), "modelopt", said)


def test_an_output_of_latents_is_served_as_its_card_says_and_as_verify_says(tmp_path):
    deepseek = save_model(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]), tmp_path / "model")
    out, again = tmp_path / "out", tmp_path / "again"
    done = succeeded(calibrate(deepseek, "-o", out, "--format", "modelopt"))
    command = f"vllm serve {out} --kv-cache-dtype fp8 {FLAG}"
    assert command in " ".join(done.stdout.split())
    assert command in (out / "README.md").read_text()
    checked = ran("verify", out, "--engine", "vllm", "--json")
    (engine,) = json.loads(checked.stdout)["engines"]
    assert engine["flag"] == FLAG
    # vLLM passes them through bfloat16
    layers = json.loads((out / "fp8kv_calibration.json").read_text())["layers"]
    expected = [torch.tensor(layer["k_scale"]).bfloat16().item() for layer in layers]
    assert [o["values"][0] for o in engine["layers"] if o["letter"] == "k"] == expected
    assert fp8kv("verify", out, "--engine", "sglang").exit_code == 1
    # convert writes them for no other engine
    one_line_error(fp8kv("convert", out, "--to", "vllm", "-o", again), "--to vllm:", "fp8kv bake")
    ran("convert", out, "--to", "modelopt", "-o", again)
    assert f"vllm serve {again} --kv-cache-dtype fp8 {FLAG}\n" in (again / "README.md").read_text()
    ran("verify", again, "--engine", "vllm")
