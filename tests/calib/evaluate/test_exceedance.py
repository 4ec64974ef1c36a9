"""Clipped tokens: the counts, from K and V themselves, and the interval of their share."""

import pytest
import torch
from families import FAMILIES, tiny_model

from calib.capture.attention import observe_qkv
from calib.evaluate.layer_errors import (
    clipped_layer,
    count_events,
    layer_row,
    poisson_interval,
    read_layers,
)
from calib.evaluate.variants import Setup, Variant
from calib.scales.scales import KVScales, LayerScales

# half the quantiles 0.025 of chi-square with 2 n degrees of freedom, and 0.975 with 2 n + 2, as
# tables of the exact Poisson interval print them
TABULATED = {
    0: (0.0, 3.6889),
    1: (0.0253, 5.5716),
    2: (0.2422, 7.2247),
    5: (1.6235, 11.6683),
    10: (4.7954, 18.3904),
    50: (37.1110, 65.9188),
    100: (81.3640, 121.6268),
}
DOCUMENTS = [torch.randint(1, 90, (n,), generator=torch.Generator().manual_seed(n)) for n in (21, 9)]


@pytest.mark.parametrize("events", TABULATED)
def test_intervals_are_the_tabulated_ones(events):
    assert poisson_interval(events) == pytest.approx(TABULATED[events], abs=5e-5)


@pytest.mark.parametrize("events", [1, 7, 1000, 10**6])
def test_an_interval_leaves_a_fortieth_on_each_side(events):
    low, high = (torch.tensor(x, dtype=torch.float64) for x in poisson_interval(events))
    # P(N >= events) at the lower end, P(N <= events) at the upper
    below = torch.special.gammainc(torch.tensor(float(events)).double(), low)
    assert below.item() == pytest.approx(0.025)
    above = torch.special.gammaincc(torch.tensor(events + 1.0).double(), high)
    assert above.item() == pytest.approx(0.025)


def seen_by(model):
    """K and V [K, tokens of all documents, D] by layer, from plain transformers' own forward."""
    seen = {}

    def keep(name, query, key, value):
        layer = seen.setdefault(model.get_submodule(name).layer_idx, ([], []))
        for kept, x in zip(layer, (key, value), strict=True):
            kept.append(x[0])

    with torch.inference_mode(), observe_qkv(model, keep):
        for document in DOCUMENTS:
            model(document[None], use_cache=False)
    return {idx: [torch.cat(parts, 1) for parts in pair] for idx, pair in seen.items()}


@pytest.fixture(scope="module")
def model():
    return tiny_model("mistral", **FAMILIES["mistral"]).eval()


@pytest.mark.parametrize("tensors", ["kv", "k", "v"])
def test_tokens_are_counted_one_by_one(model, tensors):
    seen = seen_by(model)
    variant = Variant("tight", "too small", "fp8", tight(seen), tensors)
    setup = Setup(model, None, "torch")
    counted = read_layers(setup, DOCUMENTS, [variant], with_errors=False)[0]["tight"]
    errors, _ = read_layers(setup, DOCUMENTS, [variant])
    everywhere = set()
    for idx, pair in seen.items():
        layer = variant.layers[idx]
        hit, by_head = set(), {}
        for letter, x, scale in zip("kv", pair, (layer.k, layer.v), strict=True):
            beyond = [
                {t for t in range(30) if any(abs(float(e)) / float(s) > 448 for e in x[h, t])}
                for h, s in enumerate(scale)
            ]
            if letter in tensors:
                by_head[letter] = [len(each) for each in beyond]
                hit |= set().union(*beyond)
        everywhere |= hit
        for found in (
            clipped_layer(idx, counted[idx], tensors).exceedance,
            layer_row(idx, errors["tight"][idx], layer, tensors).exceedance,
        ):
            assert (found.tokens, found.events, found.by_head) == (30, len(hit), by_head)
            low, high = (x / 30 for x in poisson_interval(len(hit)))
            assert (found.low, found.high) == (low, min(high, 1.0))  # a share
        assert 0 < len(hit) < 30
        assert torch.equal(counted[idx].saturated, errors["tight"][idx].saturated)
        assert torch.equal(counted[idx].values, errors["tight"][idx].values)
    assert count_events(counted.values(), tensors).events == len(everywhere)


def tight(seen):
    """Scales per head with 0.8 of what would hold every value."""
    layers = {
        f"layers.{idx}": LayerScales(idx, *(0.8 * x.abs().amax((1, 2)) / 448 for x in pair))
        for idx, pair in seen.items()
    }
    return KVScales("attn_head", "e4m3fn", layers, {})


def test_scales_that_hold_every_value_clip_nothing(model):
    one = torch.ones(1)
    layers = {f"layers.{idx}": LayerScales(idx, one, one) for idx in range(3)}
    scales = KVScales("tensor", "e4m3fn", layers, {})
    variant = Variant("one", "one", "fp8", scales)
    clipped, _ = read_layers(Setup(model, None, "torch"), DOCUMENTS, [variant], with_errors=False)
    counted = clipped["one"]
    found = count_events(counted.values(), "kv")
    assert (found.events, found.low) == (0, 0.0)
    assert found.high == pytest.approx(3.6889 / 30, abs=1e-5)
