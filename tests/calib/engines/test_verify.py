"""`fp8kv verify`: what each engine loads, also of latents and NVFP4 values, on which GPUs; what is said."""

import json

import pytest
from command_line import fp8kv, ran
from measured_amax import save_amax
from safetensors.torch import load_file, save_file
from scale_directories import (
    COMPRESSED,
    MODELOPT,
    MODULES,
    NVFP4,
    PER_HEAD,
    PROJ,
    lines_of,
    model,
    said,
    scales_of,
    simulated,
    write,
)

HALF_RIGHT = COMPRESSED | {"kv_cache_scheme": COMPRESSED["kv_cache_scheme"] | {"type": "int"}}


def test_engines_differ(tmp_path):
    for engine, config, outcome in (
        ("vllm", COMPRESSED, "loaded"),
        ("vllm", None, "refused"),
        ("vllm", HALF_RIGHT, "refused"),
        ("sglang", COMPRESSED, "loaded"),
        ("sglang", {"quant_method": "modelopt"}, "refused"),
        ("sglang", {"quant_method": "fp8"}, "loaded"),
        ("sglang", None, "default"),
        ("aphrodite", None, "default"),
        ("aphrodite", HALF_RIGHT, "loaded"),
        ("tgi", None, "loaded"),
        ("tgi", COMPRESSED, "loaded"),
        ("tensorrt-llm", COMPRESSED, "default"),
        ("lmdeploy", None, "default"),
    ):
        found = simulated(model(tmp_path, config=config), engine)
        statuses = {each.status for each in found.outcomes if each.letter != "q"}
        assert (statuses or {"refused"}) == {outcome}, (engine, config)
        assert bool(found.refused) == (outcome == "refused")


def test_the_command_says_what_each_engine_loads(tmp_path):
    done = ran("verify", model(tmp_path))
    printed = lines_of(done)
    assert "vLLM 0.33.0 │ 2 of 2 │ 2 of 2 │ 1.0 │ by itself" in printed
    assert "LMDeploy 0.10 and newer: it loads no KV scales" in printed
    assert "rules of Aphrodite, LMDeploy, TGI, TensorRT-LLM were read in the source, not run" in printed
    # one engine that does not load them is status 1
    assert fp8kv("verify", tmp_path, "--engine", "sglang", "--version", "0.5.9").exit_code == 1
    document = json.loads(ran("verify", tmp_path, "--engine", "vllm", "--json").stdout)
    assert document["good"]
    (engine,) = document["engines"]
    assert engine["layers"][0]["values"] == [0.5]
    assert engine["classes"] == "0.33.0"
    # so are bad scales, even where they load
    done = fp8kv("verify", model(tmp_path, k=(0.0, 0.5)), "--engine", "vllm")
    assert done.exit_code == 1
    assert "problem: K scales are zero in layer 0" in lines_of(done)


def test_heads_are_split_over_ranks(tmp_path):
    of_heads, shared = ([0.5, 0.25], [0.125, 1.0]), ([0.5], [0.25])
    for ranks, scales, expected in (
        (1, of_heads, (0.5, 0.25)),
        (2, of_heads, (0.5, 0.25)),
        # fewer KV heads than ranks: each is held twice
        (4, of_heads, (0.5, 0.5, 0.25, 0.25)),
        # one value for two heads: broadcast on one GPU, nothing left for the second rank
        (1, shared, (0.5, 0.5)),
        (2, shared, None),
        (3, of_heads, None),
    ):
        found = simulated(model(tmp_path, k=scales, v=scales, config=PER_HEAD), "vllm", ranks=ranks)
        assert bool(found.refused) == (expected is None)
        assert expected is None or found.outcomes[0].values == expected
    assert "4 query heads and 2 KV heads cannot be split evenly over 3 GPUs" in found.refused


def test_scales_are_doubled_where_fp8_ends_at_240_or_it_is_said(tmp_path):
    for config, factor, good in ((MODELOPT, 2.0, True), (COMPRESSED, 1.0, False)):
        found = simulated(model(tmp_path, config=config), "vllm", fnuz=True)
        assert found.outcomes[0].values == (0.5 * factor,)
        assert found.is_good == good
        done = fp8kv("verify", tmp_path, "--engine", "vllm", "--fnuz")
        assert done.exit_code == (0 if good else 1)
        assert "on one MI300" in done.stdout
        assert ("clipped at 0.54 of absmax" in lines_of(done)) == (not good)
    assert "on one GPU" in fp8kv("verify", tmp_path, "--engine", "vllm", "--fnuz", "--no-fnuz").stdout


def test_legacy_json_is_thrown_away_whole(tmp_path):
    def loaded(scales, ranks=1, model_type="llama", dtype="float8_e4m3fn"):
        document = {"kv_cache": {"dtype": dtype, "scaling_factor": scales}}
        document |= {"model_type": model_type} if model_type else {}
        model(tmp_path, k=None, v=None, config=None, json_file=document)
        return simulated(tmp_path, "vllm", "0.4.2", ranks=ranks)

    first = {"0": 0.5, "1": 0.25}
    both = {"0": first, "1": {"0": 0.125, "1": 1.0}}
    for why, found in (
        ("no model_type", loaded({"0": first}, model_type=None)),
        ("its model_type is 'qwen', the model's 'llama'", loaded({"0": first}, model_type="qwen")),
        ("its dtype is 'fp8'", loaded({"0": first}, dtype="fp8")),
        ("it is for 2 ranks, not for 1", loaded(both)),
        ("it is for 2 ranks, not for 4", loaded(both, ranks=4)),
        ("it is for 1 ranks", loaded({"1": first})),
        ("layer 1 is missing", loaded({"0": {"0": 0.5}})),
        ("layer 2 is missing or too many", loaded({"0": first | {"2": 0.5}})),
    ):
        assert [each.status for each in found.outcomes] == ["default"] * 4
        assert why in found.ignored[0][1]
    found = loaded({"0": first})
    assert [each.status for each in found.outcomes] == ["loaded"] * 4
    assert not found.ignored
    assert loaded(both, ranks=2).outcomes[0].values == (0.5, 0.125)


WEIGHTS = [f"{module}.kv_b_proj.weight" for module in MODULES]
NAMES, MQA = "{module}.{x}_scale", "{module}.attn_mqa.{x}_scale"
FLAG = "--model-impl transformers"


def latents(directory, name, architecture="DeepseekV3ForCausalLM", config=COMPRESSED):
    """A checkpoint whose weights are those of latent attention."""
    return write(directory, WEIGHTS, scales_of(MODULES, name), config, architectures=[architecture])


def test_the_table_of_sglang_shows_scales_of_latents_and_says_that_they_are_wrong(tmp_path):
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


def test_vllm_loads_latents_of_modelopt_and_some_with_a_flag(tmp_path):
    no_cache = MODELOPT | {"kv_cache_scheme": None}  # it names no FP8 cache
    for family, name, config, fate, flag in (
        ("DeepseekV3", NAMES, COMPRESSED, "no place", None),
        ("DeepseekV3", MQA, MODELOPT, "dropped", None),  # the engine's own layers are called so
        # transformers' code in vLLM loads them
        ("DeepseekV3", PROJ, MODELOPT, "loaded", FLAG),
        ("DeepseekV3", PROJ, no_cache, "loaded", f"{FLAG} --kv-cache-dtype fp8"),
        # of K and V in MiniCPM3's own class; vLLM has none of Youtu's
        ("MiniCPM3", NAMES, MODELOPT, "loaded", None),
        ("Youtu", NAMES, MODELOPT, "loaded", None),
    ):
        found = simulated(latents(tmp_path, name, f"{family}ForCausalLM", config), "vllm")
        assert (found.fate, found.flag, found.is_good) == (fate, flag, fate == "loaded")
        assert (found.refused, found.problem) == (None, None)
        values = {o.values for o in found.outcomes if o.letter != "q"}
        assert values == {(0.5 if fate == "loaded" else 1.0,)}
        done = fp8kv("verify", tmp_path, "--engine", "vllm")
        assert done.exit_code == (fate != "loaded")
        assert (flag or "by itself") in lines_of(done)


def test_the_other_engines_compute_latents_with_one_or_are_not_known(tmp_path):
    directory = latents(tmp_path, PROJ, config=MODELOPT)
    for engine, expected in {"tensorrt-llm": "1.0", "lmdeploy": "1.0", "tgi": "not known"}.items():
        assert said(directory, engine) == expected, engine


def written(directory, divisor, **changes):
    producer = {"name": "fp8kv", "nvfp4_kv_divisor": divisor}
    return model(directory, names=PROJ, config=NVFP4 | {"producer": producer} | changes)


def test_an_engine_wants_one_of_two_conventions(tmp_path):
    for engine, divisor, problem in (
        ("vllm", 448, None),
        ("vllm", 2688, "6 times too small"),
        ("sglang", 2688, None),
        ("sglang", 448, "6 times too large"),
        ("vllm", 7, "not known"),
    ):
        found = simulated(written(tmp_path / "made", divisor), engine)
        assert {outcome.status for outcome in found.outcomes if outcome.letter != "q"} == {"loaded"}
        assert found.flag == "--kv-cache-dtype nvfp4"
        assert found.is_good == (problem is None)
        assert str(problem) in str(found.problem)
        if divisor != 7 and problem:
            out, to = tmp_path / engine, found.problem.rsplit(" ", 1)[1]
            ran("convert", tmp_path / "made", "--to", to, "-o", out)
            assert simulated(out, engine).is_good, "the way out is ours"


def test_of_engines_and_methods_that_were_not_run_with_nvfp4_nothing_is_known(tmp_path):
    directory = written(tmp_path / "modelopt", 448)
    for engine in ("aphrodite", "tgi", "tensorrt-llm"):
        found = simulated(directory, engine)
        assert {outcome.status for outcome in found.outcomes} == {"unknown"}, engine
        assert not found.is_good
    found = simulated(written(tmp_path / "fp8", 448, quant_method="fp8"), "vllm")
    assert "never run under fp8" in found.outcomes[0].reason
    # the table is of an NVFP4 cache
    said = lines_of(fp8kv("verify", directory))
    assert "NVFP4 cache" in said
    assert "values of an NVFP4 cache: absmax / 448 (fp8kv wrote it so)" in said


def test_sglang_needs_the_key_of_nvfp4_beside_fp8(tmp_path):
    directory = written(tmp_path / "fp8", 2688, kv_cache_quant_algo=None)
    found = simulated(directory, "sglang")
    assert not found.is_good
    assert "no kv_cache_quant_algo" in found.ignored[0][1]
    assert simulated(directory, "vllm").flag == "--kv-cache-dtype nvfp4"
    # and has a place beside NVFP4 weights
    changes = {"kv_cache_quant_algo": None, "quant_algo": "NVFP4"}
    assert simulated(written(tmp_path / "nvfp4", 2688, **changes), "sglang").is_good


@pytest.mark.parametrize("true", [448, 2688])
def test_statistics_overrule_what_the_files_tell(true, tmp_path):
    scales = {"k": (0.5, 0.25), "v": (0.125, 0.0625)}
    amax = {(i, x): [value * true] for x, values in scales.items() for i, value in enumerate(values)}
    given = ("--against", save_amax(amax, tmp_path / "stats"), "--engine", "vllm", "--json")
    for told in (448, 2688, 7):
        done = fp8kv("verify", written(tmp_path / "made", told), *given)
        found = json.loads(done.stdout)
        assert found["nvfp4"]["divisor"] == true
        assert [fit["used"] for fit in found["against"]] == [pytest.approx({"k": 1.0, "v": 1.0})] * 2
        assert (done.exit_code == 0) == (true == 448 and told in (448, 7))
        assert bool(found["problems"]) == (told not in (true, 7))
