"""`fp8kv bake` of latent attention (MLA): 1.0 becomes right for the latent and k_pe together."""

import pytest
import torch
from baking import TOKENS, bake, calibrated, in_float32
from families import LATENT, save_model, tiny_model
from transformers import DynamicCache

from calib.scales.stats_file import load_stats

FLAGS = ("--strategy", "tensor", "--format", "fp8kv")
# what the latent and k_pe of one layer after the other are multiplied by
SIZES = ((0.003, 9000.0), (3000.0, 0.002), (0.7, 40.0), (1.3, 0.9))


def latent_modules(model):
    return [m for m in model.modules() if hasattr(m, "kv_a_proj_with_mqa")]


def latent_directory(path, model_type, *, dtype=torch.bfloat16, **options):
    """A model whose latents and k_pe are far too large or small for FP8."""
    model = tiny_model(model_type, **LATENT[model_type] | options)
    with torch.no_grad():
        for module, (latent, k_pe) in zip(latent_modules(model), SIZES, strict=False):
            module.kv_a_layernorm.weight.mul_(latent)
            rank = module.kv_lora_rank
            for parameter in module.kv_a_proj_with_mqa.parameters():
                parameter[rank:].mul_(k_pe)
    return save_model(model.to(dtype), path)


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
    done = bake(source, before, baked, "--for", "fp8")
    assert done.exit_code == 0, done.stderr
    (logits, layers), (same, baked_layers) = cached(source), cached(baked)
    assert torch.equal(logits, same)
    assert len(layers) == len(baked_layers) == len(amax(before)) > 0
    factors = torch.tensor(
        [
            [(new.abs().max() / old.abs().max()).item() for old, new in zip(*pair, strict=True)]
            for pair in zip(layers, baked_layers, strict=True)
        ]
    )
    for pair, news, factor in zip(layers, baked_layers, factors, strict=True):
        assert all(torch.equal(x * f, y) for x, y, f in zip(pair, news, factor, strict=True))
    assert factors.log2().frac().abs().max() == 0
    assert (factors.log2().abs() > 3).any(0).all()
    after = amax(calibrated(baked, tmp_path / "after", *FLAGS))
    assert torch.equal(after, amax(before) * factors)
    assert after.min() > 224
    assert after.max() <= 448
