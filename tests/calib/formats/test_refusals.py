"""What an engine cannot read, also of latents (MLA), is refused with the way out; the rest has its names."""

from dataclasses import replace

import pytest
from engine_fixtures import make_scales

from calib.choices import FORMATS as NAMES
from calib.errors import UnsupportedExportError
from calib.formats import FORMATS, export
from calib.formats.base import FormatRefusal, WayOut


def refuse(scales, checkpoint, name, message):
    with pytest.raises(UnsupportedExportError, match=message):
        export(scales, checkpoint, name)


def of_weights(make_checkpoint, method, **more):
    return make_checkpoint({"quantization_config": {"quant_method": method, **more}})


def factors_of(made):
    return made.documents["kv_cache_scales.json"]["kv_cache"]["scaling_factor"]


def test_other_strategies_queries_and_fp8_types_are_refused_with_the_way_out(checkpoint):
    assert {*FORMATS} == {*NAMES}, "FormatName in calib/choices.py and FORMATS name the same formats"
    for name, target in FORMATS.items():
        if "attn_head" not in target.strategies:
            way_out = r"Use --strategy tensor, or --reduce max, or --format vllm"
            refuse(make_scales("attn_head"), checkpoint, name, way_out)
        if not target.reads_q:
            refuse(make_scales(q=True), checkpoint, name, "holds no query scales. Use --targets kv")
        if "channel" not in target.strategies:
            refuse(make_scales("channel"), checkpoint, name, r"--reduce max, or --format fp8kv")
        for fp8_dtype in {"e4m3fnuz", "e5m2"} - {*target.fp8_dtypes}:
            fp8_types = "holds e4m3fn .*scales; .* --fp8-dtype e4m3fn"
            refuse(make_scales(fp8_dtype=fp8_dtype), checkpoint, name, fp8_types)
    made = export(make_scales(fp8_dtype="e4m3fnuz"), checkpoint, "tgi")
    assert made.config["kv_cache_torch_dtype"] == "float8_e4m3fnuz"


def test_a_way_out_has_the_verb_that_it_needs():
    reduce, strategy = WayOut("reduce", ("max",)), WayOut("strategy", ("tensor",))
    for command, ways, advice in (
        ("calibrate", [WayOut("center_keys")], "p. Leave out --center-keys"),
        ("convert", [WayOut("reduce"), WayOut("format", ("a",))], "p. Use --to a, or leave out --reduce"),
        ("apply", [reduce, strategy], "p. Use --strategy tensor"),
        ("repair", [strategy], "p. Use fp8kv apply --strategy tensor"),
        ("repair", [WayOut("center_keys")], "p. Calibrate the model again"),
        ("apply", [], "p"),
    ):
        assert FormatRefusal("p", *ways).words(command) == advice


def test_an_existing_quantization_config_keeps_everything_but_its_kv_part(make_checkpoint):
    kept = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    kept |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}}
    scheme = {"num_bits": 8, "strategy": "token"}
    checkpoint = make_checkpoint({"quantization_config": kept | {"kv_cache_scheme": scheme}})
    config = export(make_scales(), checkpoint, "vllm").config["quantization_config"]
    assert config.pop("kv_cache_scheme")["strategy"] == "tensor"
    assert config == kept
    assert checkpoint.config["quantization_config"]["kv_cache_scheme"] == scheme
    # inside text_config it is found
    inner = {"model_type": "llama", "quantization_config": {"quant_method": "compressed-tensors"}}
    config = export(make_scales(), make_checkpoint({"text_config": inner}), "vllm").config
    assert "quantization_config" not in config
    assert config["text_config"]["quantization_config"]["config_groups"] == {}
    assert config["text_config"]["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    weights = {"quant_method": "modelopt", "quant_algo": "FP8"}  # that of ModelOpt gets its own scheme
    config = export(make_scales(), make_checkpoint({"quantization_config": weights}), "vllm").config
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    assert config["quantization_config"] == weights | {"kv_cache_scheme": scheme}


@pytest.mark.parametrize("method", ["fp8", "quark"])
def test_scales_per_layer_go_beside_fp8_and_quark_weights(method, make_checkpoint):
    checkpoint = of_weights(make_checkpoint, method)
    made = export(make_scales(), checkpoint, "vllm")
    assert made.config == checkpoint.config
    assert "--kv-cache-dtype fp8" in made.notes[0]
    for name in ("vllm", "aphrodite"):
        per_layer = "allow one KV scale per layer.* Use --strategy tensor, or --reduce max"
        refuse(make_scales("attn_head"), checkpoint, name, per_layer)
        made = export(make_scales("attn_head"), checkpoint, name, reduce="max")
        assert {tuple(tensor.shape) for tensor in made.tensors.values()} == {(1,)}


def test_attention_that_quark_leaves_out_and_weights_that_rule_scales_out_are_refused(make_checkpoint):
    excluded = ["lm_head", r"re:model\.layers\.1\.self_attn.*"]
    checkpoint = of_weights(make_checkpoint, "quark", exclude=excluded)
    refuse(make_scales(), checkpoint, "vllm", "vLLM's attention has no place for scales")
    assert export(make_scales(), checkpoint, "sglang").tensors
    excluded = ["model.layers.1.self_attn.k_proj", "re:.*mlp.*"]
    assert export(make_scales(), of_weights(make_checkpoint, "quark", exclude=excluded), "vllm").tensors
    for method, version in (("gptq", ", if any"), ("awq", ", which compressed-tensors' AutoAWQConverter")):
        message = f"no place for KV scales beside '{method}'.*{version}"
        refuse(make_scales(), of_weights(make_checkpoint, method), "vllm", message)
    refuse(make_scales(), of_weights(make_checkpoint, "fp8"), "modelopt", "Use --format vllm, which keeps it")


def test_a_class_that_loads_nothing_is_refused_with_what_becomes_of_it_and_the_way_out(make_checkpoint):
    vllm = "--format vllm for vLLM, or "
    for family, method, name, effect, others in (
        ("Qwen3", None, "sglang", "compute with 1.0", vllm),
        ("Lfm2", None, "vllm", "not start", ""),
        ("Falcon", "fp8", "vllm", "keep a 16-bit cache", ""),
        ("Falcon", None, "modelopt", "not start", vllm),
    ):
        config = {"architectures": [f"{family}ForCausalLM"]}
        config |= {"quantization_config": {"quant_method": method}} if method else {}
        message = rf"\), so it would {effect}. Use {others}--format fp8kv for the bundled runtime$"
        refuse(make_scales(), make_checkpoint(config), name, message)


def test_modelopt_refuses_attention_that_engines_would_not_look_under(make_checkpoint):
    modules = [f"gpt_neox.layers.{i}.attention" for i in range(2)]
    checkpoint = make_checkpoint(names=[f"{m}.query_key_value.weight" for m in modules])
    scales = make_scales(modules=modules)
    refuse(scales, checkpoint, "modelopt", r"this model has 'gpt_neox.layers.0.attention'")
    assert "gpt_neox.layers.0.attention.k_scale" in export(scales, checkpoint, "vllm").tensors
    # the rules of TGI were not read for this class
    (doubt,) = export(make_scales(), make_checkpoint({"architectures": ["Qwen2ForCausalLM"]}), "tgi").doubts
    assert doubt.startswith("whether TGI loads these scales is not known for Qwen2ForCausalLM")


def test_json_says_what_it_cannot_hold_and_needs_what_its_loaders_compare(make_checkpoint):
    parts = ["self_attn.k_proj", "self_attn.k_proj", "mixer.in_proj", "mixer.in_proj"]
    source = make_checkpoint(names=[f"model.layers.{i}.{part}.weight" for i, part in enumerate(parts)])
    made = export(make_scales(), source, "json")
    assert factors_of(made)["0"] == {"0": 0.25, "1": 3.125, "2": 1.0, "3": 1.0}
    unused, larger = made.notes
    assert unused == "kv_cache_scales.json: 2 layers cache no K and V; they are listed with 1.0, unused"
    assert "one number" in larger
    assert "up to 2.5 times too large" in larger  # of the second layer, 3.125 and 1.25
    layers = {name: replace(each, v=each.k) for name, each in make_scales().layers.items()}
    assert export(replace(make_scales(), layers=layers), source, "json").notes == (unused,)
    unnamed = make_checkpoint({"model_type": None})
    refuse(make_scales(), unnamed, "json", "needs model_type and the number of layers")
    said = r"says 0 layers, and there are scales of more; download the model again$"
    refuse(make_scales(), make_checkpoint({"num_hidden_layers": 0}), "json", said)
    for key in ("n_layer", "n_layers", "other"):
        # SGLang needs no JSON beside the checkpoint
        made = export(make_scales(), make_checkpoint({"num_hidden_layers": None, key: 2}), "sglang")
        assert "model.layers.0.self_attn.k_scale" in made.tensors
        assert bool(made.documents) == (key != "other")


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 2, 3), (4, 2, 8), (16, 4, 6), (6, 3, 2)])
def test_ranks_that_no_engine_can_split_heads_over(heads, kv_heads, ranks, make_checkpoint):
    source = make_checkpoint({"num_attention_heads": heads, "num_key_value_heads": kv_heads})
    said = f"{heads} query heads and {kv_heads} KV heads cannot be split evenly over {ranks} ranks"
    with pytest.raises(UnsupportedExportError, match=f"--tp-size {ranks}: .*{said}"):
        export(make_scales(), source, "json", tp_size=ranks)
    one_per_rank = factors_of(export(make_scales(), source, "json", tp_size=2 * kv_heads))
    assert one_per_rank == {str(rank): {"0": 0.25, "1": 3.125} for rank in range(2 * kv_heads)}


FLAG, BAKE = "--model-impl transformers", "fp8kv bake after fp8kv calibrate --format fp8kv"


def of_latents(make_checkpoint, family="DeepseekV3", **config):
    own = {"architectures": [f"{family}ForCausalLM"], "kv_lora_rank": 16} | config
    return make_checkpoint(own, [f"model.layers.{i}.self_attn.kv_b_proj.weight" for i in range(2)])


def scales():
    """One scale per layer, of the latent and k_pe together."""
    made = make_scales()
    return replace(made, layers={n: replace(one, v=one.k, latent=True) for n, one in made.layers.items()})


REASONS = {
    "vllm": "own classes load no scales of latents .* or --format modelopt with vLLM's",
    "vllm-nvfp4": r"or vLLM's --kv-cache-dtype fp8_ds_mla, .* \(DeepSeek-V3.2, GLM-5\)",
    "sglang": "SGLang stores latents .* without their scales, .* its answers are wrong",
    "aphrodite": "whether Aphrodite computes with scales of latents is not known",
    "json": "no engine is known to read scales of latents .* from kv_cache_scales.json",
    "trtllm": "TensorRT-LLM's PyTorch backend computes .* with 1.0",
}


def test_a_format_whose_engine_reads_no_latents_is_refused_with_the_way_out(make_checkpoint):
    assert [name for name in FORMATS if not FORMATS[name].latent] == ["modelopt", "fp8kv"]
    source = of_latents(make_checkpoint)
    for name in (name for name, target in FORMATS.items() if target.latent):
        refuse(scales(), source, name, f"--format {name}: .* Use {BAKE}")
        refuse(scales(), source, name, REASONS.get(name, "latents"))
        # scales that do not say so are known by the model's config
        refuse(make_scales(), source, name, "MLA|latents")
    refuse(scales(), make_checkpoint(), "vllm", "MLA|latents")  # and scales that say so by themselves


def test_modelopt_holds_latents_for_vllms_other_backend_by_the_name_that_arrives(make_checkpoint):
    made = export(scales(), of_latents(make_checkpoint, "Glm4MoeLite"), "modelopt")
    assert {name: tensor.tolist() for name, tensor in made.tensors.items()} == {
        f"model.layers.{i}.self_attn.{x}_proj.{x}_scale": [0.25 + i] for i in range(2) for x in "kv"
    }
    assert (made.flags, made.doubts) == (FLAG, ())
    assert made.notes[0].startswith(f"serve with {FLAG}: vLLM's own class computes with 1.0")
    # a class that vLLM lacks needs no flag
    made = export(scales(), of_latents(make_checkpoint, "Youtu"), "modelopt")
    assert (made.flags, made.notes) == ("", ("these scales are of latents (MLA), for vLLM alone",))
    assert export(scales(), of_latents(make_checkpoint, "AXK2"), "modelopt").tensors
    # as LongCat's, of which there are two in a layer: with both it is refused
    modules = [f"model.layers.{i}.self_attn.0" for i in range(2)]
    config = {"architectures": ["LongcatFlashForCausalLM"], "kv_lora_rank": 16}
    source = make_checkpoint(config, [f"{module}.kv_b_proj.weight" for module in modules])
    made = export(make_scales(modules=modules), source, "modelopt")
    assert {*made.tensors} == {f"{module}.{x}_scale" for module in modules for x in "kv"}
    assert made.flags == FLAG
    both = make_scales(modules=[*modules, "model.layers.0.self_attn.1"])
    refuse(both, source, "modelopt", "several attention modules")


def test_modelopt_is_refused_where_latents_were_not_seen_to_arrive(make_checkpoint):
    not_known = "loads scales of latents .* of {}ForCausalLM is not known, or"
    for family, config, message in (
        ("MiniCPM3", {}, not_known),  # K and V in vLLM
        ("DeepseekV4", {}, not_known),  # not built
        ("Own", {}, not_known),
        ("AXK2", {"index_topk": 8}, "and uses scales of .* as its attention is sparse"),
        ("DeepseekV3", {"quantization_config": {"quant_method": "fp8"}}, "would replace"),
    ):
        said = rf"{message.format(family)}.*\. Use {BAKE}"
        refuse(scales(), of_latents(make_checkpoint, family, **config), "modelopt", said)
