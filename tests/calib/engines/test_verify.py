"""`fp8kv verify`: what each engine loads, also of latents and NVFP4 values, on which GPUs; what is said."""

import json
from functools import partial

import pytest
from command_line import fp8kv, json_of, ran
from families import edit_tensors
from safetensors import safe_open
from scale_directories import (
    COMPRESSED,
    MODELOPT,
    MODULES,
    NVFP4,
    PER_HEAD,
    PROJ,
    SCALES,
    WEIGHTS,
    lines_of,
    model,
    said,
    save_amax,
    scales_of,
    simulated,
    write,
)

from calib.files.names import INDEX_FILE, SCALES_SHARD


def test_engines_differ(tmp_path):
    half_right = COMPRESSED | {"kv_cache_scheme": COMPRESSED["kv_cache_scheme"] | {"type": "int"}}
    for engine, config, outcome in (
        ("vllm", COMPRESSED, "loaded"),
        ("sglang", {"quant_method": "modelopt"}, "refused"),
        ("sglang", None, "default"),
        ("aphrodite", None, "default"),
        ("aphrodite", half_right, "loaded"),
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
    printed = lines_of(ran("verify", model(tmp_path)))
    assert "vLLM 0.33.0 │ 2 of 2 │ 2 of 2 │ 1.0 │ without a flag" in printed
    assert "LMDeploy 0.10 and newer: it loads no KV scales" in printed
    assert "rules of Aphrodite, LMDeploy, TGI, TensorRT-LLM were read in the source, not run" in printed
    # one engine that does not load them is status 1
    assert fp8kv("verify", tmp_path, "--engine", "sglang", "--version", "0.5.9").exit_code == 1
    document = json_of("verify", tmp_path, "--engine", "vllm")
    assert document["good"]
    (engine,) = document["engines"]
    assert (engine["layers"][0]["values"], engine["classes"]) == ([0.5], "0.33.0")


def test_a_backend_says_which_head_sizes_it_takes_and_what_is_printed_can_be_pasted(tmp_path):
    flags, said = ("--engine", "vllm", "--backend", "CPU_ATTN"), "head size must be a multiple of 32; this"
    for head_size, is_wrong in ((16, True), (64, False)):
        directory = model(save_amax({(0, "k"): [1.0]}, tmp_path / "a b"), head_dim=head_size)
        with safe_open(directory / "model.safetensors", "pt") as file:
            weight_map = dict.fromkeys(file.keys(), "model.safetensors")
        (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
        document = json_of("verify", directory, *flags, status=is_wrong)
        assert (document["good"], said in str(document["backend"]["problems"])) == (not is_wrong, is_wrong)
        printed = lines_of(fp8kv("verify", directory, *flags))
        assert [f"clip, add --against '{directory}'" in printed, said in printed] == [True, is_wrong]


def test_statistics_are_weights_to_an_engine_that_refuses_others_and_finds_no_index(tmp_path):
    directory = model(save_amax({(0, "k"): [1.0]}, tmp_path / "model"))
    assert (said(directory, "vllm"), said(directory, "sglang")) == ("refused", "loaded")
    assert "takes fp8kv_stats.safetensors for weights; move that" in lines_of(fp8kv("verify", directory))


@pytest.mark.parametrize("backend", ["CPU_ATTN", "FLASH_ATTN", "ROCM_ATTN"])
def test_a_backend_that_takes_the_largest_of_the_heads_is_said_to(backend, tmp_path):
    copies = {"CPU_ATTN": "_k_scale_float", "ROCM_ATTN": "_k_scale_cpu"}
    line = f"{backend}: these scales are per head, and of them {copies.get(backend, '')}"
    refusal = "takes no scale per head"
    for number, (heads, config, is_per_head) in enumerate((
        ([0.5, 0.25], PER_HEAD, True),
        ([0.5], PER_HEAD, True),  # one KV head: the config decides in which backend the engine starts
        ([0.5], COMPRESSED, False),
    )):  # fmt: skip
        shape = {"num_attention_heads": 2, "num_key_value_heads": len(heads)}
        scales = {"k": [heads] * 2, "v": [heads] * 2}
        directory = model(tmp_path / str(number), **scales, config=config, **shape)
        done = fp8kv("verify", directory, "--engine", "vllm", "--backend", backend)
        needs = "per-head scales need FlashAttention 3"
        says = [text in done.stdout for text in (line, "largest alone", refusal, needs)]
        takes_largest = backend in copies and len(heads) > 1
        is_refused = backend == "ROCM_ATTN" and is_per_head
        assert says == [takes_largest, takes_largest, is_refused, is_per_head]
        assert f"{backend}: stores with" in done.stdout
        assert done.exit_code == int(is_refused)


def test_what_files_lack_or_nobody_measured_is_named(tmp_path):
    lacks, unmeasured = ("the files have no scale for", "1.0 in the files, which nobody measured")
    for number, (make, line) in enumerate((
        (partial(write, weights=WEIGHTS, scales=SCALES[:2]), f"{lacks} K and V of {MODULES[1]}: 1.0"),
        (partial(write, weights=WEIGHTS, scales=SCALES[:3]), f"{lacks} V of {MODULES[1]}: 1.0"),
        (partial(model, k=(0.5, 1.0)), f"the scale of K in layer 1 is {unmeasured}"),
        (partial(model, k=(1.0, 1.0), v=(1.0, 1.0)), ""),
    )):  # fmt: skip
        directory = tmp_path / str(number)
        directory.mkdir()
        done = fp8kv("verify", make(directory), "--engine", "vllm")
        printed = " ".join((done.stdout + done.stderr).split())
        assert line in printed
        assert [x in printed for x in (lacks, unmeasured)] == [x in line for x in (lacks, unmeasured)]
        advice = f"note: for the missing scales, fp8kv repair {directory} --stats CALIBRATION -o NEW"
        assert (advice in printed) == (lacks in line)
    # statistics that are there or were given, and not only a flag to compare with them
    directory = save_amax({(i, x): [1.0] for i in range(2) for x in "kv"}, tmp_path / "0")
    for flags in ((), ("--against", directory)):
        printed = fp8kv("verify", directory, "--engine", "sglang", *flags).stdout
        assert f"fp8kv repair {directory} --stats {directory} -o NEW" in printed
        assert "add --against" not in printed


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
        assert (found.outcomes[0].values, found.is_good) == ((0.5 * factor,), good)
        done = fp8kv("verify", tmp_path, "--engine", "vllm", "--fnuz")
        assert done.exit_code == (0 if good else 1)
        assert "on one MI300" in done.stdout
        assert ("clipped at 0.54 of absmax" in lines_of(done)) == (not good)


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


NAMES, MQA, FLAG = "{module}.{x}_scale", "{module}.attn_mqa.{x}_scale", "--model-impl transformers"


def latents(directory, name, architecture="DeepseekV3ForCausalLM", config=COMPRESSED):
    """A checkpoint whose weights are those of latent attention."""
    weights = [f"{module}.kv_b_proj.weight" for module in MODULES]
    return write(directory, weights, scales_of(MODULES, name), config, architectures=[architecture])


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
    edit_tensors(tmp_path, lambda tensors: [each.fill_(1) for each in tensors.values()], "m.safetensors")
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
        assert {o.values for o in found.outcomes if o.letter != "q"} == {(0.5 if fate == "loaded" else 1.0,)}
        done = fp8kv("verify", tmp_path, "--engine", "vllm")
        assert done.exit_code == (fate != "loaded")
        # the config turns FP8 on in transformers' code too
        assert f"│ {flag or 'without a flag'} │" in lines_of(done)
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
        assert (found.flag, found.is_good) == ("--kv-cache-dtype nvfp4", problem is None)
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
    printed = lines_of(fp8kv("verify", directory))  # the table is of an NVFP4 cache
    assert "values of an NVFP4 cache: absmax / 448 (fp8kv wrote it so)" in printed
    # SGLang needs the key beside FP8, and has a place beside NVFP4 weights
    directory = written(tmp_path / "fp8", 2688, kv_cache_quant_algo=None)
    assert "no kv_cache_quant_algo" in simulated(directory, "sglang").ignored[0][1]
    assert not simulated(directory, "sglang").is_good
    assert simulated(directory, "vllm").flag == "--kv-cache-dtype nvfp4"
    changes = {"kv_cache_quant_algo": None, "quant_algo": "NVFP4"}
    assert simulated(written(tmp_path / "nvfp4", 2688, **changes), "sglang").is_good


@pytest.mark.parametrize("true", [448, 2688])
def test_statistics_overrule_what_the_files_tell(true, tmp_path):
    scales = {"k": (0.5, 0.25), "v": (0.125, 0.0625)}
    amax = {(i, x): [value * true] for x, values in scales.items() for i, value in enumerate(values)}
    given = ("--against", save_amax(amax, tmp_path / "stats"), "--engine", "vllm")
    for told in (448, 2688, 7):
        is_right = true == 448 and told in (448, 7)
        found = json_of("verify", written(tmp_path / "made", told), *given, status=not is_right)
        assert found["nvfp4"]["divisor"] == true
        assert [fit["used"] for fit in found["against"]] == [pytest.approx({"k": 1.0, "v": 1.0})] * 2
        assert bool(found["problems"]) == (told not in (true, 7))


# ---- what was never run, or is not in use, is never called loaded: each case was run in engines' classes


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
    assert "SGLang 0.5.23 │ not known │ not known │ 1.0 │ without a flag" in lines_of(done)
    assert "not known: config.json does not name one architecture" in lines_of(done)
    (tmp_path / "model" / "config.json").unlink()
    missing = fp8kv("verify", tmp_path / "model")
    assert "config.json, which names the model's class, is missing" in lines_of(missing)


def test_a_file_of_scales_alone_is_told_from_a_model(tmp_path):
    document = {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.5, "1": 0.25}}}}
    (tmp_path / "kv_cache_scales.json").write_text(json.dumps(document | {"model_type": "llama"}))
    printed = lines_of(fp8kv("verify", tmp_path))
    assert printed.count("no tensor holds scales, only kv_cache_scales.json") == 6  # engines
    flags = "--kv-cache-dtype fp8 --quantization-param-path kv_cache_scales.json"
    assert f"serve the model with {flags}" in printed
    printed = lines_of(fp8kv("verify", tmp_path, "--engine", "vllm", "--version", "0.4.2"))
    assert "vLLM 0.4.2 │ not known │ not known │ 1.0" in printed
    assert "for other engines, put kv_cache_scales.json into a copy of the model, and" in printed
    save_amax({(i, x): [224.0] for i in range(2) for x in "kv"}, tmp_path)
    assert f"for other engines, fp8kv apply {tmp_path} MODEL -o OUTPUT" in lines_of(fp8kv("verify", tmp_path))


def test_attention_called_as_in_no_checkpoint_that_was_run(tmp_path):
    modules = [f"foo.bar.{i}.thing" for i in range(2)]
    directory = write(tmp_path, [f"{m}.qkv.weight" for m in modules], scales_of(modules))
    for engine in ("vllm", "sglang", "aphrodite", "tgi"):
        assert said(directory, engine) == "not known"
        assert modules[0] in lines_of(fp8kv("verify", directory, "--engine", engine))


def test_names_that_are_no_scales_or_of_another_letter(tmp_path):
    for ending in ("_scale ", "_SCALE"):
        scales = [*SCALES[1:], SCALES[0].removesuffix("_scale") + ending]
        directory = write(tmp_path, WEIGHTS, scales, MODELOPT)
        assert said(directory, "vllm") == said(directory, "sglang") == "refused"
        done = fp8kv("verify", directory, "--engine", "sglang")
        assert "has a V scale and no K scale" in lines_of(done)
        assert "is not a name that an engine looks for" in lines_of(done)
    # one too many beside a complete set; that vLLM does not start was run: scale_cases.py
    for stray in ("kscale", "k_scales", "value_scale", "kv-scale"):
        write(tmp_path, WEIGHTS, [*SCALES, f"{MODULES[1]}.{stray}"])
        for command in ("verify", "inspect"):
            printed = lines_of(fp8kv(command, tmp_path))
            assert f"problem: '{MODULES[1]}.{stray}' is not a name that an engine looks for" in printed
        assert (said(tmp_path, "vllm"), said(tmp_path, "sglang")) == ("refused", "loaded")
        for name, fates in {"GptOss": ("loaded", "1.0"), "Qwen3Next": ("refused", "refused")}.items():
            write(tmp_path, WEIGHTS, [*SCALES, f"{MODULES[1]}.{stray}"], architectures=[f"{name}ForCausalLM"])
            assert (said(tmp_path, "vllm"), said(tmp_path, "sglang")) == fates
    own = [*WEIGHTS, f"{MODULES[1]}.key_scale"]  # of code that comes with the model
    write(tmp_path, own, SCALES, auto_map={"AutoModel": "m.A"})
    assert "problem" not in fp8kv("inspect", tmp_path).output
    (tmp_path / "m.safetensors").rename(tmp_path / SCALES_SHARD)
    assert f"'{WEIGHTS[0]}' is not a name that" in lines_of(fp8kv("verify", tmp_path))  # in ours
    (tmp_path / SCALES_SHARD).unlink()
    # what checkpoints call other scales: AWQ of a `q`, FP8 weights, Mistral's own, attention's temperature
    others = ("q.scales", "k_proj.weight_scale", "k_proj.input_scale", "k_fake_quantizer.qscale_act")
    names = [f"{MODULES[1]}.{ending}" for ending in (*others, "logit_scale", "per_dim_scale", "scale")]
    assert "problem" not in fp8kv("verify", write(tmp_path, [*WEIGHTS, *names], SCALES)).output
    # vLLM loads those of V below k_proj, one over the other; SGLang drops them
    crossed = [f"{m}.{a}_proj.{b}_scale" for m in MODULES for a, b in ("kv", "vk")]
    directory = write(tmp_path, WEIGHTS, crossed, MODELOPT)
    assert said(directory, "vllm") == said(directory, "sglang") == "not known"
    scales = scales_of(MODULES[:1]) + scales_of(MODULES[1:], "{module}.qkv_proj.{x}_scale")
    found = simulated(write(tmp_path, WEIGHTS, scales), "sglang")
    assert (found.fate, found.is_good) == ("partly", False)


def test_layers_that_need_scales(tmp_path):
    modules = [f"model.layers.{i}.self_attn" for i in range(4)]  # one that shares K and V needs them too
    weights = [f"{m}.q_proj.weight" for m in modules] + [f"{m}.k_proj.weight" for m in modules[:2]]
    document = {"architectures": ["Gemma3nForCausalLM"], "num_kv_shared_layers": 2}
    for count, expected in ((2, "1.0"), (4, "loaded")):
        made = write(tmp_path, weights, scales_of(modules[:count]), **document)
        assert said(made, "vllm") == said(made, "sglang") == expected
    # linear attention caches no K; nor does what joins pictures to the text, though it attends
    joining = "multi_modal_projector.cross_attn.k_proj.weight"
    weights = [*WEIGHTS, "model.layers.2.linear_attn.k_proj.weight", joining]
    assert said(write(tmp_path, weights, SCALES, architectures=["OlmoHybridForCausalLM"]), "vllm") == "loaded"
    weights = [*WEIGHTS, "model.layers.2.self_attn.k_proj.weight"]  # layers that guess tokens need none
    document = {"architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 2}
    assert said(write(tmp_path, weights, SCALES, num_nextn_predict_layers=1, **document), "vllm") == "loaded"
    assert said(write(tmp_path, weights, SCALES, **document), "vllm") == "refused"


def quark(group, layers):
    output = {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
    keys = {"layer_quant_config": layers and dict.fromkeys(layers, output)}
    keys |= {"export": None if group is None else {"kv_cache_group": group}}
    return {"config": {"quant_method": "quark", **keys}}


def modelopt(**changes):
    return {"config": MODELOPT | changes}


def test_a_config_is_known_only_as_it_was_run(tmp_path):
    for changes, vllm, sglang in (
        ({"num_hidden_layers": 1}, "refused", "not known"),  # SGLang serves without the second
        ({"num_hidden_layers": 3}, "not known", "not known"),  # both serve a third of no weights
        ({"num_hidden_layers": 10**12}, "not known", "not known"),
        ({"num_hidden_layers": 0}, "refused", "refused"),
        ({"num_hidden_layers": 2.0}, "refused", "refused"),
        ({"num_hidden_layers": True}, "refused", "refused"),
        ({"num_hidden_layers": None}, "refused", "refused"),
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
    ):
        directory = write(tmp_path, WEIGHTS, SCALES, **changes)
        assert (said(directory, "vllm"), said(directory, "sglang")) == (vllm, sglang), changes
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
