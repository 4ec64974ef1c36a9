"""`fp8kv bake` of quantised weights: factors go into scales, as fine as these and engines hold."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from baking import bake, calibrated, scales_of
from coded_forms import FORMS
from command_line import one_line_error, succeeded
from families import LATENT, edit_json, edit_tensors, save_model, tiny_model
from safetensors.torch import load_file

from calib.errors import UnsupportedModelError
from calib.files.model_directory import open_model_directory
from calib.files.tensors import stored_tensors
from calib.models.quantized.coded_weight import CodedWeight, WeightScheme
from calib.rescale.proof import load_exact, observe
from calib.rescale.stored_weights import edited_scales
from calib.scales.stats_file import load_stats

# finest factors of K and V: of each head, or of the layer
BY_HEAD = ("compressed-w4", "compressed-w4-ordered", "compressed-mxfp4", "gptq-4", "gptq-v2", "awq")
HELD = dict.fromkeys(BY_HEAD, ("head", "head")) | {"gptq-4-ordered": ("head", "layer")}
CHANNELS = ("compressed-w8-channel", "compressed-fp8-channel", "compressed-int8-asymmetric")
HELD |= dict.fromkeys(CHANNELS, ("head", "layer")) | {"fp8-block": ("layer", "layer")}
REFUSED = {"compressed-fp8": "engines requantise Q, K and V"}
REFUSED |= {"compressed-nvfp4": "nobody has checked how engines fuse"}
ATTENTION = "model.layers.{}.self_attn"


def quantised(form, path, octaves=2, k_size=90.0, v_size=60.0):
    model = tiny_model("llama", hidden_size=128, head_dim=32, num_hidden_layers=2)
    with torch.no_grad():
        for layer in model.model.layers:
            # scales in float16, which Q's and the output's become smaller in
            layer.self_attn.q_proj.weight.mul_(32)
            layer.self_attn.o_proj.weight.mul_(32)
            for name, size in (("k_proj", k_size), ("v_proj", v_size)):
                rows = getattr(layer.self_attn, name).weight
                rows.mul_(torch.tensor([size, size / 5]).repeat_interleave(32)[:, None])
                rows.mul_(torch.linspace(0, -octaves, 64).exp2()[:, None])
    return FORMS[form].quantise(save_model(model.to(torch.bfloat16), path), path.with_name("plain"))


def measured(source, out, strategy="attn_head"):
    return calibrated(source, out, "--strategy", strategy, "--format", "fp8kv")


def told(out):
    return json.loads((out / "fp8kv_bake.json").read_text())


def observed(*directories):
    return (observe(load_exact(open_model_directory(each))) for each in directories)


@pytest.mark.parametrize("form", HELD)
def test_scale_one_becomes_right(form, tmp_path):
    source, out = quantised(form, tmp_path / "source"), tmp_path / "out"
    before = measured(source, tmp_path / "before")
    succeeded(bake(source, before, out, "--for", "fp8"))
    old, new = observed(source, out)
    assert torch.equal(old.logits, new.logits)
    after = scales_of(measured(out, tmp_path / "after"))
    factors = scales_of(before) / after
    assert factors.log2().frac().abs().max() == 0
    for index, held in enumerate(HELD[form]):
        scales = after[:, index]
        assert scales.max() <= 1
        assert scales.min() > 0.5 if held == "head" else scales.amax(-1).min() > 0.5
        assert bool((factors[:, index, 0] == factors[:, index, 1]).all()) == (held == "layer")
    names = {"model.safetensors", "fp8kv_bake.json", "README.md"}
    for file in source.iterdir():
        assert ((out / file.name).read_bytes() == file.read_bytes()) != (file.name in names)


@pytest.mark.parametrize("form", REFUSED)
def test_what_engines_would_round(form, tmp_path):
    source = quantised(form, tmp_path / "source")
    done = bake(source, measured(source, tmp_path / "scales"), tmp_path / "out", "--for", "fp8")
    one_line_error(done, REFUSED[form])
    assert not (tmp_path / "out").exists()


def test_factors_as_large_as_scales_and_biases_hold(tmp_path):
    source, out = quantised("gptq-4", tmp_path / "source", k_size=0.1, v_size=0.05), tmp_path / "out"
    biases = {}
    for module in map(ATTENTION.format, range(2)):
        for letter, size in {"q": 128, "k": 64, "v": 64, "o": 128}.items():
            # halved, it is rounded
            value = 2.0**-14 * 1.999 if letter == "q" else 0.0
            biases[f"{module}.{letter}_proj.bias"] = torch.full((size,), value, dtype=torch.float16)
    edit_tensors(source, lambda tensors: tensors.update(biases))
    edit_json(source / "config.json", attention_bias=True)
    before = measured(source, tmp_path / "before")
    done = succeeded(bake(source, before, out, "--for", "fp8"))
    assert "note: V of some heads stays up to 2^" in " ".join(done.stdout.split())
    short, after = told(out)["octaves_short"], scales_of(measured(out, tmp_path / "after"))
    assert short["k"] > 0
    assert 0.5 < after[:, 1].min() * 2 ** short["v"] <= 1
    assert after[:, 1].min() > 8 * scales_of(before)[:, 1].min()
    assert after.max() <= 1


def test_channels_of_k_become_even_where_a_layer_holds_factors(tmp_path):
    source, out = quantised("compressed-w4", tmp_path / "source", octaves=10), tmp_path / "out"
    # float16's smallest numbers: no half of them
    small = [f"{ATTENTION.format(1)}.{letter}_proj.weight_scale" for letter in "qo"]
    edit_tensors(source, lambda tensors: [tensors[name].fill_(2.0**-24) for name in small])
    scales = measured(source, tmp_path / "scales")
    done = succeeded(bake(source, scales, out, "--for", "int8"))
    assert "note: 1 layers stay as they are" in " ".join(done.stdout.split())
    said = told(out)
    # V would need factors per input channel of the output projection
    assert said["layers_with_factors_per_head"] == {"k": 1, "v": 0}
    assert "cannot hold" in said["left"][ATTENTION.format(1)]
    factors = [torch.tensor(said["factors"][ATTENTION.format(i)]["k"]) for i in range(2)]
    first, second = ({*each.flatten().tolist()} for each in factors)
    assert len(first) > 1
    assert second == {1.0}
    done = bake(source, scales, tmp_path / "no", "--for", "int8", "--dtype", "float32")
    one_line_error(done, "are quantised", "leave --dtype away")


def test_the_scale_of_what_goes_into_the_output_projection(tmp_path):
    source = quantised("compressed-fp8-channel", tmp_path / "source")
    module = f"{ATTENTION.format(0)}.o_proj"
    edit_tensors(source, lambda tensors: tensors.update({f"{module}.input_scale": torch.tensor([0.25])}))
    stored = stored_tensors(open_model_directory(source))
    parts = {"scale": f"{module}.weight_scale"}
    weight = CodedWeight(f"{module}.weight", (128, 128), parts, WeightScheme((1, None)))
    found = edited_scales(weight, stored, torch.full((1, 128), 0.125))
    assert found[f"{module}.input_scale"].item() == 2
    assert torch.equal(found[f"{module}.weight_scale"], stored[f"{module}.weight_scale"].read() / 8)
    uneven = torch.ones(1, 128)
    uneven[0, 0] = 2
    with pytest.raises(UnsupportedModelError, match="different factors"):
        edited_scales(weight, stored, uneven)


def test_exponents_end_at_0_and_254_as_those_of_mxfp4_do():
    weight = CodedWeight("m.weight", (64, 64), {"scale": "m.scale"}, WeightScheme((1, 32)))
    for exponent, factor, after in ((253, 2.0, 254), (1, 0.5, 0), (254, 2.0, None), (0, 0.5, None)):
        scale = torch.full((64, 2), exponent, dtype=torch.uint8)
        stored, factors = {"m.scale": SimpleNamespace(read=lambda s=scale: s)}, torch.full((64, 1), factor)
        if after is None:
            with pytest.raises(UnsupportedModelError, match="cannot hold their product"):
                edited_scales(weight, stored, factors)
        else:
            assert edited_scales(weight, stored, factors)["m.scale"].unique().tolist() == [after]


# blocks of 32 lie as DeepSeek-V3's of 128 do: a head's queries end amid one, keys end with one
ALIGNED = {"qk_nope_head_dim": 32, "v_head_dim": 32}
OF_LATENTS = ("fp8-block", "compressed-fp8-channel", "compressed-mxfp4", "compressed-w4", "gptq-4")
MIXED = {"qk_nope_head_dim": 24, "v_head_dim": 40}


def quantised_latents(form, path, *, latent=0.003, k_pe=9000.0, sizes=ALIGNED):
    options = LATENT["deepseek_v3"] | sizes | {"q_lora_rank": 32, "kv_lora_rank": 64, "qk_rope_head_dim": 16}
    model = tiny_model("deepseek_v3", **options, first_k_dense_replace=9)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_a_layernorm.weight.mul_(latent)
            layer.self_attn.kv_a_proj_with_mqa.weight[64:].mul_(k_pe)
    path.mkdir(exist_ok=True)
    coded = replace(FORMS[form], weights=r"(?:_proj|_mqa)\.weight$")
    if form == "fp8-block":
        says = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
        coded = replace(coded, says=says, options={"high": 32, "wide": 32, "name": "weight_scale_inv"})
    return coded.quantise(save_model(model.to(torch.bfloat16), path / "source"), path / "plain")


def amax(directory, out):
    layers = load_stats(measured(directory, out, "tensor")).layers.values()
    return [[x.amax.max().item() for x in (layer.k, layer.v)] for layer in layers]


@pytest.mark.parametrize("form", OF_LATENTS)
def test_scale_one_becomes_right_for_latents(form, tmp_path):
    # scales in float16 hold no factors as small as those of small latents would be
    latent = 3000.0 if form in ("compressed-w4", "gptq-4") else 0.003
    source, out = quantised_latents(form, tmp_path, latent=latent), tmp_path / "out"
    succeeded(bake(source, measured(source, tmp_path / "s", "tensor"), out, "--for", "fp8"))
    said = told(out)
    assert said["octaves_short"] == {"k": 0, "v": 0}
    old, new = observed(source, out)
    assert torch.equal(old.logits, new.logits)
    assert all(224 < x <= 448 for layer in amax(out, tmp_path / "after") for x in layer)
    codes = ["weight_packed", "qweight", "weight"]
    before, after = (load_file(each / "model.safetensors") for each in (source, out))
    for name in said["changed"]:
        assert name.endswith("norm.weight") or name.rpartition(".")[2] not in codes
        assert not torch.equal(before[name], after[name])


def test_k_pe_stays_where_blocks_mix_it(tmp_path):
    source, out = quantised_latents("fp8-block", tmp_path, k_pe=0.25, sizes=MIXED), tmp_path / "out"
    done = succeeded(bake(source, measured(source, tmp_path / "s", "tensor"), out, "--for", "fp8"))
    assert "note: k_pe of some layers stays up to 2^" in " ".join(done.stdout.split())
    said = told(out)
    before, after = (amax(each, tmp_path / f"{each.name}-s") for each in (source, out))
    octaves = [torch.tensor(448 / k_pe).log2().floor().item() for _, k_pe in before]
    assert said["octaves_short"] == {"k": 0, "v": max(octaves)}
    assert min(octaves) > 2
    assert [k_pe for _, k_pe in before] == [k_pe for _, k_pe in after]
    assert all(224 < latent <= 448 for latent, _ in after)
    assert not any("q_b_proj" in name or "mqa" in name for name in said["changed"])


@pytest.mark.parametrize("k_pe", [0.25, 9000.0])
def test_static_scales_of_what_keys_and_values_are_made_of(k_pe, tmp_path):
    source, out = quantised_latents("compressed-fp8-channel", tmp_path, k_pe=k_pe), tmp_path / "out"
    name = f"{ATTENTION.format(0)}.kv_b_proj.input_scale"
    edit_tensors(source, lambda tensors: tensors.update({name: torch.tensor([0.25])}))
    done = bake(source, measured(source, tmp_path / "s", "tensor"), out, "--for", "fp8")
    if k_pe > 1:
        one_line_error(done, "has one input scale")
        return
    factor = told(out)["factors"][ATTENTION.format(0)]
    assert factor["k"] != [1.0] == factor["v"]
    assert load_file(out / "model.safetensors")[name].item() == 0.25 * factor["k"][0]
