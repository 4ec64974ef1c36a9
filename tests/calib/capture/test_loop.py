"""The measurement: exact, blind to padding, and precise about bad numbers."""

import pytest
import torch
from accelerate import cpu_offload
from families import tiny_model
from transformers import DynamicCache

from calib.capture.attention import map_attention
from calib.capture.loop import calibrate
from calib.data import make_batches
from calib.errors import CalibrationError, InputError
from calib.recipe import load_recipe
from calib.scales.observers import NUM_BINS, magnitude_histogram

GENERATOR = torch.Generator().manual_seed(1)
SAMPLES = [torch.randint(3, 128, (length,), generator=GENERATOR).tolist() for length in (24, 24, 23, 11, 7)]
RECIPE = load_recipe(None)


def batches(size=2):
    return make_batches(SAMPLES, size, pad_id=0)


def test_padding_is_excluded():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 1e4  # token 0 is padding
        model.model.norm.weight.fill_(1)
    padded = make_batches([SAMPLES[0], SAMPLES[2]], 2, pad_id=0)
    assert [bool(batch.attention_mask.all()) for batch in padded] == [False]
    alone = make_batches([SAMPLES[0], SAMPLES[2]], 1, pad_id=0)
    together, apart = (calibrate(model, b, RECIPE) for b in (padded, alone))
    for one, other in zip(together.layers.values(), apart.layers.values(), strict=True):
        # float32 kernels differ by rounding between batch shapes, padding would differ by far more
        torch.testing.assert_close(one.v.amax, other.v.amax, rtol=1e-4, atol=0)
    assert together.tokens == 47


def rotated(model, hidden, layer):
    """Queries [T, H, D] of one sample, by the formula: projected, then RoPE in its two halves."""
    q = layer.self_attn.q_proj(layer.input_layernorm(hidden)).unflatten(-1, (4, 16))
    first, second = q.chunk(2, -1)
    positions = torch.arange(len(hidden))[:, None]
    angles = (positions * model.config.rope_parameters["rope_theta"] ** (-torch.arange(8) / 8))[:, None]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def test_q_is_recomputed_by_hand():
    model = tiny_model("llama")
    recipe = load_recipe(None, {"observer.name": "mse", "targets": "qkv"})
    stats = calibrate(model, make_batches(SAMPLES, 1, pad_id=0), recipe)
    assert stats.tokens == sum(map(len, SAMPLES))
    with torch.inference_mode():
        inputs = [
            model(torch.tensor([sample]), output_hidden_states=True).hidden_states for sample in SAMPLES
        ]
        for i, (layer, seen) in enumerate(zip(model.model.layers, stats.layers.values(), strict=True)):
            q = torch.cat([rotated(model, hidden[i][0], layer) for hidden in inputs])
            # float32: angles and products are rounded in another order
            torch.testing.assert_close(seen.q.amax, q.abs().amax(0), rtol=1e-5, atol=0)
            expected = magnitude_histogram(q)
            # such a difference may move a value to the bin beside its own
            moved = (seen.q.histogram - expected).cumsum(-1).abs().sum()
            assert moved <= 1e-2 * q.numel()
            assert torch.equal(seen.q.histogram.sum(-1), expected.sum(-1))


def test_histograms_and_means_are_those_of_the_cache():
    model = tiny_model("llama")
    recipe = load_recipe(None, {"observer.name": "mse", "means": True, "targets": "qkv"})
    stats = calibrate(model, make_batches(SAMPLES, 1, pad_id=0), recipe)
    held = []
    for sample in SAMPLES:
        held.append(cache := DynamicCache())
        with torch.inference_mode():
            model(torch.tensor([sample]), past_key_values=cache, use_cache=True)
    for i, layer in enumerate(stats.layers.values()):
        keys = torch.cat([cache.layers[i].keys for cache in held], dim=2)[0].transpose(0, 1)
        assert torch.equal(layer.k.histogram, magnitude_histogram(keys))
        assert torch.equal(layer.k.histogram.sum(-1), torch.tensor([89 * 16] * 2))
        # every batch's sum is rounded to a multiple of 2**-20
        atol = len(SAMPLES) * 2**-21
        torch.testing.assert_close(layer.k.total, keys.double().sum(0), rtol=0, atol=atol)
        assert torch.equal(layer.k.low, keys.amin(0))
        assert torch.equal(layer.k.high, keys.amax(0))
        assert layer.q.low is None
        assert layer.q.histogram.shape == (4, NUM_BINS)


def fail_if_run(module):
    module.register_forward_hook(lambda *_: pytest.fail("it ran for nothing"))


def test_neither_the_lm_head_nor_anything_behind_the_last_k_and_v_is_computed():
    model = tiny_model("llama")
    mapped = map_attention(model)
    fail_if_run(model.lm_head)
    fail_if_run(model.model.layers[-1].self_attn.o_proj)
    calibrate(model, batches(), RECIPE, attention=mapped)


def test_a_model_with_offloaded_weights_runs_to_its_end():
    model, plain = tiny_model("llama"), tiny_model("llama")
    cpu_offload(model, execution_device="cpu")
    found, expected = calibrate(model, batches(), RECIPE), calibrate(plain, batches(), RECIPE)
    for one, other in zip(found.layers.values(), expected.layers.values(), strict=True):
        assert torch.equal(one.k.amax, other.k.amax)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_training_modes_come_back_after_success_and_failure():
    model = tiny_model("llama").train()
    model.model.norm.eval()
    modes = [module.training for module in model.modules()]
    calibrate(model, batches(), RECIPE)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(InputError, match="no token was read"):
        calibrate(model, [], RECIPE)
    assert [module.training for module in model.modules()] == modes


def test_nan_names_layer_tensor_and_sample():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = float("nan")
    samples = [[5, 6, 7], [8, 9, 10], [11, 77, 12], [13, 14, 15]]
    with pytest.raises(CalibrationError, match=r"model.layers.0.self_attn: K .* in sample 2;"):
        calibrate(model, make_batches(samples, 4, pad_id=0), RECIPE)


def test_infinity_in_v_of_a_later_layer_is_named():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0] = 3e38
    with pytest.raises(CalibrationError, match=r"model.layers.1.self_attn: V .* in sample 0;"):
        calibrate(model, make_batches(SAMPLES, 1, pad_id=0), RECIPE)


def test_each_batch_is_reported():
    seen = []
    calibrate(tiny_model("llama"), batches(), RECIPE, on_batch=lambda b, _: seen.append(b.num_tokens))
    # the largest first, the others in any order
    assert (seen[0], sorted(seen)) == (48, [7, 11, 23, 48])
