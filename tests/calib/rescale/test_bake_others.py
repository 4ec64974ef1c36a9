"""`fp8kv bake` of latent attention (MLA), of quantised weights, and where norms multiply by 1 + weight."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from baking import OTHERS, TOKENS, bake, calibrated, in_float32, latent_directory, scales_of, seen
from coded_forms import FORMS
from command_line import SMALL, fp8kv, json_of, one_line_error, ran, succeeded
from families import FAMILIES, LATENT, edit_json, edit_tensors, save_model, tiny_model
from processes import assert_as_before, held
from safetensors.torch import load_file
from transformers import DynamicCache

from calib.engines.catalogue import find_engine
from calib.errors import InputError, UnsupportedModelError
from calib.files.model_directory import open_model_directory
from calib.files.tensors import stored_tensors
from calib.models.quantized.coded_weight import CodedWeight, WeightScheme
from calib.rescale import factors, pipeline
from calib.rescale.bake import baked_factors
from calib.rescale.factors import nearest_powers, uniform_factors
from calib.rescale.proof import Observation, apply_changes, load_exact, observe
from calib.rescale.stored_weights import edited_scales
from calib.rescale.weight_changes import WeightChange, cached_attention, is_held, list_changes
from calib.scales.stats_file import load_stats

DOCS, FP8 = Path(__file__).parents[3] / "docs" / "bake.md", "--kv-cache-dtype fp8"
FLAGS = ("--strategy", "tensor", "--format", "fp8kv")


# by engine, the flag with which 1.0 is right: where latents are known to be cached
SERVED = {
    "deepseek_v3": {"vllm": FP8, "sglang": f"{FP8}_e4m3", "lmdeploy": None, "tgi": None, "aphrodite": None}
    | {"tensorrt-llm": "--kv_cache_dtype fp8"},
    # its class caches K and V of heads, which are as large as k_pe's factor makes them
    "minicpm3": {"vllm": f"--model-impl transformers {FP8}", "sglang": f"{FP8}_e4m3", "tensorrt-llm": None},
    "kimi_linear": {"vllm": FP8},  # which was not built: by its model type
    "youtu": {"sglang": None},
}


@torch.inference_mode()
def cached(directory):
    """Logits, and latent and k_pe as transformers itself caches them, in float32."""
    model = in_float32(directory)
    cache = DynamicCache(config=model.config)
    logits = model(TOKENS, past_key_values=cache, use_cache=True).logits
    layers = [x for x in cache.layers if getattr(x, "keys", None) is not None]
    return logits, [(x.keys, x.values) for x in layers if x.keys.numel()]


def amax(calibration):
    """[layers, 2]: of the latent, of k_pe."""
    layers = load_stats(calibration).layers.values()
    assert all(layer.latent for layer in layers)
    return torch.tensor([[x.amax.max().item() for x in (each.k, each.v)] for each in layers])


@pytest.mark.parametrize("model_type", LATENT)
def test_scale_one_becomes_right_for_every_family_of_latents(model_type, tmp_path):
    source, baked = latent_directory(tmp_path / "source", model_type), tmp_path / "baked"
    before = calibrated(source, tmp_path / "before", *FLAGS)
    succeeded(bake(source, before, baked, "--for", "fp8"))
    (logits, layers), (same, baked_layers) = cached(source), cached(baked)
    assert torch.equal(logits, same)
    assert len(layers) == len(baked_layers) == len(amax(before)) > 0
    pairs = [*zip(layers, baked_layers, strict=True)]
    largest = torch.tensor([[[x.abs().max().item() for x in each] for each in pair] for pair in pairs])
    factors = largest[:, 1] / largest[:, 0]
    for (olds, news), factor in zip(pairs, factors, strict=True):
        assert all(torch.equal(x * f, y) for x, y, f in zip(olds, news, factor, strict=True))
    assert factors.log2().frac().abs().max() == 0
    assert (factors.log2().abs() > 3).any(0).all()
    after = amax(calibrated(baked, tmp_path / "after", *FLAGS))
    assert torch.equal(after, amax(before) * factors)
    assert 224 < after.min() <= after.max() <= 448
    for engine, flag in SERVED.get(model_type, {}).items():
        (said,) = json_of("verify", baked, "--engine", engine, status=flag is None)["engines"]
        served = said["flag"] if flag else said["refused"] or said["layers"][0]["reason"]
        assert served == flag if flag else "latents (MLA)" in served
        shown = " ".join(fp8kv("verify", baked, "--engine", engine).stdout.split())
        assert ("with --model-impl transformers alone" in shown) == ("transformers" in (flag or ""))
        command, card = find_engine(engine).serve.format(path=baked), (baked / "README.md").read_text()
        assert (f"{command} {flag}\n" in card) if flag else (command not in card)


def test_what_is_said_of_latents(deepseek, tmp_path):
    assert "one factor for the latent and one for k_pe in each of 3 layers" in deepseek.shown
    said = told(deepseek.baked)
    assert said["latent"]
    assert said["layers_with_factors_per_head"] == said["octaves_short"] == {"k": 0, "v": 0}
    [section] = re.findall(r"## Latent attention\n(.*?)\n## ", DOCS.read_text(), re.DOTALL)
    assert {*re.findall(r"`(\w+)`", section[section.index("The tests bake") :])} == LATENT.keys()
    card = (deepseek.baked / "README.md").read_text()
    assert "moved into latents and k_pe, from queries and what reads latents" in card
    against = calibrated(deepseek.baked, tmp_path / "again", *FLAGS)
    assert fp8kv("verify", deepseek.baked, "--against", against).exit_code == 0
    one_line_error(bake(deepseek.baked, against, tmp_path / "no", "--for", "fp8"), "is baked for fp8")
    # the classes of another version were not run
    for version, status in (("0.32.0", 0), ("0.31.0", 1), ("0.4.2", 1)):
        flags = ("--engine", "vllm", "--version", version)
        assert fp8kv("verify", deepseek.baked, *flags).exit_code == status


@torch.inference_mode()
def test_biases_queries_without_a_latent_and_the_factors_that_an_evaluation_takes(tmp_path):
    options = {"dtype": torch.float32, "attention_bias": True, "q_lora_rank": None}
    source, baked = latent_directory(tmp_path / "source", "deepseek_v3", **options), tmp_path / "baked"
    scales = calibrated(source, tmp_path / "scales", *FLAGS)
    flags = ("--for", "fp8", "--dtype", "float32", "--json")
    said = json.loads(succeeded(bake(source, scales, baked, *flags)).stdout)
    assert f"vllm serve {baked} {FP8} --dtype bfloat16\n" in (baked / "README.md").read_text()
    bias = "model.layers.0.self_attn.kv_a_proj_with_mqa.bias"
    assert {bias, "model.layers.0.self_attn.q_proj.weight"} <= {*said["changed"]}
    # of which only that of k_pe has a factor
    old, new = (load_file(directory / "model.safetensors")[bias] for directory in (source, baked))
    rank = LATENT["deepseek_v3"]["kv_lora_rank"]
    assert torch.equal(old[:rank], new[:rank])
    assert len((new[rank:] / old[rank:]).unique()) == 1
    assert torch.equal(cached(source)[0], cached(baked)[0])
    assert amax(calibrated(baked, tmp_path / "after", *FLAGS)).min() > 224
    factors = told(baked)["factors"]
    model, checkpoint = in_float32(source), open_model_directory(source)
    found, _ = baked_factors(model, checkpoint, load_stats(scales), "fp8")
    for layer, module in zip(found.values(), factors.values(), strict=True):
        assert (layer.k.unique().tolist(), layer.v.unique().tolist()) == (module["k"], module["v"])
    with pytest.raises(InputError, match="no engine holds as integers"):
        baked_factors(model, checkpoint, load_stats(scales), "int8")


def test_what_is_refused_of_latents(deepseek, tmp_path):
    out = tmp_path / "out"
    done = bake(deepseek.source, deepseek.scales, out, "--for", "int8")
    one_line_error(done, "caches latents (MLA), which no engine holds as integers", "--for fp8")
    assert fp8kv("stress", deepseek.source, "-o", tmp_path / "twin").exit_code == 0
    done = bake(tmp_path / "twin", deepseek.scales, out, "--for", "fp8")
    one_line_error(done, "kv_a_layernorm.weight' differs")
    other = latent_directory(tmp_path / "other", "deepseek_v3", kv_lora_rank=24)
    assert bake(other, deepseek.scales, out, "--for", "fp8").exit_code == 2
    assert not out.exists()


@pytest.mark.parametrize("lacking", [None, "kv_a_layernorm", "kv_b_proj", "qk_nope_head_dim"])
def test_a_norm_of_k_pe_takes_its_factor_and_a_module_that_is_not_known_is_refused(lacking):
    model = tiny_model("deepseek_v3", **LATENT["deepseek_v3"])
    name, module = next(iter(cached_attention(model).items()))
    modules, layer = {name: module}, model.get_submodule(name)
    factors = uniform_factors(modules, 2.0, 0.5)
    if lacking:
        delattr(layer, lacking)
        with pytest.raises(UnsupportedModelError, match=f"has no .*{lacking}"):
            list_changes(model, modules, factors)
        return
    layer.k_rope_only_layernorm = type(layer.kv_a_layernorm)(module.v_head_dim)
    changes = list_changes(model, modules, factors)
    assert {each.child: each.factor.min().item() for each in changes} == {
        "kv_a_layernorm.weight": 2,
        "k_rope_only_layernorm.weight": 0.5,
        "q_b_proj.weight": 2,
        "kv_b_proj.weight": 0.25,
    }


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
def test_scale_one_becomes_right_for_quantised_weights(form, tmp_path):
    source, out = quantised(form, tmp_path / "source"), tmp_path / "out"
    before = measured(source, tmp_path / "before")
    succeeded(bake(source, before, out, "--for", "fp8"))
    old, new = observed(source, out)
    assert torch.equal(old.logits, new.logits)
    after = scales_of(measured(out, tmp_path / "after"))
    factors = scales_of(before) / after
    assert factors.log2().frac().abs().max() == 0
    for index, granularity in enumerate(HELD[form]):
        scales = after[:, index]
        assert scales.max() <= 1
        assert scales.min() > 0.5 if granularity == "head" else scales.amax(-1).min() > 0.5
        assert bool((factors[:, index, 0] == factors[:, index, 1]).all()) == (granularity == "layer")
    names = {"model.safetensors", "config.json", "fp8kv_bake.json", "README.md"}
    for file in source.iterdir():
        assert ((out / file.name).read_bytes() == file.read_bytes()) != (file.name in names)
    was, became = (json.loads((each / "config.json").read_text()) for each in (source, out))
    assert became == was | {"fp8kv_bake": became["fp8kv_bake"]}


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
    assert "note: layers that stay as they are: 1, the first of" in " ".join(done.stdout.split())
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


@pytest.mark.parametrize("form", OF_LATENTS)
def test_scale_one_becomes_right_for_quantised_latents(form, tmp_path):
    # scales in float16 hold no factors as small as those of small latents would be
    latent = 3000.0 if form in ("compressed-w4", "gptq-4") else 0.003
    source, out = quantised_latents(form, tmp_path, latent=latent), tmp_path / "out"
    succeeded(bake(source, measured(source, tmp_path / "s", "tensor"), out, "--for", "fp8"))
    said = told(out)
    assert said["octaves_short"] == {"k": 0, "v": 0}
    old, new = observed(source, out)
    assert torch.equal(old.logits, new.logits)
    after = amax(measured(out, tmp_path / "after", "tensor"))
    assert 224 < after.min() <= after.max() <= 448
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
    before, after = (amax(measured(each, tmp_path / f"{each.name}-s", "tensor")) for each in (source, out))
    octaves = (448 / before[:, 1]).log2().floor()
    assert said["octaves_short"] == {"k": 0, "v": octaves.max()}
    assert octaves.min() > 2
    assert torch.equal(before[:, 1], after[:, 1])
    assert 224 < after[:, 0].min() <= after[:, 0].max() <= 448
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


def gemma(path, model_type, dtype=torch.bfloat16, size=1.0):
    """A model of another size of K than its norms are made with."""
    model = tiny_model(model_type, **(FAMILIES | OTHERS)[model_type])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "k_norm" in name:
                weight.copy_(((1 + weight) * size - 1).bfloat16())
    return save_model(model.to(dtype), path)


@pytest.fixture(scope="module")
def small_gemma(tmp_path_factory):
    source = gemma(tmp_path_factory.mktemp("gemma") / "source", "gemma3_text")
    return source, calibrated(source, source.with_name("scales"), "--format", "fp8kv")


@pytest.mark.parametrize("size", [1.0, 64.0])  # K inside FP8, and far beyond
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3_next"])
def test_norms_of_one_plus_for_both_purposes_in_both_dtypes(model_type, dtype, size, tmp_path):
    source = gemma(tmp_path / "source", model_type, dtype, size)
    flags = ("--strategy", "attn_head", "--format", "fp8kv")
    scales = calibrated(source, tmp_path / "scales", *flags)
    (logits, _), old = seen(source), load_file(source / "model.safetensors")
    for purpose in ("fp8", "int8"):
        out = tmp_path / purpose
        done = succeeded(bake(source, scales, out, "--for", purpose))
        said = told(out)
        k = [torch.tensor(each["k"])[0].log2() for each in said["factors"].values()]
        octaves = [each if each.dim() else each.expand(24) for each in k]
        assert any(bool(each.any()) for each in octaves)
        assert all(torch.equal(each, each.round()) for each in octaves)
        assert torch.equal(logits, seen(out)[0]) == said["exact"] == (said["rounded"] == [])
        shown, card = " ".join(done.stdout.split()), (out / "README.md").read_text()
        assert ("bit for bit" in shown) == ("bit for bit" in card) == said["exact"]
        assert ("are rounded, as" in shown) == (not said["exact"])
        assert all("_norm.weight" in name for name in said["rounded"])
        new = load_file(out / "model.safetensors")
        # what rounding does to the product that scores see, in float64
        for name, powers in zip((name for name in old if "k_norm" in name), octaves, strict=True):
            products, off = [], 0
            for each, sign in ((name, 1), (name.replace("k_norm", "q_norm"), -1)):
                was, became = (1 + weights[each].float() for weights in (old, new))
                wanted = was.double() * (sign * powers).exp2()
                error = (became.double() - wanted).abs()
                assert bool(error.any()) == (each in said["rounded"])
                off, products = off + error / wanted, [*products, was.double()]
            product = products[0] * products[1]
            # all channels together: one rounding each of Q and of K, to bfloat16
            assert (off * product).square().sum() <= 2 * (product * 2**-8).square().sum()
        if purpose == "fp8":
            assert scales_of(calibrated(out, tmp_path / "after", *flags)).max() <= 1


def test_the_recommendation_knows_it(small_gemma, tmp_path):
    done = ran("eval", small_gemma[0], "-o", tmp_path / "page", "--caches", "int8_per_token_head", *SMALL)
    assert "int8_per_token_head, baked" in (tmp_path / "page" / "report.json").read_text()
    said = " ".join((done.stdout + done.stderr).split())
    assert "no rows on weights baked" not in said
    assert "leave out that `bake` rounds 6 weights of norms: a KL of " in said


def test_a_rounding_that_scores_would_notice_is_not_held():
    def norm(which, factor):
        return WeightChange("attention", f"{which}_norm.weight", torch.full((4,), factor), True)

    def held_by(dtype, weight, factor):
        return is_held([(norm("q", 1 / factor), weight.to(dtype)), (norm("k", factor), weight.to(dtype))])

    weight = torch.tensor([0.25, 0.3, -0.3, 0.0]).bfloat16()
    assert held_by(torch.bfloat16, weight, 1.0).all()
    assert held_by(torch.bfloat16, weight, 2.0)[:2].all()
    # 1.3 / 64 - 1 to eight bits; 1.25 and 1 fit
    assert held_by(torch.bfloat16, weight, 64.0).tolist() == [True, False, False, True]
    assert held_by(torch.float32, weight, 64.0).all()
    # weights of float32's own are held to float32's rounding
    assert not held_by(torch.float32, torch.tensor([0.1, 1e-6, 0.2, 0.3]), 64.0)[1]
    table = torch.zeros(len(factors._POWERS), 2, dtype=torch.bool)
    assert nearest_powers(table, torch.tensor([0, 1]))[0] == float("inf")
    table[16] = True
    assert nearest_powers(table, torch.tensor([0, 1]))[1].tolist() == [0, 0]


@pytest.mark.parametrize(("last", "error"), [("self_attn.q_proj", KeyError), ("nowhere", AttributeError)])
def test_the_model_is_as_before_after_an_error_inside_and_on_the_way_in(last, error):
    model, layer = tiny_model("gemma3_text"), "model.layers.0"
    before, two = held(model), torch.tensor(2.0)
    norm = WeightChange(f"{layer}.input_layernorm", "weight", two, adds_one=True)
    other = WeightChange(f"{layer}.{last}", "weight", two)
    with pytest.raises(error), apply_changes(model, [norm, other]):
        assert model.get_submodule(norm.module)._forward_hooks
        model(TOKENS)
        raise KeyError
    assert_as_before(model, before)


def test_a_rounded_norm_that_is_written_otherwise_is_seen(small_gemma, tmp_path, monkeypatch):
    write = pipeline.write_weights

    def write_another(checkpoint, edits, out, *more):
        write(checkpoint, edits, out, *more)
        norm = next(name for name in edits if name.endswith("k_norm.weight"))
        edit_tensors(out, lambda tensors: tensors[norm][0].mul_(1.0625))

    monkeypatch.setattr(pipeline, "write_weights", write_another)
    done = bake(*small_gemma, tmp_path / "out", "--for", "int8")
    one_line_error(done, "k_norm.weight' was not written as it was rounded")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("value", "is_finite"), [(-torch.inf, True), (torch.inf, False), (torch.nan, False)])
def test_only_a_token_that_is_ruled_out_may_be_infinite(value, is_finite):
    kv = torch.ones(1, 1, 2, 4)
    logits = torch.tensor([[[0.0, value], [1.0, 2.0]]])
    assert Observation(logits, {"layer": (kv, kv)}).is_finite == is_finite
    assert not Observation(torch.ones(1, 2, 2), {"layer": (kv, kv - torch.inf)}).is_finite
