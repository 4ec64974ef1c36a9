"""Scales of latents (MLA): what arrives in which engine, and where that makes answers wrong."""

import pytest
from command_line import fp8kv
from safetensors.torch import load_file, save_file
from scale_directories import COMPRESSED, MODELOPT, MODULES, PROJ, lines_of, said, scales_of, simulated, write

WEIGHTS = [f"{module}.kv_b_proj.weight" for module in MODULES]
NAMES, MQA = "{module}.{x}_scale", "{module}.attn_mqa.{x}_scale"
FLAG = "--model-impl transformers"
AUTO = MODELOPT | {"kv_cache_scheme": None}  # it names no FP8 cache


def latents(directory, name, architecture="DeepseekV3ForCausalLM", config=COMPRESSED):
    """A checkpoint whose weights are those of latent attention."""
    return write(directory, WEIGHTS, scales_of(MODULES, name), config, architectures=[architecture])


def test_the_table_of_sglang_shows_scales_and_says_that_they_are_wrong(tmp_path):
    done = fp8kv("verify", latents(tmp_path, MQA), "--engine", "sglang")
    assert done.exit_code == 1
    assert "│ 2 of 2 │ 2 of 2 │" in lines_of(done)
    assert "SGLang stores latents (MLA) without their scales" in lines_of(done)
    assert "fp8kv strip removes them, fp8kv bake makes 1.0 right" in lines_of(done)
    found = simulated(tmp_path, "sglang")
    assert (found.fate, found.is_good) == ("loaded", False)
    assert found.problem.startswith("SGLang stores latents")
    # scales of 1.0 do no harm
    file = tmp_path / "m.safetensors"
    save_file({name: tensor * 0 + 1 for name, tensor in load_file(file).items()}, file)
    found = simulated(tmp_path, "sglang")
    assert (found.is_good, found.problem) == (True, None)


@pytest.mark.parametrize(
    ("architecture", "name", "config", "fate", "flag"),
    [
        ("DeepseekV3ForCausalLM", NAMES, COMPRESSED, "no place", None),
        ("DeepseekV3ForCausalLM", MQA, MODELOPT, "dropped", None),  # the engine's own layers are called so
        # transformers' code in vLLM loads them
        ("DeepseekV3ForCausalLM", PROJ, MODELOPT, "loaded", FLAG),
        ("Glm4MoeLiteForCausalLM", NAMES, MODELOPT, "loaded", FLAG),
        ("DeepseekV3ForCausalLM", PROJ, AUTO, "loaded", f"{FLAG} --kv-cache-dtype fp8"),
        # of K and V in MiniCPM3's own class; vLLM has none of Youtu's
        ("MiniCPM3ForCausalLM", NAMES, MODELOPT, "loaded", None),
        ("YoutuForCausalLM", NAMES, MODELOPT, "loaded", None),
    ],
)
def test_vllm_loads_those_of_modelopt_and_some_with_a_flag(architecture, name, config, fate, flag, tmp_path):
    found = simulated(latents(tmp_path, name, architecture, config), "vllm")
    assert (found.fate, found.flag, found.is_good) == (fate, flag, fate == "loaded")
    assert (found.refused, found.problem) == (None, None)
    values = {o.values for o in found.outcomes if o.letter != "q"}
    assert values == {(0.5 if fate == "loaded" else 1.0,)}
    done = fp8kv("verify", tmp_path, "--engine", "vllm")
    assert done.exit_code == (fate != "loaded")
    assert (flag or "by itself") in lines_of(done)


def test_the_other_engines_compute_with_one_or_are_not_known(tmp_path):
    directory = latents(tmp_path, PROJ, config=MODELOPT)
    assert [said(directory, engine) for engine in ("tensorrt-llm", "lmdeploy")] == ["1.0"] * 2
    assert [said(directory, engine) for engine in ("tgi", "aphrodite")] == ["not known"] * 2
