"""Headroom by layer, and what is expected of new text."""

import json
import math
from dataclasses import replace

import pytest
import torch
from command_line import fp8kv, one_line_error, ran
from families import save_model, tiny_model

from calib.capture.loop import calibrate
from calib.data import make_batches
from calib.errors import InputError
from calib.recipe import Recipe
from calib.scales.stats import derive_scales
from calib.scales.stats_file import load_scales, load_stats, save_stats
from calib.scales.summary import ClippedTokens, clip_chance, clipped_tokens, covered_share
from calib.scales.tail import CLIP_CHANCE, headroom_for

E4M3 = 448.0


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def stats(model):
    """Of 4,000 random tokens."""
    ids = torch.randint(64, (40, 100), generator=torch.Generator().manual_seed(0)).tolist()
    return calibrate(model, make_batches(ids, 8, pad_id=0), Recipe(device="cpu"))


@pytest.fixture(scope="module")
def first(stats):
    """The first layer's name, its statistics, and its plain scales."""
    name, layer = next(iter(stats.layers.items()))
    return name, layer, derive_scales(stats, Recipe()).layers[name]


def without(stats, keep):
    tensors = {at: x for at, x in stats.tensors().items() if keep(at[2])}
    return stats.replace_tensors(tensors, stats.counts())


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_headroom_by_layer_keeps_the_stated_chance_and_is_one_factor_per_layer(stats, strategy):
    plain = derive_scales(stats, Recipe(strategy=strategy))
    auto = derive_scales(stats, Recipe(strategy=strategy, headroom="auto"))
    for name, layer in stats.layers.items():
        wide, narrow = auto.layers[name], plain.layers[name]
        factors = torch.cat([wide.k / narrow.k, wide.v / narrow.v])
        # two float32 products
        torch.testing.assert_close(factors, factors[:1].expand_as(factors), rtol=1e-6, atol=0)
        assert factors[0] > 1
        assert clip_chance(layer, wide, E4M3) <= CLIP_CHANCE == 1e-6
        assert clip_chance(layer, narrow, E4M3) > CLIP_CHANCE
        # a larger chance needs less
        tails = layer.tails(strategy)
        assert headroom_for(tails, 1e-7) > headroom_for(tails) > headroom_for(tails, 1e-5)


def test_the_chance_of_a_layer_is_that_of_any_of_its_groups(stats, first):
    name, layer, plain = first
    own = derive_scales(stats, Recipe(strategy="attn_head")).layers[name]
    misses = [
        1 - float(chance)
        for tail, scale in zip(layer.tails("attn_head"), (own.k, own.v), strict=True)
        for chance in tail.chance_above(scale.double() * E4M3)
    ]
    assert clip_chance(layer, own, E4M3) == pytest.approx(1 - math.prod(misses))
    k, v = (clip_chance(layer, own, E4M3, which) for which in "kv")
    assert (1 - k) * (1 - v) == pytest.approx(math.prod(misses))
    # far below the largest the chance is a share of the tokens seen
    top = layer.k.tail.flatten().sort(descending=True).values
    level = (top[39] + top[40]) / 2  # of the 40 largest tokens
    lower = replace(plain, k=(level / E4M3).view(1).float())
    assert clip_chance(layer, lower, E4M3, "k") == pytest.approx(40 / layer.tokens)


def test_with_enough_headroom_more_tokens_are_held_and_without_they_are_not(stats):
    plain = derive_scales(stats, Recipe())
    auto = derive_scales(stats, Recipe(headroom="auto"))
    assert covered_share(stats, auto, ahead=4, margin=0) == 1
    assert covered_share(stats, plain, ahead=100, margin=0) == 0
    assert covered_share(stats, plain, ahead=100, margin=1) == 1


def test_a_head_of_zeros_asks_for_no_headroom(stats, first):
    name, layer, _ = first
    amax, tail = layer.k.amax.clone(), layer.k.tail.clone()
    amax[0] = tail[0] = 0
    dead = replace(layer, k=replace(layer.k, amax=amax, tail=tail))
    recipe = Recipe(strategy="attn_head", headroom="auto")
    alive, found = (
        derive_scales(replace(stats, layers={name: each}), recipe).layers[name].v for each in (layer, dead)
    )
    assert torch.all(found <= alive)


def test_layers_of_which_no_chance_is_known_are_named_and_not_left_out(stats, first):
    """Scales that clip more than is known have no chance; K and V are judged together."""
    _, layer, plain = first
    small = replace(plain, k=plain.k / 1000)
    assert clip_chance(layer, small, E4M3) is clip_chance(layer, small, E4M3, "v") is None
    scales = derive_scales(stats, Recipe())
    known = clipped_tokens(stats, scales).by_layer
    own = dict(scales.layers)
    for many, name in enumerate(stats.layers, 1):
        own[name] = replace(own[name], k=own[name].k / 1000)
        found = clipped_tokens(stats, replace(scales, layers=own))
        rest = {layer: chance for layer, chance in known.items() if layer >= many}
        assert found.by_layer == rest
        assert found.unknown == tuple(range(many))
        assert f"more than can be told in layer{'s' * (many > 1)} 0" in found.line
        assert ("of the other layers (the median)" in found.line) == bool(rest)
    assert ClippedTokens({0: 1e-3, 1: 1e-4, 4: 0.0}).line == (
        "expected of new text like this: one token in 10,000 has a value beyond the scales in a layer "
        "(the median), one token in 1,000 in layer 0"
    )
    assert "less than one token in 10^12" in ClippedTokens({0: 0.0}).line


def test_largest_tokens_that_all_tie_are_held_by_a_rounded_scale(stats, first):
    """As where every sample starts with the same token, and that one is the largest."""
    name, layer, _ = first
    for amax in torch.rand(50, generator=torch.Generator().manual_seed(1)).add(1).tolist():
        same = {field: torch.full_like(getattr(layer.k, field), amax) for field in ("amax", "tail")}
        tied = replace(layer, k=replace(layer.k, **same))
        scales = derive_scales(replace(stats, layers={name: tied}), Recipe()).layers[name]
        assert clip_chance(tied, scales, E4M3) is not None


def test_nothing_is_expected_where_nothing_is_known(stats):
    assert clipped_tokens(stats, derive_scales(stats, Recipe())) is not None
    channels = derive_scales(stats, Recipe(strategy="channel", export={"formats": ["fp8kv"]}))
    assert clipped_tokens(stats, channels) is None
    old = without(stats, lambda field: field != "tail")
    assert clipped_tokens(old, derive_scales(old, Recipe())) is None


def test_the_job_writes_what_the_recipe_asks_and_says_what_to_expect(model, tmp_path):
    directory, out = save_model(model, tmp_path / "tiny"), tmp_path / "out"
    text = ("--dataset", "random", "--samples", 20, "--seq-len", 64)
    done = ran("calibrate", directory, "-o", out, *text, "--headroom", "auto")
    assert "expected of new text like this: one token in" in " ".join(done.stdout.split())
    report = json.loads((out / "fp8kv_calibration.json").read_text())
    assert report["recipe"]["headroom"] == "auto"
    assert max(report["clip_chance"].values()) <= CLIP_CHANCE
    scales = load_scales(out)

    # calibrations of before name three settings that are gone; their defaults changed nothing
    report["recipe"] |= {"clip_chance": 1e-6, "scale_rounding": "none"}
    report["recipe"]["evaluation"]["bits_budget"] = None
    (out / "fp8kv_calibration.json").write_text(json.dumps(report))
    pairs = zip(scales.layers.values(), load_scales(out).layers.values(), strict=True)
    assert all(torch.equal(a.k, b.k) for a, b in pairs)
    for key, value in (("scale_rounding", "pow2"), ("clip_chance", 0.001)):
        other = report | {"recipe": report["recipe"] | {key: value}}
        (out / "fp8kv_calibration.json").write_text(json.dumps(other))
        said = f"was made with {key} {value}, a setting that was taken out; calibrate the model again$"
        with pytest.raises(InputError, match=said):
            load_scales(out)

    # old statistics have no headroom by layer
    (out / "fp8kv_calibration.json").write_text(json.dumps(report))
    old = without(load_stats(out), lambda field: field == "amax")
    save_stats(old, out / "fp8kv_stats.safetensors")
    again = fp8kv("bake", directory, "--scales", out, "--for", "fp8", "-o", tmp_path / "baked")
    one_line_error(again, "these statistics are old and hold no tails; calibrate again")
