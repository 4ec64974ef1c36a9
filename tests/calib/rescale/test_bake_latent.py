"""`fp8kv bake` of latent attention (MLA): 1.0 becomes right for the latent and k_pe together."""

import json
import re
from pathlib import Path

import pytest
import torch
from baking import TOKENS, bake, calibrated, in_float32, latent_directory
from command_line import fp8kv, json_of, one_line_error, succeeded
from families import LATENT, tiny_model
from safetensors.torch import load_file
from transformers import DynamicCache

from calib.engines.catalogue import find_engine
from calib.errors import InputError, UnsupportedModelError
from calib.files.model_directory import open_model_directory
from calib.rescale.bake import baked_factors
from calib.rescale.factors import uniform_factors
from calib.rescale.weight_changes import cached_attention, list_changes
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
def test_scale_one_becomes_right(model_type, tmp_path):
    source, baked = latent_directory(tmp_path / "source", model_type), tmp_path / "baked"
    before = calibrated(source, tmp_path / "before", *FLAGS)
    succeeded(bake(source, before, baked, "--for", "fp8"))
    (logits, layers), (same, baked_layers) = cached(source), cached(baked)
    assert torch.equal(logits, same)
    assert len(layers) == len(baked_layers) == len(amax(before)) > 0
    pairs = [*zip(layers, baked_layers, strict=True)]
    factors = torch.tensor(
        [[(y.abs().max() / x.abs().max()).item() for x, y in zip(*pair, strict=True)] for pair in pairs]
    )
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


def test_what_is_said(deepseek, tmp_path):
    assert "one factor for the latent and one for k_pe in each of 3 layers" in deepseek.shown
    said = json.loads((deepseek.baked / "fp8kv_bake.json").read_text())
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
    said = json.loads(succeeded(bake(source, scales, baked, "--for", "fp8", "--json")).stdout)
    bias = "model.layers.0.self_attn.kv_a_proj_with_mqa.bias"
    assert {bias, "model.layers.0.self_attn.q_proj.weight"} <= {*said["changed"]}
    # of which only that of k_pe has a factor
    old, new = (load_file(directory / "model.safetensors")[bias] for directory in (source, baked))
    rank = LATENT["deepseek_v3"]["kv_lora_rank"]
    assert torch.equal(old[:rank], new[:rank])
    assert len((new[rank:] / old[rank:]).unique()) == 1
    assert torch.equal(cached(source)[0], cached(baked)[0])
    assert amax(calibrated(baked, tmp_path / "after", *FLAGS)).min() > 224
    factors = json.loads((baked / "fp8kv_bake.json").read_text())["factors"]
    model, checkpoint = in_float32(source), open_model_directory(source)
    found, _ = baked_factors(model, checkpoint, load_stats(scales), "fp8")
    for layer, module in zip(found.values(), factors.values(), strict=True):
        assert (layer.k.unique().tolist(), layer.v.unique().tolist()) == (module["k"], module["v"])
    with pytest.raises(InputError, match="no engine holds as integers"):
        baked_factors(model, checkpoint, load_stats(scales), "int8")


def test_what_is_refused(deepseek, tmp_path):
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
