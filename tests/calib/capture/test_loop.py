"""The measurement: exact, place by place, blind to padding, and precise about bad numbers."""

import pytest
import torch
from accelerate import cpu_offload
from families import FAMILIES, LATENT, tiny_model
from transformers import DynamicCache

from calib.capture.attention import map_attention
from calib.capture.loop import calibrate, singles
from calib.data import make_batches
from calib.errors import CalibrationError, InputError
from calib.recipe import load_recipe
from calib.scales.observers import NUM_BINS, magnitude_histogram
from calib.scales.places import BUCKETS, POSITION_BUCKETS

GENERATOR = torch.Generator().manual_seed(1)
SAMPLES = [torch.randint(3, 128, (length,), generator=GENERATOR).tolist() for length in (24, 24, 23, 11, 7)]
RECIPE = load_recipe(None)


def batches(size=2, skip_first=0):
    return make_batches(SAMPLES, size, pad_id=0, skip_first=skip_first)


@torch.inference_mode()
def cached(model, batches, cache_config=None):
    """Of each sample as it is read, K and V [H, T, D] of each layer, without padding."""
    for batch in batches:
        # without a config a cache holds all tokens, also of layers with a window
        cache = DynamicCache(config=cache_config)
        model(batch.input_ids, attention_mask=batch.attention_mask, past_key_values=cache)
        for row, length in enumerate(batch.attention_mask.sum(1).tolist()):
            yield [(layer.keys[row, :, :length], layer.values[row, :, :length]) for layer in cache.layers]


def test_histograms_and_means_are_those_of_the_tokens_in_the_cache_that_are_not_skipped():
    model = tiny_model("llama")
    recipe = load_recipe(None, {"observer.name": "mse", "means": True, "targets": "qkv"})
    stats = calibrate(model, batches(skip_first=4), recipe)
    held = [*cached(model, batches())]
    for i, layer in enumerate(stats.layers.values()):
        keys, values = (torch.cat([x[i][n][:, 4:] for x in held], dim=1).transpose(0, 1) for n in (0, 1))
        assert (layer.tokens, layer.tokens_read) == (len(keys), len(keys) + 5 * 4) == (69, 89)
        assert torch.equal(layer.k.amax, keys.abs().amax(0))
        assert torch.equal(layer.k.histogram, magnitude_histogram(keys))
        assert torch.equal(layer.v.histogram, magnitude_histogram(values))
        # every batch's sum is rounded to a multiple of 2**-20
        torch.testing.assert_close(layer.k.total, keys.double().sum(0), rtol=0, atol=len(SAMPLES) * 2**-21)
        assert torch.equal(layer.k.low, keys.amin(0))
        assert torch.equal(layer.k.high, keys.amax(0))
        assert layer.q.low is None
        assert layer.q.histogram.shape == (4, NUM_BINS)
        assert {x.histogram.sum(-1).unique().item() for x in (layer.k, layer.v, layer.q)} == {69 * 16}


@pytest.mark.parametrize(
    ("family", "size", "skip_first"),
    [("llama", 1, 0), ("gemma2", 2, 0), ("falcon", 2, 5), ("deepseek_v3", 2, 5)],
)
def test_curve_and_positions_are_those_of_the_caches(family, size, skip_first):
    model = tiny_model(family, **(FAMILIES | LATENT)[family])
    read_batches = batches(size, skip_first)
    stats, tables, read = calibrate(model, read_batches, RECIPE), {}, 0
    for sample in cached(model, read_batches, model.config if family in LATENT else None):
        for i, layer in enumerate(sample):
            for letter, x in zip("kv", layer, strict=True):
                made = [torch.zeros(len(x), count) for count in (BUCKETS, POSITION_BUCKETS)]
                curve, positions = tables.setdefault((i, letter), made)
                for t in range(skip_first, x.shape[1]):
                    largest = x[:, t].abs().amax(-1).float()
                    for table, place in ((curve, read + t), (positions, t)):
                        at = (place + 1).bit_length() - 1  # how often it can be halved, from 1
                        table[:, at] = torch.maximum(table[:, at], largest)
        read += sample[0][0].shape[1]
    for i, layer in enumerate(stats.layers.values()):
        assert layer.tokens_read == read
        assert layer.q.curve is layer.q.positions is None
        for letter in "kv":
            found, (curve, positions) = getattr(layer, letter), tables[i, letter]
            repeat = len(curve) // len(found.curve)
            assert torch.equal(found.curve, curve[::repeat])
            assert torch.equal(found.positions, positions[::repeat])
            assert torch.equal(found.curve.amax(1), found.amax.amax(1))
    assert stats.tokens == sum(len(sample) - skip_first for sample in SAMPLES)
    if family in LATENT:
        both = next(iter(stats.layers.values())).join_latent()
        assert torch.equal(both.positions.amax(1), both.amax.amax(1))


def test_nothing_behind_the_last_k_and_v_is_computed_and_training_modes_come_back():
    model, seen = tiny_model("llama").train(), []
    model.model.norm.eval()
    mapped, modes = map_attention(model), [module.training for module in model.modules()]
    for unused in (model.lm_head, model.model.layers[-1].self_attn.o_proj):
        unused.register_forward_hook(lambda *_: pytest.fail("it ran for nothing"))
    calibrate(model, batches(), RECIPE, attention=mapped, on_batch=lambda b, _: seen.append(b.num_tokens))
    # the largest first, the others in any order
    assert (seen[0], sorted(seen)) == (48, [7, 11, 23, 48])
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(InputError, match="no token was read"):
        calibrate(model, [], RECIPE, attention=mapped)
    assert [module.training for module in model.modules()] == modes


def test_a_model_with_offloaded_weights_runs_to_its_end():
    model, plain = tiny_model("llama"), tiny_model("llama")
    cpu_offload(model, execution_device="cpu")
    found, expected = calibrate(model, batches(), RECIPE), calibrate(plain, batches(), RECIPE)
    for one, other in zip(found.layers.values(), expected.layers.values(), strict=True):
        assert torch.equal(one.k.amax, other.k.amax)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_bad_numbers_are_named_by_layer_tensor_and_sample():
    assert [(x.sample_ids, x.skip_first) for x in singles(batches(skip_first=3)[0])] == [((0,), 3), ((1,), 3)]
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0] = 3e38
    with pytest.raises(CalibrationError, match=r"model.layers.1.self_attn: V .* in sample 0;"):
        calibrate(model, batches(1), RECIPE)
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = float("nan")
        model.model.layers[1].self_attn.v_proj.weight[0] = 0
    samples = [[5, 6, 7], [8, 9, 10], [11, 77, 12], [13, 14, 15]]
    with pytest.raises(CalibrationError, match=r"model.layers.0.self_attn: K .* in sample 2;"):
        calibrate(model, make_batches(samples, 4, pad_id=0), RECIPE)
