"""What was never run, or is not in use, is never called loaded: classes, names, configs.

Each case was run in vLLM's and SGLang's own class; where one of them loads it, that is said.
"""

import json

import pytest
from command_line import fp8kv
from scale_directories import (
    COMPRESSED,
    MODELOPT,
    MODULES,
    PROJ,
    SCALES,
    WEIGHTS,
    lines_of,
    model,
    said,
    scales_of,
    simulated,
    write,
)

STATIC = MODELOPT["kv_cache_scheme"]
KV = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}


def test_a_class_that_nobody_knows_is_status_1_with_all_engines(tmp_path):
    for named in ([5], [""], [["LlamaForCausalLM"]], ["A", "B"], "A", []):
        outcome = simulated(model(tmp_path / "model", architectures=named), "vllm").outcomes[0]
        assert (outcome.status, outcome.values) == ("unknown", ()), named
        assert outcome.reason == "not known: config.json does not name one architecture", named
    for architectures in (["MadeUpForCausalLM"], None):
        done = fp8kv("verify", model(tmp_path / "model", architectures=architectures))
        assert done.exit_code == 1
        assert " of 2 │" not in lines_of(done)
    assert "SGLang 0.5.23 │ not known │ not known │ 1.0 │ by itself" in lines_of(done)
    assert "not known: config.json does not name one architecture" in lines_of(done)


@pytest.mark.parametrize("module", ["foo.bar.{}.thing", "language_model.model.layers.{}.self_attn"])
def test_attention_called_as_in_no_checkpoint_that_was_run(module, tmp_path):
    modules = [module.format(i) for i in range(2)]
    directory = write(tmp_path, [f"{m}.qkv.weight" for m in modules], scales_of(modules))
    for engine in ("vllm", "sglang", "aphrodite", "tgi"):
        assert said(directory, engine) == "not known"
        assert modules[0] in lines_of(fp8kv("verify", directory, "--engine", engine))


def test_a_scale_of_v_below_k_proj_is_not_known(tmp_path):
    # vLLM loads them, one over the other; SGLang drops them
    crossed = [f"{m}.{a}_proj.{b}_scale" for m in MODULES for a, b in ("kv", "vk")]
    directory = write(tmp_path, WEIGHTS, crossed, MODELOPT)
    assert said(directory, "vllm") == said(directory, "sglang") == "not known"


@pytest.mark.parametrize("ending", ["_scale ", "_SCALE"])
def test_names_that_are_no_scales_for_their_spaces_or_capitals(ending, tmp_path):
    scales = [*SCALES[1:], SCALES[0].removesuffix("_scale") + ending]
    directory = write(tmp_path, WEIGHTS, scales, MODELOPT)
    assert said(directory, "vllm") == said(directory, "sglang") == "refused"
    done = fp8kv("verify", directory, "--engine", "sglang")
    assert "has a V scale and no K scale" in lines_of(done)
    assert "is not a name that an engine looks for" in lines_of(done)


def test_scales_of_several_fates_are_partly(tmp_path):
    scales = scales_of(MODULES[:1]) + scales_of(MODULES[1:], "{module}.qkv_proj.{x}_scale")
    found = simulated(write(tmp_path, WEIGHTS, scales), "sglang")
    assert (found.fate, found.is_good) == ("partly", False)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_layer_that_shares_k_and_v_needs_scales_too(engine, tmp_path):
    modules = [f"model.layers.{i}.self_attn" for i in range(4)]
    weights = [f"{m}.q_proj.weight" for m in modules]
    weights += [f"{m}.k_proj.weight" for m in modules[:2]]
    document = {"architectures": ["Gemma3nForCausalLM"], "num_kv_shared_layers": 2}
    for count, expected in ((2, "1.0"), (4, "loaded")):
        made = write(tmp_path, weights, scales_of(modules[:count]), **document)
        assert said(made, engine) == expected


def test_linear_attention_caches_no_k_and_layers_that_guess_tokens_need_no_scales(tmp_path):
    # nor does what joins pictures to the text, though it attends
    joining = "multi_modal_projector.cross_attn.k_proj.weight"
    weights = [*WEIGHTS, "model.layers.2.linear_attn.k_proj.weight", joining]
    made = write(tmp_path, weights, SCALES, architectures=["OlmoHybridForCausalLM"])
    assert said(made, "vllm") == "loaded"
    weights = [*WEIGHTS, "model.layers.2.self_attn.k_proj.weight"]
    document = {"architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 2}
    made = write(tmp_path, weights, SCALES, num_nextn_predict_layers=1, **document)
    assert said(made, "vllm") == "loaded"
    made = write(tmp_path, weights, SCALES, **document)
    assert said(made, "vllm") == "refused"


def quark(group, layers):
    output = {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
    keys = {"layer_quant_config": layers and dict.fromkeys(layers, output)}
    keys |= {"export": None if group is None else {"kv_cache_group": group}}
    return {"config": {"quant_method": "quark", **keys}}


def modelopt(**changes):
    return {"config": MODELOPT | changes}


@pytest.mark.parametrize(
    ("changes", "vllm", "sglang"),
    [
        ({"num_hidden_layers": 1}, "refused", "not known"),  # SGLang serves without the second
        ({"num_hidden_layers": 3}, "not known", "not known"),  # both serve a third of no weights
        ({"num_hidden_layers": 10**12}, "not known", "not known"),
        ({"num_hidden_layers": 0}, "refused", "refused"),
        ({"num_hidden_layers": 2.0}, "refused", "refused"),
        ({"num_hidden_layers": True}, "refused", "refused"),
        ({"num_hidden_layers": None}, "refused", "refused"),
        ({"num_hidden_layers": [2]}, "refused", "refused"),
        ({"num_key_value_heads": 0}, "refused", "refused"),
        ({"model_type": ""}, "refused", "refused"),
        ({"model_type": 5}, "refused", "refused"),
        # the weights of a Llama
        ({"architectures": ["OPTForCausalLM"]}, "not known", "not known"),
        # settings of weights that were never run
        ({"config": COMPRESSED | {"config_groups": [1]}}, "not known", "not known"),
        ({"config": COMPRESSED | {"ignore": 3}}, "not known", "not known"),
        ({"config": COMPRESSED | {"kv_cache_scheme": None}}, "loaded with a flag", "1.0"),
        (modelopt(), "loaded", "loaded"),
        (modelopt(kv_cache_scheme=None), "loaded with a flag", "1.0"),
        (modelopt(kv_cache_scheme=None, kv_cache_quant_algo="FP8"), "loaded", "loaded"),
        (modelopt(kv_cache_scheme=STATIC | {"type": "int"}), "loaded with a flag", "1.0"),
        # with these vLLM 0.32 says "auto", a 16-bit cache; SGLang does not look at it
        (modelopt(kv_cache_scheme=STATIC | {"dynamic": True}), "loaded with a flag", "loaded"),
        (modelopt(kv_cache_scheme=STATIC | {"dynamic": None}), "loaded with a flag", "loaded"),
        (modelopt(quant_algo="NVFP4"), "loaded", "loaded"),
        (modelopt(quant_algo="NVFP4_AWQ"), "not known", "loaded"),
        (modelopt(quant_algo="FP8_PB_WO"), "loaded", "not known"),
        (modelopt(quant_algo="nonsense"), "not known", "not known"),
        (modelopt(quant_algo=["FP8"]), "not known", "not known"),
        (modelopt(quant_algo=None), "refused", "refused"),
        # vLLM reads it, SGLang does not
        (modelopt(quant_algo=None, quantization=KV), "not known", "not known"),
        (quark([], ["*k_proj"]), "loaded with a flag", "loaded with a flag"),
        (quark([], None), "refused", "refused"),
        (quark(None, ["*k_proj"]), "refused", "refused"),
        # by pattern an entry is enough
        (quark(["*k_proj", "*v_proj"], ["*k_proj"]), "loaded with a flag", "refused"),
    ],
)
def test_a_config_is_known_only_as_it_was_run(changes, vllm, sglang, tmp_path):
    directory = write(tmp_path, WEIGHTS, SCALES, **changes)
    assert (said(directory, "vllm"), said(directory, "sglang")) == (vllm, sglang)
    if "config" not in changes:
        assert {said(directory, engine) for engine in ("aphrodite", "tgi")} <= {"not known", "refused"}
    if changes == modelopt(quant_algo="nonsense"):  # it promises no cache
        printed = lines_of(fp8kv("verify", directory, "--engine", "vllm"))
        assert "│ not known │ not known │ 1.0 │ --kv-cache-dtype fp8 │" in printed


def test_modelopts_own_file_is_read_by_its_producer(tmp_path):
    directory = model(tmp_path, names=PROJ, config=None)
    for producer, algorithms, *expected in (
        ("modelopt", KV, "loaded", "loaded"),
        ("modelopt", {"quant_algo": "FP8"}, "loaded with a flag", "1.0"),
        # vLLM does not start, SGLang loads
        ("other", KV, "not known", "not known"),
    ):
        document = {"producer": {"name": producer}, "quantization": algorithms}
        (directory / "hf_quant_config.json").write_text(json.dumps(document))
        assert [said(directory, "vllm"), said(directory, "sglang")] == expected
