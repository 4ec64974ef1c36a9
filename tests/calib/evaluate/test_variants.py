"""What the variants with static scales are made of."""

from dataclasses import replace

import pytest
import torch
from families import FAMILIES, save_model, tiny_model, tiny_vision_language_model

from calib.capture.loop import calibrate
from calib.data import make_batches
from calib.errors import InputError
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.variants import BUILT_IN, REFERENCE, build_variants, drop_first_tokens
from calib.recipe import load_recipe
from calib.scales.observers import AbsMax
from calib.scales.stats import KVStats, TensorStats
from fp8kv_runtime.hf import swap_attention

SAMPLES = [list(range(1 + i, 40 + i)) for i in range(3)]
RECIPE = load_recipe(None, {"means": True, "targets": "qkv", "observer.name": "mse"})


@pytest.fixture(scope="module")
def model():
    """A model to which only a sample's first token is a 1: no key is larger than its."""
    model = tiny_model("llama")
    first = model.model.layers[0].self_attn.k_proj.weight
    with torch.no_grad():
        model.model.embed_tokens.weight[1] = first[first.norm(dim=1).argmax()]
    return model


@pytest.fixture(scope="module")
def stats(model):
    return calibrate(model, make_batches(SAMPLES, 1, pad_id=0), RECIPE)


@pytest.fixture(scope="module")
def variants(stats):
    return {variant.name: variant for variant in build_variants(stats, stats)}


@pytest.fixture(scope="module")
def keys(model):
    """K of every layer, [N, K, D] over all tokens of all samples."""
    seen = {}

    def attend(original, module, query, key, *args, **kwargs):
        seen.setdefault(module.layer_idx, []).append(key[0].transpose(0, 1))
        return original(module, query, key, *args, **kwargs)

    with torch.inference_mode(), swap_attention(model, attend):
        for sample in SAMPLES:
            model(torch.tensor([sample]))
    return {layer_idx: torch.cat(keys) for layer_idx, keys in seen.items()}


def test_centred_scales_cover_exactly_what_is_left_of_k(variants, keys):
    assert {REFERENCE, *variants} == set(BUILT_IN)
    for layer in variants["channel+k_center"].scales.layers.values():
        mean = keys[layer.layer_idx].double().mean(0).float()
        left = (keys[layer.layer_idx] - mean).abs().amax(0)
        torch.testing.assert_close(layer.k_center, mean)
        torch.testing.assert_close(layer.k * 448, left)


def test_rest_has_the_scales_of_a_calibration_that_skips_first_tokens(model, variants, keys):
    skipping = calibrate(model, make_batches(SAMPLES, 1, pad_id=0, skip_first=1), RECIPE)
    expected = skipping.scales(strategy="tensor", observer=AbsMax())
    differ = 0
    for name, layer in variants["rest"].scales.layers.items():
        rest = keys[layer.layer_idx].unflatten(0, (3, 39))[:, 1:]
        assert torch.equal(layer.k, rest.abs().amax().view(1) / 448)
        assert torch.equal(layer.v, expected.layers[name].v)
        differ += layer.k.item() < variants["tensor"].scales.layers[name].k.item()
    assert differ  # here the first token matters


def test_a_head_that_only_the_first_token_sees_keeps_its_amax(stats):
    name, layer = next(iter(stats.layers.items()))
    positions = layer.k.positions.clone()
    positions[1, 1:] = 0
    layer = replace(layer, k=replace(layer.k, positions=positions))
    rest = drop_first_tokens(KVStats({name: layer})).layers[name]
    assert rest.k.amax[1].item() == layer.k.amax[1].max()
    assert rest.k.amax[0].item() == layer.k.positions[0, 1:].max()
    with pytest.raises(InputError, match="calibrate again"):
        drop_first_tokens(KVStats({name: replace(layer, k=TensorStats(layer.k.amax))}))


@pytest.mark.parametrize("family", ["gpt_oss", "paligemma"])
def test_a_model_with_one_attention_implementation_has_one_control(family, tmp_path):
    model = (
        tiny_vision_language_model(family)
        if family == "paligemma"
        else tiny_model(family, **FAMILIES[family])
    )
    model = save_model(model, tmp_path / "model")
    choices = {"data.dataset": "random", "dtype": "float32", "evaluation.variants": ("tensor",)}
    found = evaluate(str(model), load_recipe(None, choices), suite=Suite(3, 2, 24, 0, 5, (), (), 1))
    assert [name for name, m in found.measured.items() if m.variant.kind == "control"] == ["bf16"]
    assert any("one attention implementation" in line for line in found.warnings)
