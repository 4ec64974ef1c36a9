"""`fp8kv verify`: engines whose rules are data, legacy JSON, measured absmax, exit status."""

import json

import pytest
import torch
from command_line import fp8kv, one_line_error
from measured_amax import save_amax
from safetensors.torch import save_file
from scale_directories import COMPRESSED, GOOD, lines_of, model

from calib.engines.catalogue import find_engine, load_catalogue
from calib.engines.simulate_loading import simulate
from calib.files.model_directory import open_model_directory


def measured(directory, k=(0.5, 0.25), v=(0.125, 0.0625)):
    """Statistics whose absmax is 448 times the given scales."""
    amax = {
        (i, x): torch.tensor([[448 * scale, 1.0], [2.0, 3.0]]).clamp(max=448 * scale)
        for x, scales in {"k": k, "v": v}.items()
        for i, scale in enumerate(scales)
    }
    return save_amax(amax, directory)


def test_every_rule_file_is_read():
    engines = load_catalogue()
    assert {engine.name for engine in engines.values()} == {
        *("vllm", "aphrodite", "sglang", "tgi", "tensorrt-llm", "lmdeploy"),
    }
    assert all(name == f"{engine.name}-{engine.since}" for name, engine in engines.items())
    assert {"vllm-0.4.1", "sglang-0.5.0"} <= engines.keys()
    ran = [name for name, engine in engines.items() if engine.ran]
    assert ran == ["sglang-0.5.23", "vllm-0.23", "vllm-0.33"]


@pytest.mark.parametrize(
    ("engine", "config", "outcome"),
    [
        ("vllm", COMPRESSED, "loaded"),
        ("vllm", None, "refused"),
        ("sglang", COMPRESSED, "loaded"),
        ("sglang", {"quant_method": "modelopt", "quant_algo": "FP8"}, "default"),
        ("sglang", {"quant_method": "modelopt"}, "refused"),
        ("sglang", {"quant_method": "fp8"}, "loaded"),
        ("sglang", None, "default"),
        ("aphrodite", COMPRESSED, "loaded"),
        ("aphrodite", None, "default"),
        ("tgi", None, "loaded"),
        ("tgi", COMPRESSED, "loaded"),
        ("tensorrt-llm", COMPRESSED, "default"),
        ("lmdeploy", None, "default"),
    ],
)
def test_engines_differ(engine, config, outcome, tmp_path):
    directory = open_model_directory(model(tmp_path, config=config), weights=False)
    found = simulate(directory, find_engine(engine))
    statuses = {each.status for each in found.outcomes if each.letter != "q"}
    assert (statuses or {"refused"}) == {outcome}
    assert bool(found.refused) == (outcome == "refused")


def test_the_command_says_what_each_engine_loads(tmp_path):
    done = fp8kv("verify", model(tmp_path))
    assert done.exit_code == 0
    printed = lines_of(done)
    assert "vLLM 0.33.0 │ 2 of 2 │ 2 of 2 │ 1.0 │ by itself" in printed
    assert "LMDeploy 0.10 and newer: it loads no KV scales" in printed
    assert "rules of Aphrodite, LMDeploy, TGI, TensorRT-LLM were read in the source, not run" in printed


def test_an_engine_that_does_not_load_them_is_status_1(tmp_path):
    assert fp8kv("verify", model(tmp_path), "--engine", "vllm").exit_code == 0
    assert fp8kv("verify", tmp_path, "--engine", "sglang", "--version", "0.5.9").exit_code == 1
    document = json.loads(fp8kv("verify", tmp_path, "--engine", "vllm", "--json").stdout)
    assert document["good"]
    assert document["engines"][0]["layers"][0]["values"] == [0.5]


def test_bad_scales_are_status_1_even_where_they_load(tmp_path):
    done = fp8kv("verify", model(tmp_path, k=(0.0, 0.5)), "--engine", "vllm")
    assert done.exit_code == 1
    assert "problem: K scales are zero in layer 0" in lines_of(done)


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
    cache = {"dtype": changes.get("dtype", "float8_e4m3fn"), "scaling_factor": scales}
    document = {"model_type": changes.get("model_type", "llama"), "kv_cache": cache}
    document = {key: value for key, value in document.items() if value is not None}
    directory = open_model_directory(
        model(tmp_path, k=None, v=None, config=None, json_file=document), weights=False
    )
    found = simulate(directory, find_engine("vllm", "0.4.2"))
    assert {each.status for each in found.outcomes} == {"default" if why else "loaded"}
    assert len(found.outcomes) == 4
    assert (why is None) == (not found.ignored)
    assert why is None or why in found.ignored[0][1]


@pytest.mark.parametrize(
    ("scales", "problem"),
    [
        ({}, None),
        ({"k": (0.5, 0.125)}, "1 layers clip what was measured, layer 1 the most: its"),
        ({"k": (0.5, 0.251)}, None),
        ({"k": (0.125, 0.0625), "v": (0.5, 0.25)}, "they are swapped"),
        ({"k": (0.9, 0.5), "v": (0.2, 0.125)}, "fit the measured absmax of the layer before"),
        ({"k": (0.25, 0.1), "v": (0.0625, 0.2)}, "fit the measured absmax of the next layer"),
        ({"k": (14 / 15, 7 / 15), "v": (7 / 30, 7 / 60)}, "is 448 / 240 times absmax / 448"),
        ({"k": (0.25, 0.125), "v": (0.0625, 0.03125)}, "every scale is half of absmax / 448"),
    ],
)  # fmt: skip
def test_scales_are_compared_with_measured_absmax(scales, problem, tmp_path):
    directory = model(tmp_path / "model", **scales)
    statistics = measured(tmp_path / "measured")
    done = fp8kv("verify", directory, "--engine", "vllm", "--against", statistics)
    printed = lines_of(done)
    assert done.exit_code == (1 if problem else 0)
    assert (problem in printed) if problem else "problem" not in printed
    assert "Measured absmax" in printed


def test_scales_for_fnuz_are_compared_with_what_fnuz_holds(tmp_path):
    scales = {
        x: [448 / 240 * scale for scale in s] for x, s in {"k": (0.5, 0.25), "v": (0.125, 0.0625)}.items()
    }
    directory = model(tmp_path / "model", **scales, kv_cache_torch_dtype="float8_e4m3fnuz")
    statistics = measured(tmp_path / "measured")
    done = fp8kv("verify", directory, "--engine", "tgi", "--against", statistics, "--json")
    assert done.exit_code == 0, done.stdout
    fits = json.loads(done.stdout)["against"]
    assert [fit["used"] for fit in fits] == [pytest.approx({"k": 1, "v": 1})] * 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_statistics_that_are_no_numbers_prove_nothing(value, tmp_path):
    statistics = measured(tmp_path / "measured", k=(0.5, value))
    flags = ("--engine", "vllm", "--against", statistics)
    one_line_error(fp8kv("verify", model(tmp_path / "model"), *flags), "layers.1.self_attn K: NaN or Inf")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--engine", "vlm"), "--engine vlm is not one of aphrodite, lmdeploy, sglang"),
        (("--version", "0.23"), "of which engine? Add --engine"),
        (("--engine", "vllm", "--version", "0.10"), "no rules hold for vLLM 0.10; there are some for 0.4"),
        (("--engine", "vllm", "--version", "0.22"), "0.4.2, on ROCm; 0.23 to 0.32; 0.33 and newer"),
        (("--engine", "vllm", "--version", "new"), "is not a version such as 0.23.1"),
        (("--engine", "vllm", "--version", "9" * 5000), "is not a version such as 0.23.1"),
        (("--engine", "tgi", "--version", "9"), "no rules hold for TGI 9; there are some for 2.4 to 3.3"),
        (("--engine", "tgi", "--version", "0.1"), "no rules hold for TGI 0.1; there are some for 2.4"),
        (("--engine", "aphrodite", "--version", "99"), "hold for Aphrodite 99; there are some for 0.20"),
        (("--engine", "sglang", "--version", "0.1"), "hold for SGLang 0.1; there are some for 0.5"),
        (("--engine", "lmdeploy", "--version", "0.1"), "hold for LMDeploy 0.1; there are some for 0.10"),
        (("--engine", "tensorrt-llm", "--version", "0.1"), "hold for TensorRT-LLM 0.1; there are some for"),
        (("--against", "/nowhere"), "'/nowhere' does not exist"),
    ],
)  # fmt: skip
def test_bad_flags_are_one_line(flags, message, tmp_path):
    one_line_error(fp8kv("verify", model(tmp_path), *flags), message)


def test_rules_that_were_read_and_load_scales_hold_for_no_version_to_come():
    for name, rules in load_catalogue().items():
        loads = {method.kind for method in rules.methods.values()} != {"none"}
        assert rules.since, name
        assert rules.until or rules.classes or not loads, name


@pytest.mark.parametrize(
    ("engine", "version", "known"),
    [
        ("vllm", "v0.32.0+cpu", True),
        ("vllm", "0.32", True),
        ("vllm", "0.32.0rc1", False),
        ("vllm", "0.32.0.post1", False),
        ("vllm", "0.33.0", True),
        ("vllm", "0.33.0.dev20+g0123abc", False),
        ("sglang", "0.5.24rc1", False),
        # before 0.5.23, whose config it does not read
        ("sglang", "0.5.23rc1", False),
    ],
)
def test_versions_as_engines_write_them(engine, version, known, tmp_path):
    done = fp8kv("verify", model(tmp_path), "--engine", engine, "--version", version)
    assert done.exit_code == (0 if known else 1), done.stderr
    assert version in lines_of(done)


def test_statistics_of_another_model_prove_nothing(tmp_path):
    statistics = measured(tmp_path / "measured")
    said = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}
    report = {"fp8kv_calibration": 1, "model": "m", "checkpoint": "c", "warnings": [], "layers": []}
    report |= {"config": said, "dataset": {"source": "s", "samples": 1, "tokens": 1}}
    (tmp_path / "measured" / "fp8kv_calibration.json").write_text(json.dumps(report))
    done = fp8kv("verify", model(tmp_path / "model"), "--against", statistics)
    one_line_error(done, "is of another model: its config says model_type gemma")


def test_json_says_at_what_version_classes_ran(tmp_path):
    done = fp8kv("verify", model(tmp_path), "--engine", "vllm", "--json")
    assert json.loads(done.stdout)["engines"][0]["classes"] == "0.33.0"


def test_an_output_without_statistics_cannot_be_compared_with(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    done = fp8kv("verify", model(tmp_path / "model"), "--against", tmp_path / "x.safetensors")
    one_line_error(done, "is not a fp8kv_stats.safetensors of a version that this fp8kv reads")


def test_the_page_about_engines_is_that_of_the_rules():
    from engines_page import PAGE, page

    assert PAGE.read_text() == page(), "make engines-page"


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_newer_file_sets_all_that_the_older_one_sets(name):
    """A file begins as a copy of the one before; what is lost on the way would be a broken command."""
    versions = [engine for engine in load_catalogue().values() if engine.name == name and engine.ran]
    older = [engine.model_dump(exclude_defaults=True).keys() - {"until"} for engine in versions[:-1]]
    assert all(keys <= versions[-1].model_dump(exclude_defaults=True).keys() for keys in older)


def test_rules_of_loading_in_vllm_0_33_are_those_that_were_run_in_0_32():
    of_loading = {"reads", "without_config", "unknown", "methods", "remap", "first_remap", "nvfp4", "latent"}
    old, new = (load_catalogue()[name].model_dump(include=of_loading) for name in ("vllm-0.23", "vllm-0.33"))
    assert old == new
