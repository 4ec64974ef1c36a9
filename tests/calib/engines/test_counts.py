"""Scales of a wrong number, or beside measured absmax: a problem for every engine, and none converts them."""

import json
import math
import re
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from command_line import fp8kv, json_of, one_line_error, ran
from families import edit_tensors
from safetensors.torch import load_file, save_file
from scale_directories import MODULES, PER_HEAD, WEIGHTS, lines_of, model, save_amax, simulated
from torch import tensor
from transformers import AutoConfig

from calib.engines.scale_fit import Limits, MeasuredAmax, compare, judge
from calib.files.cache_type import FP8_MAX, FP8_SMALLEST
from calib.files.config import ONE_PER_QUERY_HEAD, head_counts, text_config
from calib.files.stored_scales import StoredLayer, read_scales
from calib.scales.stats_file import load_stats
from fp8kv_runtime.fp8 import FP8_DTYPES

sys.path.append(str(Path(__file__).parents[2] / "interop"))
from scale_cases import CASES, write_case

ENGINES = ("vllm", "aphrodite", "sglang", "tgi", "tensorrt-llm", "lmdeploy")
KV, QUERY = [0.5, 0.25], [0.5, 0.25, 0.125, 1.0]


def with_tensors(made, values, *names):
    more = {f"{module}.{name}": tensor(values) for module in MODULES for name in names}
    edit_tensors(made, lambda tensors: tensors.update(more))
    return made


def test_wrong_counts_are_a_problem_with_every_engine(tmp_path):
    latent = {"kv_lora_rank": 8, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    too_many = "K has 4 scales in layers 0, 1 (one per query head), but the model"
    for k, v, q, problem in (
        (KV, KV, QUERY, None),
        ([0.5], [0.25], None, None),
        (KV, [0.25], None, None),
        (QUERY, KV, None, f"{too_many} has 2 KV heads"),
        (QUERY, [0.5], None, f"{too_many} caches latents (MLA), which have one scale"),
        (KV, [0.5, 0.25, 0.5], None, "V has 3 scales in layers 0, 1, but the model has 2 KV heads"),
        (KV, KV, KV, "Q has 2 scales in layers 0, 1 (one per KV head), but the model has 4 query heads"),
        (KV, KV, QUERY * 2, "Q has 8 scales in layers 0, 1, but the model has 4 query heads"),
    ):
        document = latent if "latents" in str(problem) else {}
        directory = model(tmp_path / "model", k=[k, k], v=[v, v], config=PER_HEAD, **document)
        if q:
            with_tensors(directory, q, "q_scale")
        problems = json_of("verify", directory, status=bool(problem))["problems"]
        assert [problem in each for each in problems] == [True] * bool(problem)
        if not problem:
            per_head = ["vllm", "aphrodite"] + ["tgi"] * (len(k) == len(v) == 1)
            assert [engine for engine in ENGINES if simulated(directory, engine).is_good] == per_head
        else:
            assert problem in lines_of(fp8kv("inspect", directory))
            command = ("convert", directory, "--to", "tgi", "--reduce", "max", "--without-q")
            one_line_error(fp8kv(*command, "-o", tmp_path / "out"), problem, "calibrate")


def test_what_vllm_takes_of_too_many_is_predicted(tmp_path):
    """For two KV heads; `make interop` compares these cases with vLLM itself."""
    for name, letter, values in (
        ("per head, K scales of query heads", "k", (0.04, 0.05)),
        ("per head, three K scales", "k", (0.02, 0.03)),
        ("per head, V scales of query heads", "v", (0.04, 0.05)),
        ("per head, eight query scales", "q", (0.05, 0.07)),
    ):
        directory = write_case(next(case for case in CASES if case.name == name), tmp_path / name)
        for ranks in (1, 2, 4):
            found = simulated(directory, "vllm", ranks=ranks)
            held = next(o.values for o in found.outcomes if o.letter == letter)
            copies = max(1, ranks // 2)  # two ranks hold one head
            assert held == pytest.approx([value for value in values for _ in range(copies)])


def test_heads_are_those_that_the_config_names(tmp_path):
    for document, good in (
        # every other layer of Gemma 4 and MiMo-V2-Flash has other KV heads
        ({"num_global_key_value_heads": 1, "num_key_value_heads": 2}, {1, 2}),
        ({"swa_num_key_value_heads": 4, "num_key_value_heads": 2}, {1, 2, 4}),
        # which of the two layers has which number is known
        ({"per_layer_config": {"1": {"num_key_value_heads": 4}}}, {1}),
        ({"swa_num_key_value_heads": 4, "layer_types": ["sliding_attention"] * 2}, {1, 4}),
        ({"multi_query": True, "num_kv_heads": 4, "num_key_value_heads": None}, {1}),
        ({"num_key_value_heads": None}, {1, 4}),
        ({"attn_config": {"kv_n_heads": 2}, "num_key_value_heads": None}, {1, 2}),
        # where the key is absent, Mistral has 8 and GLM-4 has 2: not known
        ({"num_key_value_heads": None, "model_type": "mistral"}, {1, 2, 3, 4}),
        ({"num_key_value_heads": None, "model_type": "falcon", "multi_query": False}, {1, 4}),
        ({"num_key_value_heads": None, "num_attention_heads": None}, {1, 2, 3, 4}),
    ):
        for count in range(1, 5):
            directory = model(tmp_path, k=[[0.5] * count] * 2, config=PER_HEAD, **document)
            assert (not read_scales(directory).misread) == (count in good), (document, count)


def test_absent_is_not_null():
    config = {"model_type": "glm4", "num_attention_heads": 32}
    assert head_counts(config, "k") == set()
    assert head_counts(config | {"num_key_value_heads": None}, "k") == {32}
    # DeciLM, whose layers differ
    other = {"num_key_value_heads": None, "block_configs": [{"attention": {"n_heads_in_group": 8}}]}
    assert head_counts(config | other, "k") == set()
    per_layer = {"num_key_value_heads_per_layer": [4, 4]}
    assert head_counts(config | {"model_type": "deci"} | per_layer, "k") == set()


def test_scales_of_heads_of_an_unknown_number_are_no_problem(tmp_path):
    unknown = {"model_type": "glm4", "architectures": ["Glm4ForCausalLM"], "num_key_value_heads": None}
    directory = model(tmp_path / "model", [KV] * 2, [KV] * 2, config=PER_HEAD, **unknown)
    done = fp8kv("verify", directory, "--engine", "vllm")
    assert "config.json does not say how many KV heads there are" in lines_of(done)
    assert "problem:" not in lines_of(done)
    ran("convert", directory, "--to", "vllm", "-o", tmp_path / "out")
    assert read_scales(tmp_path / "out").layers[1].k == tuple(KV)


def test_classes_that_name_no_kv_heads_are_listed_and_have_one_per_query_head():
    """By transformers: no setting for them, or one that follows the query heads."""
    for model_type in ONE_PER_QUERY_HEAD:
        config = AutoConfig.for_model(model_type, num_attention_heads=6, hidden_size=96).to_dict()
        config |= config.get("attn_config") or {}
        named = {k: v for k, v in config.items() if "head" in k and ("kv" in k or "key_value" in k)}
        assert set(named.values()) <= {6}, model_type
        assert "multi_query" not in config, model_type
    files = Path(__file__).parents[3].glob("tools/engine_classes/architectures/*.json")
    documents = [json.loads(file.read_text()) for file in files]
    documents = [document.get("thinker_config") or document for document in documents]
    texts = [document | (document.get("llm_config") or text_config(document)) for document in documents]
    settings = re.compile(r"(?=.*head).*(kv|key_value)|num_attention_groups")
    without = {text["model_type"] for text in texts if not any(settings.match(key) for key in text)}
    assert without
    assert without <= {*ONE_PER_QUERY_HEAD}


def test_scales_beside_offsets_that_are_not_0_are_a_problem_and_go_with_them(tmp_path):
    """VLLM drops zero points, and does not start with ModelOpt's biases of an affine cache."""
    for name in ("k_zero_point", "q_zero_point", "k_proj.k_bias", "v_proj.v_bias"):
        assert read_scales(with_tensors(model(tmp_path / "none"), [0.0], name)).misread == []
        directory = with_tensors(model(tmp_path / "some"), [3.0], name)
        (said,) = read_scales(directory).misread
        assert said.startswith(f"'{MODULES[0]}.{name}' is not 0, and 1 more: scales are for values less")
    command = ("convert", directory, "--to", "tgi", "-o", tmp_path / "out")
    one_line_error(fp8kv(*command), "v_bias' is not 0, and 1 more", "calibrate the model again")
    assert fp8kv("strip", directory, "-o", tmp_path / "plain").exit_code == 0
    assert {n for f in (tmp_path / "plain").glob("*.safetensors") for n in load_file(f)} == {*WEIGHTS}


AMAX = {"k": ([9.0, 30.0], [4.0, 12.0]), "v": ([2.0, 0.5], [3.0, 1.5])}  # of two layers and heads
SMALLEST = FP8_SMALLEST["e4m3fn"]
TIMES_448_240 = {"k": (14 / 15, 7 / 15), "v": (7 / 30, 7 / 60)}


def measured(directory, k=(0.5, 0.25), v=(0.125, 0.0625)):
    """Statistics whose absmax is 448 times the given scales."""
    scales = {(i, x): scale for x, layers in {"k": k, "v": v}.items() for i, scale in enumerate(layers)}
    return save_amax({key: [1.0, 448 * scale] for key, scale in scales.items()}, directory)


def test_scales_are_compared_with_measured_absmax(tmp_path):
    against = measured(tmp_path / "measured")
    for scales, status, said in (
        ({}, 0, "Measured absmax"),
        ({"k": (0.5, 0.249)}, 0, "Measured absmax"),
        ({"k": (0.5, 0.125)}, 1, "problem: 1 layer clips what was measured, layer 1 the most: its"),
        ({"k": (math.nan, 0.125)}, 1, "problem: 1 layer clips what was measured, layer 1 the most: its"),
        ({"k": (0.125, 0.0625), "v": (0.5, 0.25)}, 1, "they are swapped"),
        ({"k": (0.9, 0.5), "v": (0.2, 0.125)}, 1, "fit the measured absmax of the layer before"),
        ({"k": (0.25, 0.1), "v": (0.0625, 0.2)}, 1, "fit the measured absmax of the next layer"),
        (TIMES_448_240, 1, "is 448 / 240 times absmax / 448"),
        (TIMES_448_240 | {"kv_cache_torch_dtype": "float8_e4m3fnuz"}, 0, "Measured absmax"),
        ({"k": (0.25, 0.125), "v": (0.0625, 0.03125)}, 1, "every scale is half of absmax / 448"),
    ):
        done = fp8kv("verify", model(tmp_path / "model", **scales), "--against", against)
        printed = lines_of(done)
        assert done.exit_code == status, scales
        assert said in printed
        assert ("problem:" in printed) == status


def judged(factors, change=lambda scale: scale, amax=AMAX, *, per_head=True):
    """The problems and the warnings of true scales, each changed, times the factors of its two layers."""
    layers = [StoredLayer(i) for i in (0, 1)]
    for x, layer in product("kv", layers):
        heads, factor = amax[x][layer.layer], factors.get(x, (1, 1))[layer.layer]
        right = [(a or max(heads)) / 448 for a in (heads if per_head else [max(heads)])]
        setattr(layer, x, tuple(change(scale) * factor for scale in right))
    measured = {(i, x): tuple(each) for x, both in amax.items() for i, each in enumerate(both)}
    _, findings = judge(layers, MeasuredAmax(measured, 1.0, [], {}), Limits(448.0, SMALLEST))
    return ([each.text for each in findings if each.is_problem == kind] for kind in (True, False))


def test_a_layer_that_has_only_one_of_both_says_which():
    for scales, amax, words in ((2, 1, "scales, and no statistics"), (1, 2, "statistics, and no scales")):
        measured = {(i, x): (224.0,) for i in range(amax) for x in "kv"}
        layers = [StoredLayer(i, (0.5,), (0.5,)) for i in range(scales)]
        _, findings = judge(layers, MeasuredAmax(measured, 1.0, [], {}), Limits(448.0, SMALLEST))
        assert [finding.text for finding in findings] == [f"layer 1 has {words}"]


def test_what_rounding_to_bfloat16_takes_off_a_scale_is_no_clipping():
    for factor, count in ((1 / 1.0045, 0), (1 / 1.0055, 1)):
        problems, warnings = judged({"k": (factor, 1)})
        assert (len(problems), warnings) == (count, []), factor


@pytest.mark.parametrize("per_head", [False, True])
def test_scales_that_are_too_large(per_head):
    for factors, change, problem, warning in (
        # headroom may be 16, rounded to bfloat16
        ({"k": (16, 16), "v": (16.05, 16)}, float, None, None),
        ({"k": (1e3, 30)}, float, None, "K uses under 1/16 of the FP8 range in layers 0, 1, 0.1% in layer 0"),
        ({"v": (1, 20)}, float, None, "V uses under 1/16 of the FP8 range in layer 1, 5%: scales"),
        (dict.fromkeys("kv", (100, 100)), float, "V scales are all 100 times absmax / 448 in layers", None),
        ({}, lambda s: 1 / s, "V scales look like 1/scale (448 / absmax) in layers 0, 1", None),
        ({}, lambda s: 448 * s, "K scales look like absmax itself, not divided by 448,", None),
        ({"k": (1, 1.5e7)}, float, "K becomes all zeros in layer 1: scales are too large, 4.02e+05, ", None),
    ):
        problems, warnings = judged(factors, change, per_head=per_head)
        assert (problem in " ".join(problems)) if problem else not problems
        assert (warning in " ".join(warnings)) if warning else not warnings


def test_one_head_of_many_is_seen():
    amax = AMAX | {"k": ([400.0, 0.4], [4.0, 0.0])}

    def spoiled(factor):
        return [*judged({}, lambda scale: scale * factor if scale == 0.4 / 448 else scale, amax)]

    assert spoiled(1) == [[], []]
    problems, (warning,) = spoiled(100)
    assert not problems
    assert warning.startswith("K uses under 1/16 of the FP8 range in layer 0, 1%: scales")
    (problem,), _ = spoiled(1e6)
    assert problem.startswith("K becomes all zeros in layer 0: scales are too large, 893, where absmax")


@pytest.mark.parametrize("name", FP8_MAX)
def test_a_value_at_which_all_becomes_zero_is_that_of_the_type(name):
    dtype, half = FP8_DTYPES[name], torch.tensor([FP8_SMALLEST[name] / 2])
    above = torch.nextafter(half, torch.ones(1))
    assert [float(half.to(dtype)), float(above.to(dtype))] == [0, FP8_SMALLEST[name]]
    assert FP8_MAX[name] == torch.finfo(dtype).max
    for amax, zero in ((SMALLEST, ["k"]), (1.0001 * SMALLEST, [])):  # over a scale of 2: half of it
        (fit,) = compare([StoredLayer(0, (2.0,))], {(0, "k"): (amax,)}, Limits(1, SMALLEST))
        assert fit.zero == zero


def test_statistics_that_prove_nothing_are_refused(tmp_path):
    foreign = measured(tmp_path / "foreign")
    report = {"fp8kv_calibration": 1, "model": "m", "checkpoint": "c", "weights": "w", "warnings": []}
    report["layers"] = [
        {"module": name, "k_amax": float(layer.k.amax.max()), "v_amax": float(layer.v.amax.max())}
        for name, layer in load_stats(foreign).layers.items()
    ]
    report |= {"config": {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}}
    counts = dict.fromkeys(("documents", "samples", "tokens", "unread_tokens"), 1)
    report |= {"dataset": counts | {"source": "s", "fingerprint": "f"}, "threads": None, "versions": {}}
    (foreign / "fp8kv_calibration.json").write_text(json.dumps(report))
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    for statistics, message in (
        (foreign, "is of another model: its config says model_type gemma"),
        (tmp_path / "x.safetensors", "is not a fp8kv_stats.safetensors of a version that this fp8kv reads"),
        ("/nowhere", "'/nowhere' does not exist"),
    ):
        one_line_error(fp8kv("verify", model(tmp_path / "model"), "--against", statistics), message)
