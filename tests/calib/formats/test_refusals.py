"""What an engine cannot read is refused with the way out, or reduced only where the user asked."""

from dataclasses import replace

import pytest
import torch
from engine_fixtures import make_scales

from calib.choices import FORMATS as NAMES
from calib.errors import UnsupportedExportError
from calib.formats import FORMATS, export
from calib.formats.refusals import FormatRefusal, WayOut

SCALAR_ONLY = [name for name, target in FORMATS.items() if "attn_head" not in target.strategies]


def test_every_format_a_user_can_name_has_an_exporter():
    assert tuple(FORMATS) == NAMES
    nvfp4 = ["vllm-nvfp4", "sglang-nvfp4"]
    assert ["sglang", "tgi", "json", "modelopt", "trtllm", *nvfp4] == SCALAR_ONLY


@pytest.mark.parametrize("name", SCALAR_ONLY)
def test_scalar_only_engines_refuse_attn_head(name, checkpoint):
    with pytest.raises(
        UnsupportedExportError, match=r"Use --strategy tensor, or --reduce max, or --format vllm"
    ):
        export(make_scales("attn_head"), checkpoint, name)


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "fp8kv"])
def test_channel_is_for_our_runtime_only(name, checkpoint):
    with pytest.raises(UnsupportedExportError, match=r"--reduce max, or --format fp8kv"):
        export(make_scales("channel"), checkpoint, name)


@pytest.mark.parametrize("name", SCALAR_ONLY)
def test_reduce_max_writes_the_largest_scale(name, checkpoint):
    made = export(make_scales("attn_head"), checkpoint, name, reduce="max")
    for tensor_name, tensor in made.tensors.items():
        start = 1.0 if ".1." in tensor_name else 0.0
        k, v = start + 0.25 + 1 / 64, start + 0.125 + 1 / 64
        expected = {"k_scale": k, "v_scale": v, "kv_scale": k}[tensor_name.rsplit(".", 1)[1]]
        factor = 6 if name == "sglang-nvfp4" else 1
        assert tensor.tolist() == [torch.tensor(expected).div(factor).item()]
    factors = made.documents.get("kv_cache_scales.json", {}).get("kv_cache", {})
    if factors:
        assert factors["scaling_factor"]["0"] == {"0": 0.25 + 1 / 64, "1": 1.25 + 1 / 64}


@pytest.mark.parametrize("method", ["fp8", "quark"])
@pytest.mark.parametrize("name", ["vllm", "aphrodite"])
def test_reduce_max_is_the_way_out_beside_weights_that_allow_one_scale(name, method, checkpoint):
    config = checkpoint.config | {"quantization_config": {"quant_method": method}}
    quantized = replace(checkpoint, config=config)
    with pytest.raises(UnsupportedExportError, match=r"Use --strategy tensor, or --reduce max"):
        export(make_scales("attn_head"), quantized, name)
    made = export(make_scales("attn_head"), quantized, name, reduce="max")
    assert {tuple(tensor.shape) for tensor in made.tensors.values()} == {(1,)}
    plain = export(make_scales("attn_head"), checkpoint, name, reduce="max")
    assert {tuple(tensor.shape) for tensor in plain.tensors.values()} == {(1,)}


@pytest.mark.parametrize("name", ["sglang", "tgi", "json", "modelopt", "trtllm"])
def test_query_scales_are_refused_where_nothing_reads_them(name, checkpoint):
    with pytest.raises(UnsupportedExportError, match="holds no query scales. Use --targets kv"):
        export(make_scales(q=True), checkpoint, name)


@pytest.mark.parametrize("fp8_dtype", ["e4m3fnuz", "e5m2"])
@pytest.mark.parametrize("name", ["vllm", "aphrodite", "sglang", "json", "modelopt", "trtllm"])
def test_other_fp8_types_are_refused(name, fp8_dtype, checkpoint):
    with pytest.raises(UnsupportedExportError, match="holds e4m3fn scales; .* --fp8-dtype e4m3fn"):
        export(make_scales(fp8_dtype=fp8_dtype), checkpoint, name)


def test_tgi_says_which_fp8_type_its_scales_are_for(checkpoint):
    made = export(make_scales(fp8_dtype="e4m3fnuz"), checkpoint, "tgi")
    assert made.config["kv_cache_torch_dtype"] == "float8_e4m3fnuz"
    with pytest.raises(UnsupportedExportError):
        export(make_scales(fp8_dtype="e5m2"), checkpoint, "tgi")


def test_an_existing_compressed_tensors_config_keeps_everything_but_its_kv_part(make_checkpoint):
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}
    existing = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "strategy": "token"},
    }
    checkpoint = make_checkpoint({"quantization_config": existing})
    config = export(make_scales(), checkpoint, "vllm").config["quantization_config"]
    scheme = config.pop("kv_cache_scheme")
    assert config == {k: v for k, v in existing.items() if k != "kv_cache_scheme"}
    assert scheme["strategy"] == "tensor"
    assert checkpoint.config["quantization_config"]["kv_cache_scheme"]["strategy"] == "token"


def test_a_quantization_config_inside_text_config_is_found(make_checkpoint):
    inner = {"model_type": "llama", "quantization_config": {"quant_method": "compressed-tensors"}}
    config = export(make_scales(), make_checkpoint({"text_config": inner}), "vllm").config
    assert "quantization_config" not in config
    assert config["text_config"]["quantization_config"]["config_groups"] == {}
    assert config["text_config"]["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8


@pytest.mark.parametrize("method", ["fp8", "quark"])
def test_scalar_scales_go_beside_fp8_and_quark_weights(method, make_checkpoint):
    checkpoint = make_checkpoint({"quantization_config": {"quant_method": method}})
    made = export(make_scales(), checkpoint, "vllm")
    assert made.config == checkpoint.config
    assert "--kv-cache-dtype fp8" in made.notes[0]
    with pytest.raises(UnsupportedExportError, match="allow one KV scale per layer"):
        export(make_scales("attn_head"), checkpoint, "vllm")


def test_attention_that_quark_leaves_out_has_no_place_in_vllm(make_checkpoint):
    config = {"quant_method": "quark", "exclude": ["lm_head", r"re:model\.layers\.1\.self_attn.*"]}
    checkpoint = make_checkpoint({"quantization_config": config})
    with pytest.raises(UnsupportedExportError, match="vLLM's attention has no place for scales"):
        export(make_scales(), checkpoint, "vllm")
    assert export(make_scales(), checkpoint, "sglang").tensors
    config["exclude"] = ["model.layers.1.self_attn.k_proj", "re:.*mlp.*"]
    assert export(make_scales(), make_checkpoint({"quantization_config": config}), "vllm").tensors


def test_modelopt_weights_get_their_own_kv_scheme(make_checkpoint):
    existing = {"quant_method": "modelopt", "quant_algo": "FP8"}
    checkpoint = make_checkpoint({"quantization_config": existing})
    config = export(make_scales(), checkpoint, "vllm").config["quantization_config"]
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    assert config == {**existing, "kv_cache_scheme": scheme}


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_weights_that_rule_kv_scales_out_are_refused(method, make_checkpoint):
    checkpoint = make_checkpoint({"quantization_config": {"quant_method": method}})
    with pytest.raises(UnsupportedExportError, match=f"no place for KV scales beside '{method}'"):
        export(make_scales(), checkpoint, "vllm")


VLLM = "--format vllm for vLLM, or "


@pytest.mark.parametrize(
    ("architecture", "method", "name", "effect", "others"),
    [
        ("Qwen3ForCausalLM", None, "sglang", "compute with 1.0", VLLM),
        ("Lfm2ForCausalLM", None, "vllm", "not start", ""),
        ("FalconForCausalLM", "fp8", "vllm", "keep a 16-bit cache", ""),
        ("FalconForCausalLM", None, "modelopt", "not start", VLLM),
    ],
)
def test_a_class_that_loads_nothing_is_refused_with_what_becomes_of_it_and_the_way_out(
    architecture, method, name, effect, others, make_checkpoint
):
    config = {"architectures": [architecture]}
    weights = {"quantization_config": {"quant_method": method}} if method else {}
    message = rf"\), so it would {effect}. Use {others}--format fp8kv for the bundled runtime$"
    with pytest.raises(UnsupportedExportError, match=message):
        export(make_scales(), make_checkpoint(config | weights), name)


def test_modelopt_never_replaces_a_quantization_config(make_checkpoint):
    checkpoint = make_checkpoint({"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(UnsupportedExportError, match="Use --format vllm, which keeps it"):
        export(make_scales(), checkpoint, "modelopt")


def test_modelopt_refuses_attention_that_engines_would_not_look_under(make_checkpoint):
    modules = [f"gpt_neox.layers.{i}.attention" for i in range(2)]
    checkpoint = make_checkpoint(names=[f"{m}.query_key_value.weight" for m in modules])
    scales = make_scales(modules=modules)
    with pytest.raises(UnsupportedExportError, match=r"this model has 'gpt_neox.layers.0.attention'"):
        export(scales, checkpoint, "modelopt")
    assert "gpt_neox.layers.0.attention.k_scale" in export(scales, checkpoint, "vllm").tensors


def test_json_lists_layers_without_a_cache_and_says_so(make_checkpoint):
    parts = ["self_attn.k_proj", "self_attn.k_proj", "mixer.in_proj", "mixer.in_proj"]
    names = [f"model.layers.{i}.{part}.weight" for i, part in enumerate(parts)]
    made = export(make_scales(), make_checkpoint(names=names), "json")
    factors = made.documents["kv_cache_scales.json"]["kv_cache"]["scaling_factor"]["0"]
    assert factors == {"0": 0.25, "1": 1.25, "2": 1.0, "3": 1.0}
    assert made.notes[0] == (
        "kv_cache_scales.json: 2 layers cache no K and V; they are listed with 1.0, unused"
    )


def test_json_needs_what_its_loaders_compare(make_checkpoint):
    with pytest.raises(UnsupportedExportError, match="needs model_type and the number of layers"):
        export(make_scales(), make_checkpoint({"model_type": None}), "json")


@pytest.mark.parametrize("key", ["n_layer", "n_layers", "num_layers"])
@pytest.mark.parametrize("name", ["json", "sglang"])
def test_the_number_of_layers_has_several_names(name, key, make_checkpoint):
    made = export(make_scales(), make_checkpoint({"num_hidden_layers": None, key: 2}), name)
    factors = made.documents["kv_cache_scales.json"]["kv_cache"]["scaling_factor"]["0"]
    assert factors == {"0": 0.25, "1": 1.25}


def test_sglang_needs_no_json_beside_the_checkpoint(make_checkpoint):
    made = export(make_scales(), make_checkpoint({"num_hidden_layers": None}), "sglang")
    assert made.documents == {}
    assert "model.layers.0.self_attn.k_scale" in made.tensors


def test_one_number_for_k_and_v_says_what_it_costs(checkpoint):
    made = export(make_scales(), checkpoint, "json")
    largest = max(
        float(max(layer.k, layer.v) / min(layer.k, layer.v)) for layer in make_scales().layers.values()
    )
    assert largest > 1
    (said,) = (note for note in made.notes if "one number" in note)
    assert f"up to {largest:.3g} times too large" in said
    layers = {name: replace(each, v=each.k) for name, each in make_scales().layers.items()}
    assert export(replace(make_scales(), layers=layers), checkpoint, "json").notes == ()


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_map_per_rank(ranks, make_checkpoint):
    source = make_checkpoint({"num_attention_heads": 8, "num_key_value_heads": 2})
    (document,) = export(make_scales(), source, "json", tp_size=ranks).documents.values()
    factors = document["kv_cache"]["scaling_factor"]
    assert list(factors) == [str(rank) for rank in range(ranks)]
    assert factors[str(ranks - 1)] == factors["0"]


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(6, 2, 3), (4, 2, 8), (12, 4, 6), (3, 3, 2)])
def test_ranks_that_no_engine_can_split_heads_over(heads, kv_heads, ranks, make_checkpoint):
    source = make_checkpoint({"num_attention_heads": heads, "num_key_value_heads": kv_heads})
    said = f"{heads} query heads and {kv_heads} KV heads cannot be split evenly over {ranks} ranks"
    with pytest.raises(UnsupportedExportError, match=f"--tp-size {ranks}: .*{said}"):
        export(make_scales(), source, "json", tp_size=ranks)


def test_scales_stay_float32_and_exact(checkpoint):
    made = export(make_scales("attn_head", q=True), checkpoint, "vllm")
    assert {tensor.dtype for tensor in made.tensors.values()} == {torch.float32}


def test_json_of_fewer_layers_than_there_are_scales_is_refused(make_checkpoint):
    checkpoint = make_checkpoint({"num_hidden_layers": 0})
    said = r"says 0 layers, and there are scales of more; download the model again$"
    with pytest.raises(UnsupportedExportError, match=said):
        export(make_scales("tensor"), checkpoint, "json")


@pytest.mark.parametrize(
    ("command", "ways", "advice"),
    [
        ("calibrate", [WayOut("center_keys")], "p. Leave out --center-keys"),
        ("convert", [WayOut("reduce"), WayOut("format", ("a",))], "p. Use --to a, or leave out --reduce"),
        ("apply", [WayOut("reduce", ("max",)), WayOut("strategy", ("tensor",))], "p. Use --strategy tensor"),
        ("repair", [WayOut("strategy", ("tensor",))], "p. Use fp8kv apply --strategy tensor"),
        ("repair", [WayOut("center_keys")], "p. Calibrate the model again"),
        ("apply", [], "p"),
    ],
)  # fmt: skip
def test_a_way_out_has_the_verb_that_it_needs(command, ways, advice):
    assert FormatRefusal("p", *ways).words(command) == advice
