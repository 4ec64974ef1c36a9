"""What is reported of each layer: magnitudes, scales, errors and clipped tokens, from K and V themselves."""

import numpy as np
import pytest
import torch
from families import FAMILIES, tiny_model

from calib.capture.attention import observe_qkv
from calib.evaluate.layer_errors import (
    FIRST_BIN,
    clipped_layer,
    count_events,
    layer_row,
    layer_values,
    poisson_interval,
    read_layers,
)
from calib.evaluate.variants import Setup, Variant
from calib.scales.scales import KVScales, LayerScales

pytestmark = pytest.mark.xdist_group("evaluate")
DOCUMENTS = [torch.randint(1, 90, (n,), generator=torch.Generator().manual_seed(n)) for n in (21, 9)]


def seen_by(model, documents):
    """K and V [K, tokens of all documents, D] by layer, from plain transformers' own forward."""
    seen = {}

    def keep(name, query, key, value):
        layer = seen.setdefault(model.get_submodule(name).layer_idx, ([], []))
        for kept, x in zip(layer, (key, value), strict=True):
            kept.append(x[0])

    with torch.inference_mode(), observe_qkv(model, keep):
        for document in documents:
            model(document.view(1, -1), use_cache=False)
    return {idx: [torch.cat(parts, 1) for parts in pair] for idx, pair in seen.items()}


def test_amax_and_histogram_are_those_of_the_reference(plain, small_report):
    model, documents = plain
    expected = seen_by(model, documents[:2])
    assert [layer["layer_idx"] for layer in small_report["layers"]] == sorted(expected) == [0, 1, 2]
    vanished = 0
    for layer in small_report["layers"]:
        none = small_report["variants"]["none"]["layers"][layer["layer_idx"]]
        for letter, x in zip("kv", expected[layer["layer_idx"]], strict=True):
            found, amax = layer[letter], x.abs().amax((1, 2))
            torch.testing.assert_close(torch.tensor(found["amax"]), amax, rtol=1e-6, atol=0)
            np.testing.assert_allclose(none["range_used"][letter], amax / 448, rtol=1e-6)
            lost = (x.to(torch.float8_e4m3fn).float() == 0) & (x != 0)
            np.testing.assert_allclose(none["underflowed"][letter], lost.double().mean((1, 2)), rtol=1e-6)
            vanished += int(lost.sum())
            counts = found["counts"]
            assert sum(counts) + found["zeros"] == x.numel()
            edges = 2.0 ** (found["log2_first"] + np.arange(len(counts) + 1) / 2)
            magnitudes = x.abs().double().flatten().numpy()
            np.testing.assert_array_equal(np.histogram(magnitudes, edges)[0], counts)
    assert vanished


def test_histogram_bins_are_exact_where_logarithms_round():
    root = 2.0**0.5
    x = torch.tensor([1.0, -1.4142, 1.4143, 2.0, 0.0, 2.0**-149, 2.0**127])
    found = layer_values(x[None, None, None], torch.zeros(1, 2, 3, 4)[:, :1])
    bins = dict(enumerate(found.histogram[0, 0].tolist(), start=FIRST_BIN))
    expected = {0: 2, 1: 1, 2: 1, -298: 1, 254: 1}
    assert {i: n for i, n in bins.items() if n} == expected
    assert 1.4142 < root < 1.4143
    assert found.zeros.tolist() == [[1, 12]]
    assert found.histogram[0, 1].sum() == 0


def test_heads_that_transformers_repeats_are_counted_once():
    model = tiny_model("falcon", **FAMILIES["falcon"])
    one = torch.ones(1)
    layers = {f"layers.{idx}": LayerScales(idx, one, one) for idx in range(3)}
    variant = Variant("one", "one", "fp8", KVScales("tensor", "e4m3fn", layers, {}))
    errors, values = read_layers(Setup(model, None), [torch.arange(9)], [variant])
    assert [layer.amax.shape for layer in values.values()] == [(1, 2, 2)] * 3
    assert [int(layer.histogram[0, 0].sum()) for layer in values.values()] == [2 * 9 * 16] * 3
    # of its own attention, which hands out [B, H, T, D]
    assert [layer.error.shape for layer in errors["one"].values()] == [(1, 4)] * 3


def test_scales_are_those_of_the_variant(small_evaluation, small_report):
    for name, kind in (("tensor", float), ("attn_head", list), ("channel", dict)):
        scales = small_evaluation.measured[name].variant.scales.layers.values()
        for row, layer in zip(small_report["variants"][name]["layers"], scales, strict=True):
            for letter, expected in (("k", layer.k), ("v", layer.v)):
                found = row["scale"][letter]
                assert isinstance(found, kind)
                if kind is dict:
                    assert found == {"min": expected.min().item(), "max": expected.max().item()}
                else:
                    assert torch.tensor(found).view(-1).equal(expected)


def test_the_error_of_a_layer_is_over_all_its_heads(small_evaluation, small_report):
    none, tensor = (small_report["variants"][name]["layers"] for name in ("none", "tensor"))
    for row in tensor:
        layer = small_evaluation.measured["tensor"].layers[row["layer_idx"]]
        assert layer.error.shape == (2, 4)
        expected = (layer.error.sum() / layer.power.sum()).sqrt().item()
        found = row["rel_rms_layer"]
        assert found["value"] == pytest.approx(expected)
        by_document = (layer.error.sum(1) / layer.power.sum(1)).sqrt()
        assert by_document.min() * 0.999 <= found["low"] <= found["value"]
        assert found["value"] <= found["high"] <= by_document.max() * 1.001
        assert len(row["rel_rms"]) == 4
        assert all(0 < error < 0.2 for error in row["rel_rms"])
    assert max(max(row["range_used"]["k"]) for row in tensor) > 0.5
    assert all(share == 0 for row in none for share in row["saturated"]["k"])


@pytest.fixture(scope="module")
def model():
    return tiny_model("mistral", **FAMILIES["mistral"]).eval()


def tight(seen):
    """Scales per head with 0.8 of what would hold every value."""
    layers = {
        f"layers.{idx}": LayerScales(idx, *(0.8 * x.abs().amax((1, 2)) / 448 for x in pair))
        for idx, pair in seen.items()
    }
    return KVScales("attn_head", "e4m3fn", layers, {})


@pytest.mark.parametrize("tensors", ["kv", "k"])
def test_clipped_tokens_are_counted_one_by_one(model, tensors):
    seen = seen_by(model, DOCUMENTS)
    variant = Variant("tight", "too small", "fp8", tight(seen), tensors)
    setup = Setup(model, None, "torch")
    counted = read_layers(setup, DOCUMENTS, [variant], with_errors=False)[0]["tight"]
    errors, _ = read_layers(setup, DOCUMENTS, [variant])
    everywhere = set()
    for idx, pair in seen.items():
        layer = variant.layers[idx]
        hit, by_head, shares = set(), {}, {}
        for letter, x, scale in zip("kv", pair, (layer.k, layer.v), strict=True):
            shares[letter] = ((x / scale[:, None, None]).abs() > 448).double().mean((1, 2)).tolist()
            beyond = [
                {t for t in range(30) if any(abs(float(e)) / float(s) > 448 for e in x[h, t])}
                for h, s in enumerate(scale)
            ]
            if letter in tensors:
                by_head[letter] = [len(each) for each in beyond]
                hit |= set().union(*beyond)
        everywhere |= hit
        for row in (
            clipped_layer(idx, counted[idx], tensors),
            layer_row(idx, errors["tight"][idx], layer, tensors),
        ):
            found = row.exceedance
            assert (found.tokens, found.events, found.by_head) == (30, len(hit), by_head)
            for letter in "kv":
                assert row.saturated[letter] == pytest.approx(shares[letter])
            low, high = (x / 30 for x in poisson_interval(len(hit)))
            assert (found.low, found.high) == (low, min(high, 1.0))  # a share
        assert 0 < len(hit) < 30
        assert torch.equal(counted[idx].saturated, errors["tight"][idx].saturated)
        assert torch.equal(counted[idx].values, errors["tight"][idx].values)
    assert count_events(counted.values(), tensors).events == len(everywhere)
