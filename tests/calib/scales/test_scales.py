"""Statistics merge, scales are derived and shown; figures and warnings of them and of the text."""

import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import get_args
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from apply_cases import calibrated
from command_line import calibrate, fp8kv, one_line_error
from engine_fixtures import make_scales
from generation import PROMPT, as_json, continuation
from pydantic import ValidationError

from calib import load_recipe, load_scales, load_stats, run
from calib.capture.reductions import CpuReductions, GpuReductions
from calib.choices import OBSERVERS, ObserverName
from calib.commands.calibrate import layer_rows
from calib.errors import CalibrationError, InputError
from calib.recipe import ObserverRecipe
from calib.scales import observers
from calib.scales.observers import NUM_BINS, AbsMax, Mse, Percentile, bin_values
from calib.scales.places import BUCKETS, POSITION_BUCKETS
from calib.scales.scales import KVScales, LayerScales, SharedAttention, layers_html
from calib.scales.stats import KVStats, LayerStats, TensorStats, derive_scales
from calib.scales.summary import summarize, warnings_for
from calib.scales.text_summary import _MORE_TEXT, MAX_RUNS, SKETCH_BITS, TextRecord, TextSummary
from fp8kv_runtime.fp8 import FP8_DTYPES

K, NAME = [[1.0, 8.0], [4.0, 2.0]], "a.self_attn"


def layer(k, v=1.0, q=2.0, tokens=10):
    k = torch.tensor(k)
    histogram = torch.zeros(len(k), NUM_BINS, dtype=torch.int64)
    histogram[:, 0] = k[:, 0].long()
    parts = TensorStats(torch.full((2, 2), v)), TensorStats(torch.full((4, 2), q))
    return LayerStats(0, tokens, TensorStats(k, histogram, k.double(), -k, k / 2), *parts)


def stats(k=K, **changes):
    return KVStats({NAME: layer(k, **changes)})


def derive(measured, **options):
    return measured.scales(observer=AbsMax(), **options).layers[NAME]


def test_merge_takes_maxima_and_sums_and_refuses_what_does_not_fit():
    merged = stats().merge(stats([[3.0, 5.0], [0.0, 9.0]], v=7.0, tokens=5))
    found = merged.layers[NAME]
    assert (found.k.amax.tolist(), found.k.histogram[:, 0].tolist()) == ([[3.0, 8.0], [4.0, 9.0]], [4, 4])
    assert found.k.total.tolist() == [[4.0, 13.0], [4.0, 11.0]]
    assert found.k.low.tolist() == [[-3.0, -8.0], [-4.0, -9.0]]
    assert found.k.high.tolist() == [[1.5, 4.0], [2.0, 4.5]]
    assert found.v.amax.tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert merged.tokens == found.tokens == 15
    assert stats().merge(stats(v=float("nan"))).layers[NAME].v.amax.isnan().all()
    without = KVStats({NAME: replace(layer(K), k=TensorStats(torch.tensor(K)))})
    for one, two in ((stats(), without), (without, stats()), (stats(), KVStats({"b.self_attn": layer(K)}))):
        with pytest.raises(InputError, match="of different models .* what was collected differ"):
            one.merge(two)


def test_scale_is_amax_over_the_maximum_of_the_format_and_none_of_bad_numbers():
    for name, limit in {"e4m3fn": 448, "e4m3fnuz": 240, "e5m2": 57344}.items():
        for strategy, amax in {"tensor": [8.0], "attn_head": [8.0, 4.0], "channel": K}.items():
            found = derive(stats(), strategy=strategy, fp8_dtype=name)
            assert torch.equal(found.k, torch.tensor(amax) / limit), (name, strategy)
            assert found.k.dtype == torch.float32
            assert found.q is None
    found = derive(stats(), strategy="tensor", headroom=1.5, targets="qkv")
    assert torch.equal(found.k, torch.tensor([12.0]) / 448)
    assert torch.equal(found.q, torch.tensor([3.0]) / 448)
    # a dead head takes the largest scale of its layer
    found = derive(stats([[0.0, 0.0], [4.0, 2.0]]), strategy="attn_head")
    assert torch.equal(found.k, torch.tensor([4.0, 4.0]) / 448)
    for bad, message in (
        (float("nan"), "NaN or Inf was seen"),
        (float("inf"), "NaN or Inf was seen"),
        (0.0, "only zeros were seen"),
        (1e-43, "a scale would be"),
        (1e-32, "a scale would be 2.23e-35, which no engine loads; check"),
        (1e38, "a scale would be"),
    ):
        for strategy in ("tensor", "attn_head", "channel"):
            with pytest.raises(CalibrationError, match=f"a.self_attn V: {message}") as caught:
                derive(stats(v=bad), strategy=strategy)
            assert len(str(caught.value)) < 200


@pytest.mark.parametrize("strategy", ["tensor", "attn_head", "channel"])
def test_scales_cover_what_is_left_of_k_by_strategy(strategy, model, tmp_path):
    options = ("--center-keys", "--strategy", strategy, "--headroom", 1.5, "--format", "fp8kv")
    out = calibrated(model, tmp_path / "out", *options)
    stats, scales = load_stats(out), load_scales(out)
    for name, layer in scales.layers.items():
        k = stats.layers[name].k
        mean = (k.total / stats.layers[name].tokens).float()
        left = torch.maximum(k.high - mean, mean - k.low)
        largest = {"tensor": left.amax().view(1), "attn_head": left.amax(-1), "channel": left}
        assert torch.equal(layer.k, largest[strategy] * 1.5 / 448)
        assert torch.equal(layer.k_center, mean)
        assert (layer.v.dim(), len(layer.v)) == (1 + (strategy == "channel"), 2 - (strategy == "tensor"))
    rows = summarize(stats, scales)
    assert all(row.k_range_used == pytest.approx(1 / 1.5) for row in rows) == (strategy != "tensor")
    assert as_json(model, PROMPT, "--scales", out)["fp8"]["token_ids"] == continuation(model, scales)


def test_centred_keys_are_refused_with_the_way_out_where_nothing_holds_them(model, tmp_path):
    for name in ("vllm", "json", "trtllm"):
        done = calibrate(model, "-o", tmp_path / "out", "--center-keys", "--format", name, "--reduce", "max")
        way_out = "Use --format fp8kv, or leave out --center-keys"
        one_line_error(done, f"--format {name}: ", "nothing is subtracted from K", way_out)
    done = calibrate(model, "-o", tmp_path / "out", "--center-keys", "--format", "fp8kv", "--observer", "mse")
    one_line_error(done, "center_keys", "observer 'mse'", "use observer absmax")
    centred = calibrated(model, tmp_path / "centred", "--center-keys", "--format", "fp8kv")
    done = fp8kv("apply", centred, model, "--format", "vllm", "--strategy", "tensor", "-o", tmp_path / "out")
    one_line_error(done, "--format vllm: nothing is subtracted from K in vLLM. Use --format fp8kv")
    assert not (tmp_path / "out").exists()
    plain, recipe = TensorStats(torch.ones(2, 2)), load_recipe(None, {"center_keys": True})
    with pytest.raises(InputError, match="hold no means of K; calibrate with --center-keys"):
        derive_scales(KVStats({NAME: LayerStats(0, 1, plain, plain, plain)}), recipe)


PER_HEAD = LayerScales(3, torch.tensor([0.5, 2.0]), torch.tensor([0.25, 0.125]), torch.ones(4))
HOSTILE = "<script>alert('&')</script>\x1b[31m"


def test_a_scale_that_is_not_finite_and_positive_float32_is_refused():
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="v scale must be finite, positive float32"):
            LayerScales(0, torch.ones(1), torch.tensor([bad]))
    for k in (torch.ones(1, dtype=torch.bfloat16), torch.ones(1, 1, 1)):
        with pytest.raises(ValueError, match="k scale must be finite, positive float32"):
            LayerScales(0, k, torch.ones(1))


def test_scales_are_reduced_to_the_largest_and_shared_with_modules_without_a_cache():
    scales = KVScales("attn_head", "e4m3fn", {"a": PER_HEAD}, {"b": SharedAttention(5, "a")})
    reduced = scales.reduce_max()
    assert (reduced.strategy, reduced.has_q, reduced.has_center) == ("tensor", True, False)
    found = {letter: scale.tolist() for letter, scale in reduced.layers["a"].items()}
    assert found == {"k": [2.0], "v": [0.25], "q": [1.0]}
    shared = scales.expand_shared()["b"]
    assert (shared.layer_idx, shared.q) == (5, None)
    assert shared.k is PER_HEAD.k
    assert list(scales.layers) == ["a"]


def rows(html):
    return [[cell.text for cell in row] for row in ElementTree.fromstring(html).iter("tr")][1:]


def lines(html):
    return [line.text for line in ElementTree.fromstring(html).iter("p")]


def test_statistics_scales_and_a_result_show_every_layer(model, tmp_path):
    out = calibrated(model, tmp_path / "out", "--strategy", "attn_head")
    stats, scales = load_stats(out), load_scales(out)
    html = stats._repr_html_()
    assert f"Statistics of {stats.tokens} tokens" in html
    for row, (name, layer) in zip(rows(html), stats.layers.items(), strict=True):
        heads = layer.k.amax.amax(1).tolist()
        assert row[:3] == [str(layer.layer_idx), name, f"{min(heads):.4g} to {max(heads):.4g}"]
        assert len(row) == 5  # Q too
    html = scales._repr_html_()
    assert "attn_head, e4m3fn" in html
    for row, (name, layer) in zip(rows(html), scales.layers.items(), strict=True):
        assert (row[1], row[3]) == (name, f"{float(layer.v.min()):.4g} to {float(layer.v.max()):.4g}")
    one = make_scales("tensor")
    assert [row[2] for row in rows(one._repr_html_())] == [f"{float(x.k):.4g}" for x in one.layers.values()]
    small = {"data.dataset": "random", "data.samples": 4, "data.seq_len": 16, "device": "cpu"}
    result = run(str(model), load_recipe(None, small), tmp_path / "result")
    html = result._repr_html_()
    assert [row[2] for row in rows(html)] == [f"{layer.k_amax:.4g}" for layer in result.layers]
    amounts = "documents: 4, samples: 4; 64 tokens read, 0 left unread"
    assert lines(html) == [*(f"warning: {warning}" for warning in result.warnings), amounts]


def test_names_are_no_markup_and_layers_after_the_first_hundred_are_counted():
    html = layers_html(HOSTILE, {HOSTILE: 0}, {(HOSTILE, HOSTILE): torch.ones(1)}, [HOSTILE])
    assert "<script" not in html
    assert "\x1b" not in html
    assert html.count("alert") == 4
    assert rows(html)[0][1].startswith("<script>alert('&')")
    values = {("a", "K"): torch.tensor(torch.nan), ("b", "K"): torch.ones(1), ("b", "Q"): torch.zeros(1)}
    assert rows(layers_html("", {"a": 0, "b": 1}, values)) == [["0", "a", "nan", None], ["1", "b", "1", "0"]]
    for layers, hidden in ((100, []), (101, ["1 more layers are not shown"])):
        names = {f"m{i}": i for i in range(layers)}
        html = layers_html("", names, {(name, "K"): torch.ones(1) for name in names})
        assert ([row[1] for row in rows(html)], lines(html)) == ([f"m{i}" for i in range(100)], hidden)


VALUES = (torch.randn(4000, 2, 8, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
VALUES[7, 1, 3] = 90.0  # an outlier in head 1
AMAX, HISTOGRAM = VALUES.abs().amax(0).float(), CpuReductions().histogram(VALUES)


@pytest.mark.parametrize("reductions", [CpuReductions(), GpuReductions()], ids=["cpu", "gpu"])
def test_each_value_is_counted_in_the_bin_of_its_bfloat16_magnitude_and_head(reductions):
    values = bin_values()
    assert (values[0], values[-1]) == (2.0**-24, 2.0**24 - 2.0**16)
    assert torch.equal(values.bfloat16().float(), values)
    assert (values.bfloat16().view(torch.int16).diff() == 1).all()
    x = torch.tensor([[[1.0, -1.0, 1.5], [448.0, 0.0, 2.0**-30]]])  # [N=1, H=2, D=3]
    counts = reductions.histogram(x)
    found = {(h, float(values[b])): int(counts[h, b]) for h, b in counts.nonzero().tolist()}
    assert found == {(0, 1.0): 2, (0, 1.5): 1, (1, 448.0): 1, (1, 2.0**-24): 2}
    # other dtypes are rounded to bfloat16, and the last bin holds all beyond it
    rounded = VALUES.float() * 1.001
    assert torch.equal(reductions.histogram(rounded), reductions.histogram(rounded.bfloat16()))
    assert reductions.histogram(torch.full((1, 1, 4), 1e30))[0, NUM_BINS - 1] == 4


def test_absmax_and_percentile_reduce_to_the_groups_of_the_strategy():
    for kind, wanted in {"tensor": AMAX.amax().view(1), "attn_head": AMAX.amax(-1), "channel": AMAX}.items():
        assert torch.equal(AbsMax().amax(AMAX, None, kind), wanted)
    found = Percentile(99.0).amax(AMAX, HISTOGRAM, "attn_head")
    for head in range(2):
        magnitudes = VALUES[:, head].abs().float().flatten().sort().values
        assert found[head] == magnitudes[-(len(magnitudes) // 100) - 1]
    assert torch.equal(Percentile(100).amax(AMAX, HISTOGRAM, "tensor"), AMAX.amax().view(1))
    assert OBSERVERS.keys() == observers._CONSTRUCTORS.keys() == {*get_args(ObserverName)}
    for name in OBSERVERS:
        recipe = ObserverRecipe(name=name)
        refused = pytest.raises(InputError, match="hold no histogram; calibrate with observer mse")
        with refused if recipe.needs_histogram else nullcontext():
            observers.make_observer(recipe).amax(AMAX, None, "tensor")
    for observer in (Percentile(99.0), Mse(torch.float8_e4m3fn)):
        with pytest.raises(InputError, match="keeps no histogram per channel; use observer absmax"):
            observer.amax(AMAX, HISTOGRAM, "channel")


class Wrong:
    def __init__(self, answer):
        self.answer = answer

    def amax(self, amax, histogram, strategy):
        for copy in filter(torch.is_tensor, (amax, histogram)):
            copy.mul_(2)
        return self.answer(amax)


@pytest.mark.parametrize(
    ("strategy", "shape", "answer", "problem"),
    [
        ("attn_head", "[2]", lambda x: x, "a tensor of shape [2, 2]"),
        ("attn_head", "[2]", lambda x: x.amax().view(1), "a tensor of shape [1]"),
        ("tensor", "[1]", lambda x: x.amax(1), "a tensor of shape [2]"),
        ("tensor", "[1]", lambda x: x.amax(), "a tensor of shape []"),
        ("channel", "[2, 2]", lambda x: x.amax(1), "a tensor of shape [2]"),
        ("tensor", "[1]", lambda x: None, "a NoneType"),
        ("tensor", "[1]", lambda x: 1.5, "a float"),
        ("attn_head", "[2]", lambda x: x.amax(1) * torch.tensor([1, float("nan")]), "NaN, Inf or a negative"),
        ("attn_head", "[2]", lambda x: x.amax(1) * torch.tensor([1, -1]), "NaN, Inf or a negative"),
    ],
)
def test_what_an_observer_returned_and_was_to_return_is_said(strategy, shape, answer, problem):
    with pytest.raises(InputError) as caught:
        stats().scales(strategy=strategy, observer=Wrong(answer))
    said = str(caught.value)
    assert said.startswith(f"{NAME} K: observer Wrong returned {problem}")
    assert said.endswith(
        f"for strategy '{strategy}' it must return a tensor of shape {shape}, finite and not negative"
    )


def test_an_observer_changes_no_statistics_and_is_named_for_its_own_zeros():
    measured = KVStats({NAME: replace(layer(K), v=layer(K).k)})
    scales = measured.scales(strategy="attn_head", observer=Wrong(lambda x: x.amax(1)))
    assert torch.equal(scales.layers[NAME].k, torch.tensor([16.0, 8.0]) / 448)
    kept = layer(K).k
    assert torch.equal(measured.layers[NAME].k.amax, kept.amax)
    assert torch.equal(measured.layers[NAME].k.histogram, kept.histogram)
    with pytest.raises(
        CalibrationError, match="a scale would be 0, which no engine loads; check observer Wrong"
    ):
        measured.scales(strategy="tensor", observer=Wrong(lambda x: torch.zeros(1)))


def error(values, amax, dtype):
    """Squared error of quantising `values` so that `amax` maps to the format's maximum."""
    limit = torch.finfo(dtype).max
    scale = amax / limit
    restored = (values / scale).clamp(-limit, limit).to(dtype).float() * scale
    return (restored - values).double().square().sum()


@pytest.mark.parametrize("name", FP8_DTYPES)
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_mse_beats_every_other_candidate_on_the_values_themselves(name, strategy):
    dtype = FP8_DTYPES[name]
    groups = VALUES.float().transpose(0, 1).flatten(1)  # [H, N * D]
    groups = groups.reshape(1, -1) if strategy == "tensor" else groups
    for values, amax in zip(groups, Mse(dtype).amax(AMAX, HISTOGRAM, strategy), strict=True):
        candidates = values.abs().amax() * Mse.candidates
        assert amax == candidates[torch.stack([error(values, c, dtype) for c in candidates]).argmin()]


RECIPE = load_recipe(None)


def layers_of(*k_heads, v=1.0, shared=None):
    layers = {}
    for i, heads in enumerate(k_heads):
        k = TensorStats(torch.tensor(heads, dtype=torch.float32)[:, None].repeat(1, 2))
        other = TensorStats(torch.full((len(heads), 2), v))
        layers[f"layers.{i}.self_attn"] = LayerStats(i, 1024, k, other, other)
    return KVStats(layers, shared or {})


def derived(measured, strategy="tensor"):
    return measured.scales(strategy=strategy, observer=AbsMax())


def warn(measured, strategy="tensor", recipe=RECIPE):
    return warnings_for(measured, derived(measured, strategy), recipe)


def test_a_row_has_the_layers_figures():
    measured = layers_of([112.0, 448.0], v=224.0)
    (row,) = summarize(measured, derived(measured))
    assert layer_rows([row]) == [("0", "448", "224", "1", "0.5", "25%", "100%")]
    (row,) = summarize(measured, derived(measured, "attn_head"))
    assert (row.k_range_used, row.k_scale) == (1.0, 1.0)


def test_what_a_recipe_or_unscaled_fp8_clips_is_said():
    quiet = layers_of([10.0, 12.0, 9.0])
    assert warn(quiet) == warn(quiet, recipe=load_recipe(None, {"headroom": 1.5})) == []
    (warning,) = warn(quiet, recipe=load_recipe(None, {"headroom": 0.5}))
    assert warning.startswith("headroom 0.5: scales hold 50% of the largest values that were seen")
    (warning,) = warn(quiet, recipe=load_recipe(None, {"observer.name": "percentile"}))
    assert "clips the largest K and V: compare it with absmax" in warning
    assert warn(layers_of([448.0, 440.0])) == []
    (warning,) = warn(layers_of([10.0, 12.0], [500.0, 600.0]))
    assert warning.startswith("K scale > 1 in layer 1: unscaled FP8 would clip there")
    for layers, named in ((6, "layers 0, 1, 2, 3, 4, 5"), (7, "7 layers")):
        (warning,) = warn(layers_of(*[[600.0, 600.0]] * layers))
        assert f"K scale > 1 in {named}:" in warning
    assert len(warn(layers_of([65504.0, 60000.0]))) == 1
    assert warn(layers_of([65505.0, 60000.0]))[1].startswith("K exceeds 65,504 in layer 0, beyond float16;")


def test_outlier_heads_and_dead_heads_are_named():
    (warning,) = warn(layers_of([1.0, 1.0, 20.0], [1.0, 2.0, 1.0]))
    said = "K: one head is 20x the others in layer 0; use --strategy attn_head where the engine reads it"
    assert warning == said
    assert warn(layers_of([1.0, 1.0, 20.0]), "attn_head") == warn(layers_of([1.0, 1.0, 19.0])) == []
    covered = ["K: a head or channel held only zeros in layer 0; it takes the layer's largest scale"]
    assert warn(layers_of([0.0, 3.0, 3.0]), "attn_head") == warn(layers_of([0.0, 3.0]), "channel") == covered
    for heads in ([0.0, 3.0], [0.0, 0.0, 3.0]):
        (warning,) = warn(layers_of(heads))
        assert warning == "K: a head held only zeros in layer 0; the layer's one scale is for it too"
    assert "20x the others in layer 0" in warn(layers_of([0.0, 1.0, 1.0, 20.0]))[0]


def test_shared_layers_and_layers_of_less_text_are_named():
    both = layers_of([1.0, 1.0], [1.0, 1.0])
    few = replace(both.layers["layers.1.self_attn"], tokens=1000)
    assert warn(replace(both, layers={**both.layers, "layers.1.self_attn": few})) == [
        "only 1,000 of 1,024 tokens were counted in layer 1: the scales there rest on less text"
    ]
    shared = {"layers.1.self_attn": SharedAttention(1, "layers.0.self_attn")}
    assert warn(layers_of([1.0, 1.0], shared=shared)) == [
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


def texts(samples=32, length=64, vocabulary=500, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(samples)]


@pytest.mark.parametrize("skip_first", [0, 3])
def test_counts_of_text(skip_first):
    samples = [*texts(), *texts(), [1, 2, 3], [1, 2, 3, 4], [1, 2, 9, 9, 9], [], [7]]
    summary = TextSummary.of(samples, skip_first, unknown={9, 5}, words=(12, 34))
    counted = [token for sample in samples for token in sample[skip_first:]]
    assert summary.tokens == len(counted)
    assert summary.samples == sum(len(sample) > skip_first for sample in samples)
    assert summary.distinct_tokens == len({*counted})
    assert summary.unknown_tokens == counted.count(9) + counted.count(5)
    # tokens that differ in themselves or in what is before them have a K of their own
    beginnings = {tuple(s[: n + 1]) for s in samples for n in range(skip_first, len(s))}
    assert (summary.unrepeated_tokens, (summary.words, summary.word_tokens)) == (len(beginnings), (12, 34))


ENOUGH = TextSummary.of(texts(), unknown={1}, words=(1500, 2048))


def test_each_doubt_is_one_line_of_its_own():
    for said, field, doubtful, close in (
        ("only 1,023 tokens were read", "tokens", 1023, 1024),
        ("only 31 different tokens occur", "distinct_tokens", 31, 32),
        ("the 32 samples are alike: 1,025 of 2,048 tokens", "unrepeated_tokens", 1023, 1024),
        ("4,097 words became 2,048 tokens", "words", 4097, 4096),
        ("10% of the tokens are the unknown token", "unknown_tokens", 205, 204),
    ):
        assert ENOUGH.warnings() == replace(ENOUGH, **{field: close}).warnings() == []
        lines = replace(ENOUGH, **{field: doubtful}).warnings()
        assert [line.startswith(said) for line in lines].count(True) == 1
        assert all(len(line.split()) <= 25 for line in lines)
        assert len(lines) == 1
    few = replace(ENOUGH, tokens=1100, unrepeated_tokens=1000).warnings()
    assert few == ["only 1,000 new tokens were read, too few to tell how large K and V become; " + _MORE_TEXT]


def test_next_to_nothing_is_refused_for_a_cause():
    for samples in ([[*range(63)]], [[*range(15)] * 9]):
        with pytest.raises(InputError, match=r"are too few to calibrate on.*--allow-few-tokens"):
            TextSummary.of(samples).check()
    for samples in ([[*range(64)]], [[*range(16)] * 9], []):
        TextSummary.of(samples).check()


@pytest.mark.parametrize("vocabulary", [10, 500, 3000])
def test_of_joined_texts_different_tokens_are_estimated(vocabulary):
    """Exact where one text holds the other's tokens, or few collide; within 10% elsewhere."""
    parts = [texts(seed=seed, vocabulary=vocabulary) for seed in range(3)]
    whole = TextSummary.of([*parts[0], *parts[1], *parts[2]], unknown={3}, words=(300, 600))
    one, two, three = (TextSummary.of(part, unknown={3}, words=(100, 200)) for part in parts)
    for joined in (one.join(two).join(three), three.join(one).join(two)):
        assert joined.distinct_tokens == pytest.approx(whole.distinct_tokens, rel=0.1)
        # samples of other runs are taken to differ
        estimated = {"distinct_tokens": 0, "unrepeated_tokens": 0, "records": None}
        assert replace(joined, **estimated) == replace(whole, **estimated)
        assert whole.unrepeated_tokens <= joined.unrepeated_tokens <= joined.tokens
        assert len(joined.records) == 3
    assert one.join(one).distinct_tokens == one.distinct_tokens


def test_the_sketch_tells_no_token_apart_from_many_others():
    bits = [TextSummary.of([[token]]).sketch for token in range(32_000)]
    assert all(bit.bit_count() == 1 for bit in bits)
    sharing = Counter(bit.bit_length() for bit in bits)
    assert len(sharing) == SKETCH_BITS
    assert min(sharing.values()) >= 4
    one, other = (TextSummary.of([tokens]) for tokens in ([5, 7, 6], [6, 5, 7]))
    assert replace(one, records=None) == replace(other, records=None)


def sample(seed, length=256):
    return np.random.default_rng(seed).integers(50_000, size=length).tolist()


def test_what_was_read_is_known_wherever_it_begins():
    texts = [sample(seed) for seed in range(20)]
    record = TextRecord.of(texts)
    assert record == TextRecord.of(texts[::-1])
    joined = [token for text in texts for token in text]
    assert all(record.has_read(joined[i : i + 100]) for i in range(0, 5000, 77))
    assert not any(record.has_read(sample(seed)) for seed in range(100, 300))
    # of texts whose beginning was read, all is known
    for cut in (64, 128):
        record = TextRecord.of([text[:cut] for text in texts])
        assert all(record.has_read(text) for text in texts), cut
    # fewer tokens than a run are known as a whole, and never known to be new
    record = TextRecord.of([[5, 6, 7], sample(0)])
    assert record.has_read([5, 6, 7])
    assert record.has_read([5, 6]) is record.has_read(sample(0)[-10:]) is None


def test_a_long_text_keeps_a_record_of_some_kilobytes():
    texts = [sample(seed, 2048) for seed in range(500)]  # a million tokens, as the default recipe reads
    record = TextRecord.of(texts)
    assert MAX_RUNS / 2 < len(record._hashes) <= MAX_RUNS
    assert len(record.runs) < 30_000
    told = [record.has_read(text[1000:1256]) for text in texts]
    assert False not in told
    assert told.count(None) < 0.05 * len(told)  # none of whose runs was kept: e^-3.8
    longer = [text + sample(seed + 512, 8 * 2048) for seed, text in enumerate(texts[:50])]
    assert all(map(record.has_read, longer))  # cut by a larger --seq-len
    others = [record.has_read(sample(seed)) for seed in range(1000, 2000)]
    assert others.count(True) < 0.01 * len(others)


def test_system_prompts_are_told_from_samples_that_differ_in_their_ends_alone():
    prompt = sample(0, 200)
    record = TextRecord.of([prompt + sample(seed, 60) for seed in range(1, 30)])
    assert not any(record.has_read(prompt + sample(seed, 60)) for seed in range(50, 90))
    assert all(record.has_read(prompt + sample(seed, 60)) for seed in range(1, 30))
    longer = TextRecord.of([sample(1), sample(1) + sample(2), sample(1) + sample(3)])
    assert longer.has_read(sample(1))  # which is no prompt: it was read as a chat of its own
    # chats with several answers each, or documents in two versions
    prompts = [sample(seed, 400) for seed in range(10)]
    for answers in (2, 4):
        ends = iter(sample(seed, 40) for seed in range(100, 200))
        record = TextRecord.of([prompt + next(ends) for prompt in prompts for _ in range(answers)])
        assert all(record.has_read(prompt + next(ends)) for prompt in prompts)


def test_a_record_is_salted_by_its_text_and_none_if_damaged():
    one, other = TextRecord.of([sample(0)]), TextRecord.of([sample(0), sample(1)])
    assert one.salt != other.salt
    assert not {*one._hashes.tolist()} <= {*other._hashes.tolist()}
    fields = one.model_dump()
    assert TextRecord.model_validate(fields) == one
    for broken in ({"runs": "%"}, {"one_in": 0}, {"below": 0}, {"salt": -1}, {"tokens": "5"}):
        with pytest.raises(ValidationError):
            TextRecord.model_validate(fields | broken)
