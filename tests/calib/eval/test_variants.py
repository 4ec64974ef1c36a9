"""What the variants are made of."""

import torch
from families import FAMILIES, save_model, tiny_model

from calib.data import make_batches
from calib.eval.run import evaluate
from calib.eval.schema import Suite
from calib.eval.variants import BUILT_IN, REFERENCE, build_variants
from calib.measure.loop import calibrate
from calib.recipe import load_recipe
from fp8kv_runtime.hf import swap_attention

SAMPLES = [list(range(1 + i, 40 + i)) for i in range(3)]


def all_keys(model):
    """K of every layer, [N, K, D] over all tokens of all samples."""
    seen = {}

    def attend(original, module, query, key, *args, **kwargs):
        seen.setdefault(module.layer_idx, []).append(key[0].transpose(0, 1))
        return original(module, query, key, *args, **kwargs)

    with torch.inference_mode(), swap_attention(model, attend):
        for sample in SAMPLES:
            model(torch.tensor([sample]))
    return {layer_idx: torch.cat(keys) for layer_idx, keys in seen.items()}


def test_centred_scales_cover_exactly_what_is_left_of_k():
    model = tiny_model("llama")
    recipe = load_recipe(None, {"means": True, "targets": "qkv", "observer.name": "mse"})
    stats = calibrate(model, make_batches(SAMPLES, 1, pad_id=0), recipe)
    variants = {variant.name: variant for variant in build_variants(stats, stats)}
    assert {REFERENCE, *variants} == set(BUILT_IN)
    keys = all_keys(model)
    for layer in variants["channel+k_center"].scales.layers.values():
        mean = keys[layer.layer_idx].double().mean(0).float()
        left = (keys[layer.layer_idx] - mean).abs().amax(0)
        torch.testing.assert_close(layer.k_center, mean)
        torch.testing.assert_close(layer.k * 448, left)


def test_a_model_with_one_attention_implementation_has_one_control(tmp_path):
    model = save_model(tiny_model("gpt_oss", **FAMILIES["gpt_oss"]), tmp_path / "model")
    choices = {"data.dataset": "random", "dtype": "float32", "evaluation.variants": ("tensor",)}
    found = evaluate(str(model), load_recipe(None, choices), suite=Suite(2, 2, 24, 0, 5, (), (), 1))
    assert [name for name, m in found.measured.items() if m.variant.kind == "control"] == ["bf16"]
    assert any("one attention implementation" in line for line in found.warnings)
