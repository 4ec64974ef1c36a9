"""Where the largest K and V lie, recomputed token by token from the caches."""

import pytest
import torch
from families import FAMILIES, LATENT, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache

from calib.capture.loop import calibrate, singles
from calib.capture.running_amax import count_tokens
from calib.data import make_batches
from calib.recipe import load_recipe
from calib.scales.places import BUCKETS, POSITION_BUCKETS

GENERATOR = torch.Generator().manual_seed(1)
SAMPLES = [torch.randint(3, 128, (length,), generator=GENERATOR).tolist() for length in (24, 24, 23, 11, 7)]
RECIPE = load_recipe(None)


def bucket(index):
    """How often index + 1 can be halved."""
    found, left = 0, index + 1
    while left > 1:
        found, left = found + 1, left // 2
    return found


@torch.inference_mode()
def recomputed(model, batches, cache_config, skip_first=0):
    """Per layer: curve and positions of K and of V, from the caches of batches, token by token."""
    tables = {}
    read = 0
    for batch in batches:
        cache = DynamicCache(config=cache_config)
        model(batch.input_ids, attention_mask=batch.attention_mask, past_key_values=cache)
        for row, length in enumerate(batch.attention_mask.sum(1).tolist()):
            for i, layer in enumerate(cache.layers):
                for which, x in (("k", layer.keys[row]), ("v", layer.values[row])):
                    curve, positions = tables.setdefault(
                        (i, which),
                        (torch.zeros(len(x), BUCKETS), torch.zeros(len(x), POSITION_BUCKETS)),
                    )
                    for t in range(skip_first, length):
                        largest = x[:, t].abs().amax(-1).float()
                        for table, place in ((curve, read + t), (positions, t)):
                            at = bucket(place)
                            table[:, at] = torch.maximum(table[:, at], largest)
            read += length
    return tables, read


def check(stats, tables, read):
    for i, layer in enumerate(stats.layers.values()):
        assert layer.tokens_read == read
        assert layer.q.curve is layer.q.positions is None
        for which in "kv":
            found, (curve, positions) = getattr(layer, which), tables[i, which]
            repeat = len(curve) // len(found.curve)
            assert torch.equal(found.curve, curve[::repeat])
            assert torch.equal(found.positions, positions[::repeat])
            assert torch.equal(found.curve.amax(1), found.amax.amax(1))


@pytest.mark.parametrize(
    ("family", "size", "skip_first"),
    [("llama", 1, 0), ("gemma2", 2, 0), ("falcon", 2, 5), ("deepseek_v3", 2, 5)],
)
def test_curve_and_positions_are_those_of_the_caches(family, size, skip_first):
    model = tiny_model(family, **(FAMILIES | LATENT)[family])
    batches = make_batches(SAMPLES, size, pad_id=0, skip_first=skip_first)
    stats = calibrate(model, batches, RECIPE)
    # without a config a cache holds all tokens, also of layers with a window
    config = model.config if family in LATENT else None
    check(stats, *recomputed(model, batches, config, skip_first))
    assert stats.tokens == sum(len(sample) - skip_first for sample in SAMPLES)
    if family in LATENT:
        both = next(iter(stats.layers.values())).join_latent()
        assert torch.equal(both.positions.amax(1), both.amax.amax(1))


def test_smollm2_in_its_own_precision(smollm2_directory):
    model = AutoModelForCausalLM.from_pretrained(smollm2_directory, dtype=torch.bfloat16)
    samples = [[1 + (7 * i + j * j) % 900 for j in range(60 - 9 * i)] for i in range(4)]
    batches = make_batches(samples, 2, pad_id=0)
    check(calibrate(model, batches, RECIPE), *recomputed(model, batches, None))


def test_skipped_tokens_are_in_no_statistic():
    everything = {"means": True, "targets": "qkv", "observer.name": "mse"}
    recipe, model = load_recipe(None, everything), tiny_model("llama")
    batches = make_batches(SAMPLES, 1, pad_id=0, skip_first=4)
    seen = next(iter(calibrate(model, batches, recipe).layers.values()))
    caches = []
    for sample in SAMPLES:
        caches.append(cache := DynamicCache())
        model(torch.tensor([sample]), past_key_values=cache)
    k = torch.cat([cache.layers[0].keys[0, :, 4:] for cache in caches], 1)
    assert seen.tokens == k.shape[1] == 69
    assert seen.tokens_read == 89
    assert torch.equal(seen.k.amax, k.abs().amax(1))
    assert torch.equal(seen.k.low, k.amin(1))
    counts = {tensor.histogram.sum(-1).unique().item() for tensor in (seen.k, seen.v, seen.q)}
    assert counts == {69 * 16}


def test_the_samples_of_a_batch_keep_their_places():
    for batch in make_batches(SAMPLES, 2, pad_id=0, skip_first=3):
        starts = [single.first_token for single in singles(batch)]
        lengths = batch.attention_mask.sum(1).tolist()
        assert starts == [batch.first_token + sum(lengths[:i]) for i in range(len(lengths))]
        counts = [len(count_tokens(single).buckets) for single in singles(batch)]
        assert sum(counts) == len(count_tokens(batch).buckets)
        assert {single.skip_first for single in singles(batch)} == {3}
