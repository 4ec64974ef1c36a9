"""Figures and warnings a user acts on."""

from dataclasses import replace

import torch

from calib.commands.calibrate import layer_rows
from calib.recipe import load_recipe
from calib.scales.observers import AbsMax
from calib.scales.places import BUCKETS, POSITION_BUCKETS
from calib.scales.scales import SharedAttention
from calib.scales.stats import KVStats, LayerStats, TensorStats
from calib.scales.summary import summarize, warnings_for

RECIPE = load_recipe(None)


def stats(*k_heads, v=1.0, shared=None):
    layers = {}
    for i, heads in enumerate(k_heads):
        k = TensorStats(torch.tensor(heads, dtype=torch.float32)[:, None].repeat(1, 2))
        other = TensorStats(torch.full((len(heads), 2), v))
        layers[f"layers.{i}.self_attn"] = LayerStats(i, 1024, k, other, other)
    return KVStats(layers, shared or {})


def derive(measured, strategy="tensor"):
    return measured.scales(strategy=strategy, observer=AbsMax())


def warn(measured, strategy="tensor", recipe=RECIPE):
    return warnings_for(measured, derive(measured, strategy), recipe)


def test_a_row_has_the_layers_figures():
    measured = stats([112.0, 448.0], v=224.0)
    (row,) = summarize(measured, derive(measured))
    assert layer_rows([row]) == [("0", "448", "224", "1", "0.5", "25%", "100%")]
    (row,) = summarize(measured, derive(measured, "attn_head"))
    assert (row.k_range_used, row.k_scale) == (1.0, 1.0)


def test_what_a_recipe_or_unscaled_fp8_clips_is_said():
    quiet = stats([10.0, 12.0, 9.0])
    assert warn(quiet) == warn(quiet, recipe=load_recipe(None, {"headroom": 1.5})) == []
    (warning,) = warn(quiet, recipe=load_recipe(None, {"headroom": 0.5}))
    assert warning.startswith("headroom 0.5: scales hold 50% of the largest values that were seen")
    (warning,) = warn(quiet, recipe=load_recipe(None, {"observer.name": "percentile"}))
    assert "clips the largest K, which is known to hurt" in warning
    assert warn(stats([448.0, 440.0])) == []
    (warning,) = warn(stats([10.0, 12.0], [500.0, 600.0]))
    assert warning.startswith("K scale > 1 in layer 1: unscaled FP8 would clip there")
    for layers, named in ((6, "layers 0, 1, 2, 3, 4, 5"), (7, "7 layers")):
        (warning,) = warn(stats(*[[600.0, 600.0]] * layers))
        assert f"K scale > 1 in {named}:" in warning


def test_outlier_heads_and_dead_heads_are_named():
    (warning,) = warn(stats([1.0, 1.0, 20.0], [1.0, 2.0, 1.0]))
    said = "K: one head is 20x the others in layer 0; use --strategy attn_head where the engine reads it"
    assert warning == said
    assert warn(stats([1.0, 1.0, 20.0]), "attn_head") == warn(stats([1.0, 1.0, 19.0])) == []
    covered = ["K: a head or channel held only zeros in layer 0; it takes the layer's largest scale"]
    assert warn(stats([0.0, 3.0, 3.0]), "attn_head") == warn(stats([0.0, 3.0]), "channel") == covered
    for heads in ([0.0, 3.0], [0.0, 0.0, 3.0]):
        (warning,) = warn(stats(heads))
        assert warning == "K: a head held only zeros in layer 0; the layer's one scale is for it too"
    assert "20x the others in layer 0" in warn(stats([0.0, 1.0, 1.0, 20.0]))[0]


def test_shared_layers_and_layers_of_less_text_are_named():
    both = stats([1.0, 1.0], [1.0, 1.0])
    few = replace(both.layers["layers.1.self_attn"], tokens=1000)
    assert warn(replace(both, layers={**both.layers, "layers.1.self_attn": few})) == [
        "only 1,000 of 1,024 tokens were counted in layer 1: the scales there rest on less text"
    ]
    shared = {"layers.1.self_attn": SharedAttention(1, "layers.0.self_attn")}
    assert warn(stats([1.0, 1.0], shared=shared)) == [
        "layers.1.self_attn shares the cache of layers.0.self_attn: left out, it gets that layer's scales"
    ]


EVERYWHERE = {0: 9.0, 3: 9.0}


def seen_at(curve, positions=EVERYWHERE, read=2048):
    """Statistics of one layer of two heads, whose places are given by bucket."""

    def part(curve, positions):
        tables = torch.zeros(2, BUCKETS), torch.zeros(2, POSITION_BUCKETS)
        for table, values in zip(tables, (curve, positions), strict=True):
            for bucket, value in values.items():
                table[:, bucket] = torch.tensor(value)
        return TensorStats(torch.full((2, 2), 9.0), curve=tables[0], positions=tables[1])

    k, v = part(curve, positions), part({0: 9.0}, EVERYWHERE)
    return KVStats({"layers.7.self_attn": LayerStats(7, read, k, v, v, read=read)})


def test_growth_in_the_last_half_and_first_tokens_that_set_a_scale_alone_are_named():
    assert warn(seen_at({0: 6.0, 10: 9.0})) == [
        "K: still grew by up to 50% in the last 1,025 of 2,048 tokens in layer 7; calibrate on more text"
    ]
    assert warn(seen_at({0: 6.0, 9: 9.0})) == []  # in the first half
    assert warn(seen_at({0: 8.6, 10: 9.0})) == []  # by less than 5 %
    (few,) = warn(seen_at({0: 6.0, 9: 9.0}, read=1023))
    assert few.startswith("only 1,023 tokens were read, too few")
    one_head = seen_at({0: [9.0, 3.0], 10: [4.0, 4.0]})  # one head grew, the layer did not
    assert warn(one_head) == []
    assert "by up to 33%" in warn(one_head, "attn_head")[0]
    (warning,) = warn(seen_at({0: 9.0}, {0: 9.0, 1: 2.0, 5: 3.0}))
    assert warning.startswith("K: the first token of a sample is up to 3x all others in layer 7")
    assert warn(seen_at({0: 9.0}, {0: 9.0, 1: 2.0, 5: 5.0})) == []
    assert warn(seen_at({0: 9.0}, {0: 3.0, 1: 9.0})) == []
    # it sets the scale of one head, and not the layer's
    one_head = seen_at({0: 9.0}, {0: [9.0, 4.0], 1: [9.0, 1.0]})
    assert warn(one_head) == []
    assert "up to 4x all others" in warn(one_head, "attn_head")[0]
