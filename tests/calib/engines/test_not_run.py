"""What was never run, or is not in use, is never called loaded: classes, names, configs.

Each case was run in vLLM's and SGLang's own class; where one of them loads it, that is said.
"""

import json

import pytest
from command_line import fp8kv
from loading import SCALES, WEIGHTS, said, write
from scale_directories import COMPRESSED, NAMES, lines_of, model

from calib.engines.catalogue import find_engine, load_catalogue
from calib.engines.simulate_loading import simulate
from calib.files.model_directory import open_model_directory

SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": SCHEME}
KV = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
PROJ = "{module}.{x}_proj.{x}_scale"


# ---- classes ----


@pytest.mark.parametrize("architectures", [["MadeUpForCausalLM"], None])
def test_a_class_that_nobody_knows_is_status_1_with_all_engines(architectures, tmp_path):
    done = fp8kv("verify", model(tmp_path, architectures=architectures))
    assert done.exit_code == 1
    assert " of 2 │" not in lines_of(done)


@pytest.mark.parametrize("named", [[5], [None], [""], [["LlamaForCausalLM"]], ["A", "B"], "A", []])
def test_what_names_no_class(named, tmp_path):
    directory = write(tmp_path, WEIGHTS, SCALES, architectures=named)
    assert "does not name one architecture" in lines_of(fp8kv("verify", directory))


def test_rules_that_were_read_name_the_classes_that_they_were_read_for():
    for name, rules in load_catalogue().items():
        reads = [m.kind for m in (*rules.methods.values(), rules.without_method) if m]
        if rules.reads == "json" or {*reads} > {"none"} or "none" not in reads:
            assert rules.classes or rules.architectures, name


# ---- names ----


@pytest.mark.parametrize("engine", ["vllm", "sglang", "aphrodite", "tgi"])
@pytest.mark.parametrize("module", ["foo.bar.{}.thing", "language_model.model.layers.{}.self_attn"])
def test_attention_called_as_in_no_checkpoint_that_was_run(engine, module, tmp_path):
    modules = [module.format(i) for i in range(2)]
    scales = [NAMES.format(module=m, x=x) for m in modules for x in "kv"]
    directory = write(tmp_path, [f"{m}.qkv.weight" for m in modules], scales)
    assert said(directory, engine) == "not known"
    assert modules[0] in lines_of(fp8kv("verify", directory, "--engine", engine))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("architecture", "module", "expected"),
    [
        ("LlavaForConditionalGeneration", "language_model.model.layers.0.self_attn", "loaded"),
        ("LlavaForConditionalGeneration", "model.layers.0.self_attn", "not known"),
    ],
)
def test_names_belong_to_a_class(engine, architecture, module, expected, tmp_path):
    scales = [NAMES.format(module=module, x=x) for x in "kv"]
    made = write(tmp_path, [f"{module}.k_proj.weight"], scales, architectures=[architecture])
    assert said(made, engine) == expected


@pytest.mark.parametrize(
    "name",
    ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Llava", "Gemma3", "Mistral3", "InternVL", "PaliGemma"],
)
@pytest.mark.parametrize("prefix", ["language_model.model", "model.language_model"])
def test_vllm_knows_models_that_see_by_the_names_that_transformers_gave_them(name, prefix, tmp_path):
    modules = [f"{prefix}.layers.{i}.self_attn" for i in range(2)]
    scales = [NAMES.format(module=m, x=x) for m in modules for x in "kv"]
    weights = [f"{m}.k_proj.weight" for m in modules]
    # what joins pictures to the text attends too
    weights += ["multi_modal_projector.cross_attn.k_proj.weight"]
    architectures = [f"{name}ForConditionalGeneration"]
    assert said(write(tmp_path, weights, scales, architectures=architectures), "vllm") == "loaded"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_scale_of_v_below_k_proj_is_not_known(engine, tmp_path):
    # vLLM loads them, one over the other; SGLang drops them
    modules = [f"model.layers.{i}.self_attn" for i in range(2)]
    crossed = [f"{m}.{a}_proj.{b}_scale" for m in modules for a, b in ("kv", "vk")]
    directory = write(tmp_path, [f"{m}.k_proj.weight" for m in modules], crossed, MODELOPT)
    assert said(directory, engine) == "not known"


@pytest.mark.parametrize("ending", [" ", "\t", "_SCALE"])
def test_names_that_are_no_scales_for_their_spaces_or_capitals(ending, tmp_path):
    scales = [*SCALES[1:], SCALES[0].removesuffix("_scale" * (ending == "_SCALE")) + ending]
    directory = write(tmp_path, WEIGHTS, scales, MODELOPT)
    assert said(directory, "vllm") == said(directory, "sglang") == "refused"
    done = fp8kv("verify", directory, "--engine", "sglang")
    assert "has a V scale and no K scale" in lines_of(done)
    assert "is not a name that an engine looks for" in lines_of(done)


def test_linear_attention_caches_no_k(tmp_path):
    weights = [*WEIGHTS, "model.layers.2.linear_attn.k_proj.weight"]
    made = write(tmp_path, weights, SCALES, architectures=["OlmoHybridForCausalLM"])
    assert said(made, "vllm") == "loaded"


# ---- layers that share K and V ----


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("architecture", ["Gemma4ForCausalLM", "Gemma3nForCausalLM"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_layer_that_shares_k_and_v_needs_scales_too(engine, architecture, count, tmp_path):
    modules = [f"model.layers.{i}.self_attn" for i in range(4)]
    weights = [f"{m}.q_proj.weight" for m in modules]
    weights += [f"{m}.k_proj.weight" for m in modules[:2]]
    name = next(n for n in (NAMES, "{module}.attn.{x}_scale") if _loads(engine, architecture, n))
    scales = [name.format(module=m, x=x) for m in modules[:count] for x in "kv"]
    made = write(tmp_path, weights, scales, architectures=[architecture], num_kv_shared_layers=2)
    assert said(made, engine) == ("loaded" if count == 4 else "1.0")


def _loads(engine, architecture, name):
    return find_engine(engine).classes.results[architecture]["compressed-tensors"][name] == "loaded"


# ---- configs ----


@pytest.mark.parametrize(
    ("changes", "vllm", "sglang"),
    [
        ({}, "loaded", "loaded"),
        ({"kv_cache_scheme": None}, "loaded with a flag", "1.0"),
        ({"kv_cache_scheme": None, "kv_cache_quant_algo": "FP8"}, "loaded", "loaded"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "int"}}, "loaded with a flag", "1.0"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "loaded with a flag", "1.0"),
        ({"quant_algo": "NVFP4"}, "loaded", "loaded"),
        ({"quant_algo": "NVFP4_AWQ"}, "not known", "loaded"),
        ({"quant_algo": "FP8_PB_WO"}, "loaded", "not known"),
        # both refuse them
        ({"quant_algo": "W4A8_AWQ"}, "not known", "not known"),
        ({"quant_algo": "INT4_AWQ"}, "not known", "not known"),
        ({"quant_algo": "nonsense"}, "not known", "not known"),
        ({"quant_algo": ["FP8"]}, "not known", "not known"),
        ({"quant_algo": None}, "refused", "refused"),
        # vLLM reads it, SGLang does not
        ({"quant_algo": None, "quantization": KV}, "not known", "not known"),
    ],
)
def test_modelopt(changes, vllm, sglang, tmp_path):
    directory = model(tmp_path, names=PROJ, config=MODELOPT | changes)
    assert (said(directory, "vllm"), said(directory, "sglang")) == (vllm, sglang)


def test_a_config_that_is_not_known_promises_no_cache(tmp_path):
    config = MODELOPT | {"quant_algo": "nonsense"}
    printed = lines_of(fp8kv("verify", model(tmp_path, config=config), "--engine", "vllm"))
    assert "│ not known │ not known │ 1.0 │ --kv-cache-dtype fp8 │" in printed


@pytest.mark.parametrize(
    ("producer", "algorithms", "vllm", "sglang"),
    [
        ("modelopt", KV, "loaded", "loaded"),
        ("modelopt", {"quant_algo": "FP8"}, "loaded with a flag", "1.0"),
        # vLLM does not start, SGLang loads
        ("other", KV, "not known", "not known"),
        (None, KV, "not known", "not known"),
    ],
)
def test_modelopts_own_file_is_read_by_its_producer(producer, algorithms, vllm, sglang, tmp_path):
    directory = model(tmp_path, names=PROJ, config=None)
    document = {"producer": {"name": producer}, "quantization": algorithms}
    (directory / "hf_quant_config.json").write_text(json.dumps(document))
    assert (said(directory, "vllm"), said(directory, "sglang")) == (vllm, sglang)


def test_compressed_tensors_without_a_scheme_need_the_flag(tmp_path):
    directory = model(tmp_path, config=COMPRESSED | {"kv_cache_scheme": None})
    assert (said(directory, "vllm"), said(directory, "sglang")) == ("loaded with a flag", "1.0")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "aphrodite"])
@pytest.mark.parametrize("missing", ["export", "layer_quant_config", None])
def test_quark_needs_its_keys(engine, missing, tmp_path):
    config = {"quant_method": "quark", "export": {"kv_cache_group": []}, "layer_quant_config": {}}
    config.pop(missing, None)
    assert said(model(tmp_path, config=config), engine) == ("refused" if missing else "loaded with a flag")


# ---- words ----


def test_scales_of_several_fates_are_partly(tmp_path):
    modules = [f"model.layers.{i}.self_attn" for i in range(2)]
    names = [NAMES, "{module}.qkv_proj.{x}_scale"]
    scales = [n.format(module=m, x=x) for n, m in zip(names, modules, strict=True) for x in "kv"]
    directory = write(tmp_path, [f"{m}.k_proj.weight" for m in modules], scales)
    found = simulate(open_model_directory(directory, weights=False), find_engine("sglang"))
    assert (found.fate, found.is_good) == ("partly", False)
