"""Scales of latents (MLA): what arrives in which engine, and where that makes answers wrong."""

import json

import pytest
from command_line import fp8kv
from safetensors.torch import load_file, save_file
from scale_directories import (
    COMPRESSED,
    INNER,
    MODELOPT,
    MODULES,
    NAMES,
    PROJ,
    lines_of,
    said,
    simulated,
    write,
)

WEIGHTS = [f"{module}.kv_b_proj.weight" for module in MODULES]
MQA = "{module}.attn_mqa.{x}_scale"
OWN = "{module}.mla_attn.mla_attn.{x}_scale"
FLAG = "--model-impl transformers"


def latents(directory, name, architecture="DeepseekV3ForCausalLM", config=COMPRESSED):
    """A checkpoint whose weights are those of latent attention."""
    scales = [name.format(module=module, x=x) for module in MODULES for x in "kv"]
    return write(directory, WEIGHTS, scales, config, architectures=[architecture])


@pytest.mark.parametrize(
    ("architecture", "name", "config", "fate"),
    [
        ("DeepseekV3ForCausalLM", MQA, COMPRESSED, "loaded"),
        ("DeepseekV3ForCausalLM", PROJ, MODELOPT, "loaded"),
        ("DeepseekV3ForCausalLM", NAMES, COMPRESSED, "dropped"),
        ("GlmMoeDsaForCausalLM", MQA, COMPRESSED, "loaded"),
        ("Glm4MoeLiteForCausalLM", PROJ, MODELOPT, "dropped"),
        ("MiniCPM3ForCausalLM", INNER, COMPRESSED, "loaded"),
        ("MiniCPM3ForCausalLM", MQA, MODELOPT, "crash"),
        ("KimiLinearForCausalLM", MQA, COMPRESSED, "dropped"),
    ],
)
def test_what_sglang_loads_spoils_its_answers(architecture, name, config, fate, tmp_path):
    found = simulated(latents(tmp_path, name, architecture, config), "sglang")
    assert (found.fate, found.is_good) == (fate, False)
    assert bool(found.problem) == (fate == "loaded")


def test_the_table_of_sglang_shows_scales_and_says_that_they_are_wrong(tmp_path):
    done = fp8kv("verify", latents(tmp_path, MQA), "--engine", "sglang")
    assert done.exit_code == 1
    assert "│ 2 of 2 │ 2 of 2 │" in lines_of(done)
    assert "SGLang stores latents (MLA) without their scales" in lines_of(done)
    assert "fp8kv strip removes them, fp8kv bake makes 1.0 right" in lines_of(done)
    done = fp8kv("verify", tmp_path, "--engine", "sglang", "--json")
    (engine,) = json.loads(done.stdout)["engines"]
    assert engine["problem"].startswith("SGLang stores latents")
    # scales of 1.0 do no harm
    file = tmp_path / "m.safetensors"
    save_file({name: tensor * 0 + 1 for name, tensor in load_file(file).items()}, file)
    found = simulated(tmp_path, "sglang")
    assert (found.is_good, found.problem) == (True, None)


@pytest.mark.parametrize("name", [NAMES, PROJ, OWN])
def test_vllm_has_no_place_for_those_of_compressed_tensors(name, tmp_path):
    found = simulated(latents(tmp_path, name), "vllm")
    assert (found.fate, found.refused, found.problem) == ("no place", None, None)
    assert {o.values for o in found.outcomes if o.letter != "q"} == {(1.0,)}


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"])
@pytest.mark.parametrize("name", [NAMES, PROJ])
def test_vllm_loads_those_of_modelopt_with_a_flag(architecture, name, tmp_path):
    directory = latents(tmp_path, name, architecture, MODELOPT)
    found = simulated(directory, "vllm")
    assert (said(directory, "vllm"), found.flag) == ("loaded with a flag", FLAG)
    assert {o.values for o in found.outcomes if o.letter != "q"} == {(0.5,)}
    done = fp8kv("verify", directory, "--engine", "vllm")
    assert done.exit_code == 0
    assert FLAG in lines_of(done)


def test_without_an_fp8_cache_in_its_config_vllm_needs_both_flags(tmp_path):
    config = MODELOPT | {"kv_cache_scheme": None}
    found = simulated(latents(tmp_path, PROJ, config=config), "vllm")
    assert found.flag == f"{FLAG} --kv-cache-dtype fp8"


@pytest.mark.parametrize("name", [MQA, OWN])
def test_names_of_the_engines_own_layers_are_dropped_by_vllm(name, tmp_path):
    found = simulated(latents(tmp_path, name, config=MODELOPT), "vllm")
    assert (found.fate, found.flag, found.is_good) == ("dropped", None, False)


# of K and V in MiniCPM3's own class; vLLM has none of Youtu's
@pytest.mark.parametrize("architecture", ["MiniCPM3ForCausalLM", "YoutuForCausalLM"])
def test_classes_that_load_by_themselves_need_no_flag(architecture, tmp_path):
    found = simulated(latents(tmp_path, NAMES, architecture, MODELOPT), "vllm")
    assert (found.is_good, found.flag) == (True, None)


def test_the_other_engines_compute_with_one_or_are_not_known(tmp_path):
    directory = latents(tmp_path, PROJ, config=MODELOPT)
    said_by = {e: said(directory, e) for e in ("tensorrt-llm", "lmdeploy", "tgi", "aphrodite")}
    assert said_by == {
        "tensorrt-llm": "1.0", "lmdeploy": "1.0", "tgi": "not known", "aphrodite": "not known",
    }  # fmt: skip
