"""Scales of any tool in a directory: what is read, said or refused; the layers that it leaves in 16 bits."""

import json
import logging
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from command_line import fp8kv, json_of, one_line_error, ran
from safetensors.torch import save_file
from scale_directories import CONFIG, MODELOPT, NVFP4, PROJ, lines_of, model, save_amax

from calib.engines.scale_fit import measured_convention
from calib.errors import InputError, NoScalesError, UnsupportedExportError
from calib.files.cache_type import nvfp4_convention
from calib.files.model_directory import open_model_directory
from calib.files.names import layer_of, parse_scale_name
from calib.files.skipped_layers import skipped_layers
from calib.files.stored_scales import is_usable, read_scales
from calib.formats.card import render_card
from calib.scales.stats_file import load_stats
from calib.serving import plugin
from calib.serving.vllm_engine import watch_arguments

LAYER = "model.layers.{}.self_attn"
QUANTISED = sorted((Path(__file__).parents[2] / "golden" / "quantized").glob("*/*"))


def write(directory, tensors, *, index=None, config=None, file="model.safetensors"):
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / file)
    if index is not None:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text(json.dumps(config or {}))
    return directory


def layers(k=0.02, v=0.01, count=2, **more):
    made = {}
    for i in range(count):
        for x, value in {"k": k, "v": v, **more}.items():
            made[f"{LAYER.format(i)}.{x}_scale"] = torch.tensor([value]).flatten()
    return made


@pytest.mark.parametrize("case", QUANTISED, ids=lambda path: path.name)
def test_attention_is_found_by_its_codes(case, tmp_path):
    (tmp_path / "model.safetensors").symlink_to(case / "model.safetensors")
    assert open_model_directory(tmp_path, weights=False).modules == {LAYER.format(i) for i in range(2)}


def test_scales_are_found_by_layer(tmp_path):
    seeing = {f"vision_tower.{name}": 3 * scale for name, scale in layers().items()}
    found = read_scales(write(tmp_path, seeing | layers([0.5, 0.25], 0.125)))
    assert [(layer.layer, layer.k, layer.v, layer.q) for layer in found.layers] == [
        (0, (0.5, 0.25), (0.125,), None),
        (1, (0.5, 0.25), (0.125,), None),
    ]
    assert (found.strategy, found.formats, found.problems) == ("attn_head", ["compressed-tensors"], [])
    save_file(layers([0.5, 0.25], 0.125, count=1), tmp_path / "again.safetensors")
    assert any("2 scales are there twice" in problem for problem in read_scales(tmp_path).problems)


def test_attention_modules_that_cache(tmp_path):
    # what sees or hears has no cache; a layer with queries alone shares K and V
    names = ["vision_tower.encoder.layers.0.self_attn.k_proj", "audio_tower.layers.1.self_attn.k_proj"]
    names += ["model.visual.blocks.3.attn.qkv", "model.layers.0.cross.q_proj"]
    names += [f"{LAYER.format(0)}.k_proj", *(f"{LAYER.format(i)}.q_proj" for i in range(3))]
    index = {f"{name}.weight": "model.safetensors" for name in names}
    # the last is in the index alone
    directory = write(tmp_path, {name: torch.ones(1) for name in [*index][:-1]}, index=index)
    assert open_model_directory(directory, weights=False).modules == {LAYER.format(i) for i in range(3)}


def test_a_scale_of_both_is_the_larger_and_gives_way(tmp_path):
    both = {f"{LAYER.format(0)}.kv_scale": torch.tensor(0.5)}
    (layer,) = read_scales(write(tmp_path, both | layers(count=1, k=0.25, v=0.5))).layers
    assert (layer.k, layer.v) == ((0.25,), (0.5,))
    own, of_both = (f"'{LAYER.format(0)}.{name}' in model.safetensors" for name in ("k_scale", "kv_scale"))
    said = f"two values for the K and V scale of layer 0: 0.25 as {own} and 0.5 as {of_both}"
    with pytest.raises(InputError, match=re.escape(said)):
        read_scales(write(tmp_path, both | layers(count=1, k=0.25, v=0.125)))
    # of equal values the most precise is taken, whatever its file
    for file in ("aa.safetensors", "zz.safetensors"):
        directory = write(tmp_path / file[:2], layers(count=1))
        save_file({name: scale.bfloat16() for name, scale in layers(count=1).items()}, directory / file)
        (layer,) = read_scales(directory).layers
        assert layer.k == (pytest.approx(0.02, rel=1e-6),)
    # nor may a listed file hold another value
    index = dict.fromkeys(layers(count=1), "model.safetensors") | {"model.norm.weight": "old.safetensors"}
    directory = write(tmp_path, layers(count=1), index=index)
    for other in (0.5, [0.02, 0.02]):
        save_file(layers(k=other, count=1), tmp_path / "old.safetensors")
        with pytest.raises(InputError, match="two values for the K scale of layer 0: 0.02 as .* in mod"):
            read_scales(directory)
    modules = [f"{LAYER.format(0)}.{i}" for i in (0, 1)]  # of several modules in a layer each has a value
    tensors = {f"{name}.kv_b_proj.weight": torch.ones(1) for name in modules}
    tensors |= {f"{name}.k_scale": torch.tensor(0.5 + i) for i, name in enumerate(modules)}
    with pytest.raises(InputError, match="layers with several attention modules .as LongCat."):
        read_scales(write(tmp_path / "several", tensors))


def test_a_json_file_beside_tensors_holds_the_larger(tmp_path):
    directory = write(tmp_path, layers(k=0.02, v=0.01))

    def write_json(scale):
        ranks = {"0": {"0": scale, "1": 0.004}, "1": {"0": 0.01, "1": scale}}
        (directory / "kv_cache_scales.json").write_text(json.dumps({"kv_cache": {"scaling_factor": ranks}}))

    write_json(0.02)
    assert read_scales(directory).layers[0].v == (pytest.approx(0.01),)
    write_json(0.05)
    with pytest.raises(InputError, match="of layer 0 .and of 1 more.: 0.02 as .* and 0.05 in kv_"):
        read_scales(directory)


def test_what_no_engine_can_use_is_a_problem(tmp_path):
    for scales, message in (
        (layers(k=float("nan")), "K scales are NaN in layers 0, 1"),
        (layers(v=float("inf")), "V scales are infinite in layers 0, 1"),
        (layers(k=0.0, count=1), "K scales are zero in layer 0"),
        (layers(k=-0.5, count=12), "K scales are negative in layers 0, 1, 2, 3, 4, 5, 6, 7 and 4"),
        (layers(q=1e-33), "Q scales look like memory that nobody wrote"),
        (layers(q=7e20), "Q scales look like memory that nobody wrote"),
        (layers(k=1.0), "K scales are all 1.0: nothing was measured"),
        (layers(v=1.0), "V scales are all 1.0: nothing was measured"),
        ({k: t for k, t in layers().items() if "v_" not in k}, "a K scale and no V scale in layers 0, 1"),
        ({k: t for k, t in layers().items() if "k_" not in k}, "a V scale and no K scale in layers 0, 1"),
    ):
        (problem,) = read_scales(write(tmp_path, scales)).problems
        assert message in problem
        assert is_usable((1e-20, 1e6)), "the extremes that a model may need"


def test_a_shard_that_is_not_in_the_index_is_a_problem(tmp_path):
    save_file({"model.norm.weight": torch.ones(1)}, tmp_path / "model-1.safetensors")
    index = {"model.norm.weight": "model-1.safetensors"}
    directory = write(tmp_path, layers(), index=index, file="scales.safetensors")
    (problem,) = read_scales(directory, strict=False).problems
    assert problem.startswith("scales.safetensors holds 4 scales and is not in the index")
    assert len(read_scales(directory, strict=False).layers) == 2
    with pytest.raises(NoScalesError, match="only in scales.safetensors, which model.safetensors.i"):
        read_scales(directory)


def test_json_that_says_nothing_is_one_line(tmp_path):
    cases = (
        ("config.json", '{"a": 1, "a": 2}'),
        ("model.safetensors.index.json", '{"weight_map": {"x": "../x.safetensors"}}'),
        ("model.safetensors.index.json", '{"weight_map": []}'),
        ("kv_cache_scales.json", '{"kv_cache": {"scaling_factor": []}}'),
        ("kv_cache_scales.json", '{"kv_cache": {"scaling_factor": {"0": {"x": 1}}}}'),
        ("kv_cache_scales.json", '{"kv_cache": {"scaling_factor": {"0": {"0": "1"}}}}'),
        ("kv_cache_scales.json", json.dumps({"kv_cache": {"scaling_factor": {"0": {"0": 10**400}}}})),
        ("hf_quant_config.json", "{"),
    )
    for i, (name, text) in enumerate(cases):
        directory = write(tmp_path / f"{i}", layers())
        (directory / name).write_text(text)
        one_line_error(fp8kv("inspect", directory), name)


def test_inspect_prints_a_row_per_layer_and_draws_a_picture(tmp_path):
    one_line_error(fp8kv("inspect", write(tmp_path, {"x": torch.ones(1)})), "int8_per_token_head, need none")
    facts = {"model": "m", "kind": "type turboquant_4bit_nc", "serve": "vllm serve \x1b[31m OUT"}
    needless = write(tmp_path / "needless", {"x": torch.ones(1)})
    (needless / "README.md").write_text(f"---\na: b\n---\n\n{render_card('as_it_is', **facts)}\n---\n# m\n")
    done = fp8kv("verify", needless)
    serve = (
        "its cache, type turboquant_4bit_nc, needs none; serve it with vllm serve \N{REPLACEMENT CHARACTER}"
    )
    one_line_error(done, f"'{needless}' holds no KV-cache scales: {serve}[31m OUT")
    one_line_error(fp8kv("inspect", tmp_path / "nothing"), "is not a directory")
    done = ran("inspect", write(tmp_path, layers([0.5, 0.25], 0.125, q=3.0)))
    assert "2 layers, attn_head; names of compressed-tensors" in done.stdout
    assert "0.25 to 0.5 (2)" in done.stdout
    assert json_of("inspect", tmp_path)["layers"][1]["q"] == [3.0]
    weights = {f"{LAYER.format(i)}.k_proj.weight": torch.ones(1) for i in range(4)}
    for count, words in ((2, ["layers 2, 3 have"]), (3, ["layer 3 has"]), (4, [])):
        shown = ran("inspect", write(tmp_path, weights | layers(count=count))).stdout
        assert re.findall("note: (.*) no scales", shown) == words
        assert json_of("inspect", tmp_path)["layers_without_scales"] == [*range(count, 4)]
    # names cannot steer a terminal
    done = fp8kv("inspect", write(tmp_path, {"model.layers.0.\x1b[31mred.k_scale": torch.zeros(1)}))
    assert "\x1b" not in done.stdout
    directory = write(tmp_path / "model", layers([0.5, 0.25], 0.125))
    for suffix in ("png", "svg"):
        ran("inspect", directory, "--plot", tmp_path / suffix / f"scales.{suffix}")
        assert (tmp_path / suffix / f"scales.{suffix}").stat().st_size > 5000
    one_line_error(fp8kv("inspect", directory, "--plot", tmp_path / "x.txt"), "ends with .png")
    done = fp8kv("inspect", directory, "--plot", directory / "config.json" / "x.png")
    one_line_error(done, f"cannot write '{directory}/config.json/x.png'", "Not a directory")


ATTENTION = "model.layers.7.self_attn"


def test_a_scale_is_known_and_what_is_none_is_left_alone():
    for name, letters, dialect in (
        (f"{ATTENTION}.q_scale", "q", "compressed-tensors"),
        (f"{ATTENTION}.attn.v_scale", "v", "compressed-tensors"),
        (f"{ATTENTION}.kv_scale", "kv", "kv_scale"),
        (f"{ATTENTION}.v_proj.v_scale", "v", "modelopt"),
        ("language_model.model.layers.7.self_attn.qkv_proj.k_scale", "k", "fused"),
        (f"{ATTENTION}.k_proj.output_scale", "k", "quark"),
        (f"{ATTENTION}.q_proj.output_scale", "q", "quark"),
        (f"{ATTENTION}.k_cache.scale", "k", "hy"),
        (f"{ATTENTION}.q.scale", "q", "hy"),
        ("transformer.layers.7.attention.kv_cache_scaling_factor", "kv", "tensorrt-llm"),
        ("transformer.layers.7.attention.v_cache_scaling_factor", "v", "tensorrt-llm"),
        ("transformer.h.7.attn.k_scale", "k", "compressed-tensors"),
    ):
        found = parse_scale_name(name)
        assert (found.layer, found.letters, found.dialect) == (7, letters, dialect), name
        assert name.startswith(found.module)
    others = ("k_proj.weight", "k_proj.weight_scale", "o_proj.output_scale", "k_zero_point", "k_scale\n")
    for name in (*(f"{ATTENTION}.{x}" for x in others), "lm_head.k_scale", ".k_scale", ""):
        assert parse_scale_name(name) is None, name


def test_the_prefix_is_the_checkpoints_own_and_never_a_towers(make_checkpoint):
    def prefix(*names, module="model.layers.0.self_attn"):
        return make_checkpoint(names=[f"{name}.k_proj.weight" for name in names]).attention_prefix(module)

    vision = [f"vision_tower.vision_model.encoder.layers.{i}.self_attn" for i in range(2)]
    for own, module in (
        ("model.layers.1.self_attn", "model.layers.1.self_attn"),
        ("language_model.model.layers.1.self_attn", "model.language_model.layers.1.self_attn"),
        ("transformer.h.1.attn", "transformer.h.1.attn"),
        ("model.layers.1.self_attn", "model.language_model.layers.1.self_attn"),
    ):
        assert prefix(own, own.replace("1", "11"), *vision, module=module) == own
    layer = ".layers.0.self_attn"
    for tower in ("vision_model.model", "audio_tower", "vision_tower.model"):
        for text in ("language_model.model", "language_model"):
            assert prefix(text + layer, tower + layer) == text + layer
    with pytest.raises(UnsupportedExportError, match=r"belong to model.layers.7.self_attn"):
        prefix(f"model{layer}", module="model.layers.7.self_attn")
    with pytest.raises(UnsupportedExportError, match="left.layers.0.self_attn and right"):
        prefix(f"left{layer}", f"right{layer}")


GOLDEN = Path(__file__).parents[2] / "golden"
CASES = sorted(path.parent for path in GOLDEN.glob("*/*/expected.json"))
# the model runs in bfloat16, 2^-9 each rounding: attention by another kernel shifts K of the next
# layer by a step or two, and llm-compressor divides and stores in bfloat16 as well
BFLOAT16 = 2**-6
BY_MODELOPT = "absmax / 448 (ModelOpt 0.47.0 writes it so"
CONVENTIONS = {"nvfp4-kv": BY_MODELOPT, "fp8-nvfp4-kv": BY_MODELOPT}
CONVENTIONS |= {"nvfp4": "absmax / 2688 (k_global_scale is AutoRound's name)"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_scales_of_other_tools_are_read_exactly_and_what_is_wrong_with_them_is_said(case, tmp_path):
    tools = {each.parent.name.rpartition("-")[0] for each in CASES}
    assert tools == {"llmcompressor", "nvidia-modelopt", "auto-round"}
    expected = json.loads((case / "expected.json").read_text())
    opened, layers = open_model_directory(case, weights=False), read_scales(case).layers
    found = {t.name: {"values": [*t.values], "shape": [*t.shape]} for t in opened.tensors}
    wanted = expected["scales"].items()
    assert found == {name: {key: each[key] for key in ("values", "shape")} for name, each in wanted}
    # AutoRound keeps the absmax of its last forward for FP8, and derives 4 bits of 6 of E2M1 times 448
    is_last = "auto-round" in case.parent.name and case.name != "nvfp4"
    largest = 2688.0 if case.match("auto-round-*/nvfp4") else 448.0
    amax = {(layer_of(m), x): heads for m, seen in expected["amax"].items() for x, heads in seen.items()}
    for layer, letter in ((layer, x) for layer in layers for x in "kv" if not is_last):
        scales, heads = layer.values(letter), amax[layer.layer, letter]
        wanted = heads if len(scales) == len(heads) else [max(heads)]
        assert scales == pytest.approx([x / largest for x in wanted], rel=BFLOAT16)
    # the measured absmax, less what its rounding may add
    statistics = save_amax({at: torch.tensor(heads) * (1 - BFLOAT16) for at, heads in amax.items()}, tmp_path)
    said = lines_of(fp8kv("verify", case, "--engine", "vllm", "--against", statistics))
    # llm-compressor never measures Q: uninitialised memory, which is not the same every time
    assert ("problem: Q scales " in said) == case.name.endswith("qkv")
    # what nobody wrote may look like a scale of Q
    assert ("what was measured, layer" in said) == (is_last or case.match("*/tensor-qkv"))
    alone = case.match("nvidia-modelopt-*/kv") or case.match("nvidia-modelopt-*/nvfp4-kv")
    assert ("quant_algo is missing" in said) == alone
    if "nvfp4" in case.name:
        assert f"values of an NVFP4 cache: {CONVENTIONS[case.name]}" in lines_of(fp8kv("inspect", case))
        # what was measured says the same
        told, measured = nvfp4_convention(opened), load_stats(statistics).amax_by_head()
        assert measured_convention(told, layers, measured) == (told, [])


def of(directory, producer=None, names=PROJ, **changes):
    config = NVFP4 | ({"producer": producer} if producer else {}) | changes
    return open_model_directory(model(directory, config=config, names=names), weights=False)


def by(name, version=None, **more):
    return {"name": name, "version": version, **more}


def test_the_producer_names_and_other_words_of_the_config_tell(tmp_path):
    for producer, divisor in (
        (by("modelopt", "0.41.0"), 2688),  # before its #790
        (by("modelopt", "0.42.0rc1"), 448),
        (by("modelopt", "new"), None),
        (by("modelopt", "9" * 5000 + ".1"), None),  # more digits than Python reads
        (by("modelopt", None), None),
        (by("fp8kv", nvfp4_kv_divisor=448), 448),
        (by("fp8kv", nvfp4_kv_divisor=2688), 2688),
        (by("fp8kv", nvfp4_kv_divisor=7), None),
        (by("somebody", "0.47.0"), None),
        ("modelopt", None),
    ):
        found = nvfp4_convention(of(tmp_path, producer))
        assert found.divisor == divisor, producer
        assert ("not known" in str(found)) == (divisor is None)
    four_bits = {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
    said = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_quant_algo": None}
    for names, divisor in (("{module}.{x}_global_scale", 2688), ("{module}.{x}_scale", None)):
        told = nvfp4_convention(of(tmp_path, names=names, **said, kv_cache_scheme=four_bits))
        assert told.divisor == divisor  # the first are AutoRound's
    modelopt = by("modelopt", "0.47.0")
    assert "from Megatron, absmax / 2688" in str(nvfp4_convention(of(tmp_path, modelopt)))
    found = nvfp4_convention(of(tmp_path, modelopt, kv_cache_quant_algo="FP8"))
    assert found.divisor is None
    assert "name FP8 as well" in str(found)
    assert nvfp4_convention(open_model_directory(model(tmp_path), weights=False)) is None


@pytest.mark.parametrize("told", [448, 2688, None])
@pytest.mark.parametrize("true", [448, 2688])
def test_measured_absmax_tells_also_from_other_data(told, true, tmp_path):
    convention = nvfp4_convention(of(tmp_path, by("fp8kv", nvfp4_kv_divisor=told)))
    layers = read_scales(tmp_path).layers
    assert measured_convention(convention, layers, {}) == (convention, [])
    for other_data in (0.6, 1.5):
        size = true * other_data
        amax = {(x.layer, letter): (x.values(letter)[0] * size,) for x in layers for letter in "kv"}
        found, problems = measured_convention(convention, layers, amax)
        assert (found.divisor, bool(problems)) == (true, told not in (true, None))


def test_commands_say_that_they_are_no_fp8_scales(tmp_path):
    of(tmp_path, by("fp8kv", nvfp4_kv_divisor=2688))
    done = fp8kv("generate", tmp_path, "text")
    assert done.exit_code == 2
    assert "are for an NVFP4 cache, not for FP8" in lines_of(done) + done.stderr
    assert '"divisor": 2688' in fp8kv("inspect", tmp_path, "--json").stdout


FP8 = {"quant_algo": "FP8"}


def modelopt(layers, schema=1):
    map_of_layers = {"kv_cache_quantized_layers": layers, "kv_cache_schema_version": schema}
    return MODELOPT | {"kv_cache_quant_algo": "MIXED_PRECISION"} | map_of_layers


SECOND = modelopt({"model.layers.1.self_attn": FP8})


def test_both_lists_are_read_and_what_is_not_known_is_refused(tmp_path):
    assert skipped_layers(open_model_directory(model(tmp_path / "none"))) == ()
    directory = model(tmp_path / "own", kv_cache_dtype_skip_layers=[1])
    assert skipped_layers(open_model_directory(directory)) == (1,)
    directory = model(tmp_path / "modelopt", config=SECOND, kv_cache_dtype_skip_layers=[0])
    assert skipped_layers(open_model_directory(directory)) == (0,)
    assert read_scales(directory).fp8_dtype == "e4m3fn"
    # a module of multi-token prediction is no layer of the decoder
    layers = dict.fromkeys(("model.layers.1.self_attn", "mtp.layers.0.self_attn", "model.layers.2.attn"), FP8)
    assert skipped_layers(open_model_directory(model(tmp_path / "mtp", config=modelopt(layers)))) == (0,)
    for document, words in (
        ({"kv_cache_dtype_skip_layers": "sliding_window"}, "is 'sliding_window'; it is a list of layer indi"),
        ({"kv_cache_dtype_skip_layers": [2]}, r"is \[2\]; it is a list of layer indices, 0 to 1"),
        ({"kv_cache_dtype_skip_layers": [True]}, r"is \[True\]"),
        ({"kv_cache_dtype_skip_layers": [0], "num_hidden_layers": None}, "does not say how many layers"),
        ({"config": SECOND, "kv_cache_dtype_skip_layers": [1]}, "leave different layers in 16 bits"),
        ({"config": modelopt({"model.layers.0.self_attn": {"quant_algo": "NVFP4"}})}, "in 'NVFP4'; only lay"),
        ({"config": modelopt({"lm_head": FP8})}, "has 'lm_head' in 'FP8'"),
        ({"config": modelopt({"model.layers.0.self_attn": FP8}, schema=2)}, "version 2; what is known"),
    ):
        with pytest.raises(InputError, match=words):
            skipped_layers(open_model_directory(model(tmp_path, **document)))


def test_vllm_leaves_them_out_unless_its_user_names_others(tmp_path, caplog, monkeypatch):
    path = str(model(tmp_path / "model", kv_cache_dtype_skip_layers=[1]))
    cache = SimpleNamespace(cache_dtype="fp8", kv_cache_dtype_skip_layers=[])
    config = SimpleNamespace(
        cache_config=cache, model_config=SimpleNamespace(model=path, revision=None),
        load_config=SimpleNamespace(load_format="auto"),
    )  # fmt: skip
    module = ModuleType("vllm.engine.arg_utils")
    module.EngineArgs = type("EngineArgs", (), {"create_engine_config": lambda self: config})
    watch_arguments(module)
    with caplog.at_level(logging.INFO, "vllm.fp8kv"):
        assert module.EngineArgs().create_engine_config() is config
        assert cache.kv_cache_dtype_skip_layers == ["1"]
        cache.kv_cache_dtype_skip_layers = ["0"]
        module.EngineArgs().create_engine_config()
        assert cache.kv_cache_dtype_skip_layers == ["0"]
        cache.cache_dtype, cache.kv_cache_dtype_skip_layers = "nvfp4", []
        module.EngineArgs().create_engine_config()
        assert cache.kv_cache_dtype_skip_layers == []
    start = "fp8kv: the checkpoint's config leaves layer 1 in 16 bits; "
    said = [record.getMessage() for record in caplog.records]
    assert said == [start + "so are they here", start + "the command line leaves 0 instead"]
    cache.cache_dtype = "auto"
    model(tmp_path / "model", **CONFIG | {"kv_cache_dtype_skip_layers": [7]})
    monkeypatch.setenv("FP8KV_REQUIRE_SCALES", "1")
    with pytest.raises(plugin.ScalesNotUsedError, match="cannot leave layers in 16 bits as the .* is .7.;"):
        module.EngineArgs().create_engine_config()
