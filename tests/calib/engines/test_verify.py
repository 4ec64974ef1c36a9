"""`fp8kv verify`: what each engine loads, on one GPU, on several, and on MI300; what is printed."""

import json

import pytest
from command_line import fp8kv, ran
from scale_directories import COMPRESSED, PER_HEAD, lines_of, model, simulated

HALF_RIGHT = COMPRESSED | {"kv_cache_scheme": COMPRESSED["kv_cache_scheme"] | {"type": "int"}}
GOOD = {"0": {"0": 0.5, "1": 0.25}}


@pytest.mark.parametrize(
    ("engine", "config", "outcome"),
    [
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
    ],
)
def test_engines_differ(engine, config, outcome, tmp_path):
    found = simulated(model(tmp_path, config=config), engine)
    statuses = {each.status for each in found.outcomes if each.letter != "q"}
    assert (statuses or {"refused"}) == {outcome}
    assert bool(found.refused) == (outcome == "refused")


def test_the_command_says_what_each_engine_loads(tmp_path):
    done = ran("verify", model(tmp_path))
    printed = lines_of(done)
    assert "vLLM 0.33.0 │ 2 of 2 │ 2 of 2 │ 1.0 │ by itself" in printed
    assert "LMDeploy 0.10 and newer: it loads no KV scales" in printed
    assert "rules of Aphrodite, LMDeploy, TGI, TensorRT-LLM were read in the source, not run" in printed
    # one engine that does not load them is status 1
    assert fp8kv("verify", tmp_path, "--engine", "vllm").exit_code == 0
    assert fp8kv("verify", tmp_path, "--engine", "sglang", "--version", "0.5.9").exit_code == 1
    document = json.loads(fp8kv("verify", tmp_path, "--engine", "vllm", "--json").stdout)
    assert document["good"]
    (engine,) = document["engines"]
    assert engine["layers"][0]["values"] == [0.5]
    assert engine["classes"] == "0.33.0"
    # so are bad scales, even where they load
    done = fp8kv("verify", model(tmp_path, k=(0.0, 0.5)), "--engine", "vllm")
    assert done.exit_code == 1
    assert "problem: K scales are zero in layer 0" in lines_of(done)


@pytest.mark.parametrize(
    ("ranks", "scales", "expected"),
    [
        (1, ([0.5, 0.25], [0.125, 1.0]), (0.5, 0.25)),
        (2, ([0.5, 0.25], [0.125, 1.0]), (0.5, 0.25)),
        # fewer KV heads than ranks: each is held twice
        (4, ([0.5, 0.25], [0.125, 1.0]), (0.5, 0.5, 0.25, 0.25)),
        # one value for two heads: broadcast on one GPU, nothing left for the second rank
        (1, ([0.5], [0.25]), (0.5, 0.5)),
        (2, ([0.5], [0.25]), None),
        (3, ([0.5, 0.25], [0.125, 1.0]), None),
    ],
)
def test_heads_are_split_over_ranks(ranks, scales, expected, tmp_path):
    found = simulated(model(tmp_path, k=scales, v=scales, config=PER_HEAD), "vllm", ranks=ranks)
    assert bool(found.refused) == (expected is None)
    assert expected is None or found.outcomes[0].values == expected
    if ranks == 3:
        assert "4 query heads and 2 KV heads cannot be split evenly over 3 GPUs" in found.refused


@pytest.mark.parametrize(
    ("config", "factor", "good"),
    [({"quant_method": "modelopt", "quant_algo": "FP8"}, 2.0, True), (COMPRESSED, 1.0, False)],
)
def test_scales_are_doubled_where_fp8_ends_at_240_or_it_is_said(config, factor, good, tmp_path):
    found = simulated(model(tmp_path, config=config), "vllm", fnuz=True)
    assert found.outcomes[0].values == (0.5 * factor,)
    assert found.is_good == good
    done = fp8kv("verify", tmp_path, "--engine", "vllm", "--fnuz")
    assert done.exit_code == (0 if good else 1)
    assert "on one MI300" in done.stdout
    assert "on one GPU" in fp8kv("verify", tmp_path, "--engine", "vllm", "--fnuz", "--no-fnuz").stdout
    assert ("clipped at 0.54 of absmax" in lines_of(done)) == (not good)


@pytest.mark.parametrize(
    ("changes", "scales", "why"),
    [
        ({}, GOOD, None),
        ({"model_type": None}, GOOD, "no model_type"),
        ({"model_type": "qwen"}, GOOD, "its model_type is 'qwen', the model's 'llama'"),
        ({"dtype": "fp8"}, GOOD, "its dtype is 'fp8'"),
        ({}, GOOD | {"1": GOOD["0"]}, "it is for 2 ranks, not for 1"),
        ({}, {"1": GOOD["0"]}, "it is for 1 ranks"),
        ({}, {"0": {"0": 0.5}}, "layer 1 is missing"),
        ({}, {"0": {**GOOD["0"], "2": 0.5}}, "layer 2 is missing or too many"),
    ],
)
def test_legacy_json_is_thrown_away_whole(changes, scales, why, tmp_path):
    found = simulated(of_json(tmp_path, scales, **changes), "vllm", "0.4.2")
    assert {each.status for each in found.outcomes} == {"default" if why else "loaded"}
    assert len(found.outcomes) == 4
    assert (why is None) == (not found.ignored)
    assert why is None or why in found.ignored[0][1]


def test_legacy_json_must_be_for_as_many_ranks(tmp_path):
    directory = of_json(tmp_path, {"0": GOOD["0"], "1": {"0": 0.125, "1": 1.0}})
    assert simulated(directory, "vllm", "0.4.2", ranks=2).outcomes[0].values == (0.5, 0.125)
    assert {o.status for o in simulated(directory, "vllm", "0.4.2", ranks=4).outcomes} == {"default"}


def of_json(directory, scales, model_type="llama", dtype="float8_e4m3fn"):
    document = {"model_type": model_type, "kv_cache": {"dtype": dtype, "scaling_factor": scales}}
    document = {key: value for key, value in document.items() if value is not None}
    return model(directory, k=None, v=None, config=None, json_file=document)
