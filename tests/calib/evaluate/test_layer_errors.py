"""Scales of variants, and magnitudes, errors and clipped tokens of layers, from K and V themselves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from families import FAMILIES, tiny_model

from calib.capture.attention import observe_qkv
from calib.capture.loop import calibrate
from calib.data import make_batches
from calib.errors import InputError
from calib.evaluate.layer_errors import (
    FIRST_BIN,
    clipped_layer,
    count_events,
    layer_row,
    layer_values,
    poisson_interval,
    read_layers,
)
from calib.evaluate.variants import BUILT_IN, REFERENCE, Setup, Variant, build_variants, drop_first_tokens
from calib.recipe import load_recipe
from calib.scales.observers import AbsMax
from calib.scales.scales import KVScales, LayerScales
from calib.scales.stats import KVStats, TensorStats

pytestmark = pytest.mark.xdist_group("evaluate")


def seen_by(model, documents):
    """K and V [K, tokens of all documents, D] by layer, from plain transformers' own forward."""
    seen = {}

    def keep(name, query, *pair):
        layer = seen.setdefault(model.get_submodule(name).layer_idx, ([], []))
        for kept, x in zip(layer, pair, strict=True):
            kept.append(x[0])

    with torch.inference_mode(), observe_qkv(model, keep):
        for document in documents:
            model(document.view(1, -1), use_cache=False)
    return {idx: [torch.cat(parts, 1) for parts in pair] for idx, pair in seen.items()}


def test_variants_have_scales_of_what_they_round():
    # a model to which only a sample's first token is a 1: no key is larger than its
    model, samples = tiny_model("llama"), [list(range(1 + i, 40 + i)) for i in range(3)]
    first = model.model.layers[0].self_attn.k_proj.weight
    with torch.no_grad():
        model.model.embed_tokens.weight[1] = first[first.norm(dim=1).argmax()]
    recipe = load_recipe(None, {"means": True, "targets": "qkv", "observer.name": "mse"})
    stats, skipping = (
        calibrate(model, make_batches(samples, 1, pad_id=0, skip_first=n), recipe) for n in (0, 1)
    )
    scales = {variant.name: variant.scales for variant in build_variants(stats, stats)}
    assert {REFERENCE, *scales} == set(BUILT_IN)
    keys = {idx: k for idx, (k, _) in seen_by(model, map(torch.tensor, samples)).items()}
    for layer in scales["channel+k_center"].layers.values():
        mean = keys[layer.layer_idx].double().mean(1).float()
        left = (keys[layer.layer_idx] - mean[:, None]).abs().amax(1)
        torch.testing.assert_close(layer.k_center, mean)
        torch.testing.assert_close(layer.k * 448, left)
    # `rest` has the scales of a calibration that skips first tokens
    expected = skipping.scales(strategy="tensor", observer=AbsMax())
    for name, layer in scales["rest"].layers.items():
        rest = keys[layer.layer_idx].unflatten(1, (3, 39))[:, :, 1:]
        assert torch.equal(layer.k, rest.abs().amax().view(1) / 448)
        assert torch.equal(layer.v, expected.layers[name].v)
    pairs = zip(scales["rest"].layers.values(), scales["tensor"].layers.values(), strict=True)
    assert any(rest.k < tensor.k for rest, tensor in pairs)  # here the first token matters
    # a head that only the first token sees keeps its amax
    name, layer = next(iter(stats.layers.items()))
    positions = layer.k.positions.clone()
    positions[1, 1:] = 0
    layer = replace(layer, k=replace(layer.k, positions=positions))
    rest = drop_first_tokens(KVStats({name: layer})).layers[name]
    assert rest.k.amax[1].item() == layer.k.amax[1].max()
    assert rest.k.amax[0].item() == layer.k.positions[0, 1:].max()
    with pytest.raises(InputError, match="calibrate again"):
        drop_first_tokens(KVStats({name: replace(layer, k=TensorStats(layer.k.amax))}))


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
            np.testing.assert_array_equal(np.histogram(x.abs().double().flatten(), edges)[0], counts)
    assert vanished


def test_histogram_bins_are_exact_where_logarithms_round():
    assert 1.4142 < 2.0**0.5 < 1.4143
    x = torch.tensor([1.0, -1.4142, 1.4143, 2.0, 0.0, 2.0**-149, 2.0**127])
    found = layer_values(x[None, None, None], torch.zeros(1, 1, 3, 4))
    bins = dict(enumerate(found.histogram[0, 0].tolist(), start=FIRST_BIN))
    assert {i: n for i, n in bins.items() if n} == {0: 2, 1: 1, 2: 1, -298: 1, 254: 1}
    assert found.zeros.tolist() == [[1, 12]]
    assert found.histogram[0, 1].sum() == 0


def test_heads_that_transformers_repeats_are_counted_once():
    model, one = tiny_model("falcon", **FAMILIES["falcon"]), torch.ones(1)
    layers = {f"layers.{idx}": LayerScales(idx, one, one) for idx in range(3)}
    variant = Variant("one", "one", "fp8", KVScales("tensor", "e4m3fn", layers, {}))
    errors, values = read_layers(Setup(model, None), [torch.arange(9)], [variant])
    assert [layer.amax.shape for layer in values.values()] == [(1, 2, 2)] * 3
    assert [int(layer.histogram[0, 0].sum()) for layer in values.values()] == [2 * 9 * 16] * 3
    # of its own attention, which hands out [B, H, T, D]
    assert [layer.error.shape for layer in errors["one"].values()] == [(1, 4)] * 3


def test_the_error_of_a_layer_is_over_all_its_heads_and_scales_are_those_of_the_variant(
    small_evaluation, small_report
):
    rows = {name: row.get("layers") for name, row in small_report["variants"].items()}
    for row in rows["tensor"]:
        layer = small_evaluation.measured["tensor"].layers[row["layer_idx"]]
        assert layer.error.shape == (2, 4)
        found = row["rel_rms_layer"]
        assert found["value"] == pytest.approx((layer.error.sum() / layer.power.sum()).sqrt().item())
        by_document = (layer.error.sum(1) / layer.power.sum(1)).sqrt()
        assert by_document.min() * 0.999 <= found["low"] <= found["value"]
        assert found["value"] <= found["high"] <= by_document.max() * 1.001
        assert len(row["rel_rms"]) == 4
        assert all(0 < error < 0.2 for error in row["rel_rms"])
    assert max(max(row["range_used"]["k"]) for row in rows["tensor"]) > 0.5
    assert all(share == 0 for row in rows["none"] for share in row["saturated"]["k"])
    for name in ("tensor", "attn_head", "channel"):
        scales = small_evaluation.measured[name].variant.scales.layers.values()
        for row, layer in zip(rows[name], scales, strict=True):
            for letter, x in (("k", layer.k), ("v", layer.v)):
                extremes = {"min": x.min().item(), "max": x.max().item()}
                assert row["scale"][letter] == (extremes if name == "channel" else x.squeeze().tolist())


@pytest.mark.parametrize("tensors", ["kv", "k"])
def test_clipped_tokens_are_counted_one_by_one(tensors):
    documents = [torch.randint(1, 90, (n,), generator=torch.Generator().manual_seed(n)) for n in (21, 9)]
    model = tiny_model("mistral", **FAMILIES["mistral"]).eval()
    seen = seen_by(model, documents)
    # scales per head with 0.8 of what would hold every value
    tight = {
        f"layers.{idx}": LayerScales(idx, *(0.8 * x.abs().amax((1, 2)) / 448 for x in pair))
        for idx, pair in seen.items()
    }
    variant = Variant("tight", "", "fp8", KVScales("attn_head", "e4m3fn", tight, {}), tensors)
    setup = Setup(model, None, "torch")
    counted, errors = (
        read_layers(setup, documents, [variant], with_errors=each)[0]["tight"] for each in (False, True)
    )
    everywhere = set()
    for idx, pair in seen.items():
        layer = variant.layers[idx]
        hit, by_head, shares = set(), {}, {}
        for letter, x, scale in zip("kv", pair, (layer.k, layer.v), strict=True):
            is_beyond = (x / scale[:, None, None]).abs() > 448
            shares[letter] = is_beyond.double().mean((1, 2)).tolist()
            if letter in tensors:
                by_head[letter] = [int(head.any(-1).sum()) for head in is_beyond]
                hit |= {t for t in range(30) if is_beyond[:, t].any()}
        everywhere |= hit
        for row in (
            clipped_layer(idx, counted[idx], tensors),
            layer_row(idx, errors[idx], layer, tensors),
        ):
            found = row.exceedance
            assert (found.tokens, found.events, found.by_head) == (30, len(hit), by_head)
            for letter in "kv":
                assert row.saturated[letter] == pytest.approx(shares[letter])
            low, high = (x / 30 for x in poisson_interval(len(hit)))
            assert (found.low, found.high) == (low, min(high, 1.0))  # a share
        assert 0 < len(hit) < 30
        assert torch.equal(counted[idx].saturated, errors[idx].saturated)
        assert torch.equal(counted[idx].values, errors[idx].values)
    assert count_events(counted.values(), tensors).events == len(everywhere)
