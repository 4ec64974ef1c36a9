"""Statistics merge, scales are derived and checked, and both show themselves in a notebook."""

from contextlib import nullcontext
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from apply_cases import calibrated
from command_line import calibrate, one_line_error
from engine_fixtures import make_scales
from generation import PROMPT, as_json, continuation

from calib import load_recipe, load_scales, load_stats, run
from calib.choices import OBSERVERS
from calib.errors import CalibrationError, InputError
from calib.recipe import ObserverRecipe
from calib.scales import observers
from calib.scales.observers import NUM_BINS, AbsMax, Mse, Percentile, bin_values, magnitude_histogram
from calib.scales.scales import KVScales, LayerScales, SharedAttention, layers_html
from calib.scales.stats import KVStats, LayerStats, TensorStats, derive_scales
from calib.scales.summary import summarize
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
        (1e-32, "a scale would be 2.23e-35"),
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
        one_line_error(done, f"--format {name}: ", "subtracts nothing from K", way_out)
    done = calibrate(model, "-o", tmp_path / "out", "--center-keys", "--format", "fp8kv", "--observer", "mse")
    one_line_error(done, "center_keys", "observer 'mse'", "use observer absmax")
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
AMAX, HISTOGRAM = VALUES.abs().amax(0).float(), magnitude_histogram(VALUES)


def test_each_value_is_counted_in_the_bin_of_its_bfloat16_magnitude_and_head():
    values = bin_values()
    assert (values[0], values[-1]) == (2.0**-24, 2.0**24 - 2.0**16)
    assert torch.equal(values.bfloat16().float(), values)
    assert (values.bfloat16().view(torch.int16).diff() == 1).all()
    x = torch.tensor([[[1.0, -1.0, 1.5], [448.0, 0.0, 2.0**-30]]])  # [N=1, H=2, D=3]
    counts = magnitude_histogram(x)
    found = {(h, float(values[b])): int(counts[h, b]) for h, b in counts.nonzero().tolist()}
    assert found == {(0, 1.0): 2, (0, 1.5): 1, (1, 448.0): 1, (1, 2.0**-24): 2}
    # other dtypes are rounded to bfloat16, and the last bin holds all beyond it
    rounded = VALUES.float() * 1.001
    assert torch.equal(magnitude_histogram(rounded), magnitude_histogram(rounded.bfloat16()))
    assert magnitude_histogram(torch.full((1, 1, 4), 1e30))[0, NUM_BINS - 1] == 4


def test_absmax_and_percentile_reduce_to_the_groups_of_the_strategy():
    for kind, wanted in {"tensor": AMAX.amax().view(1), "attn_head": AMAX.amax(-1), "channel": AMAX}.items():
        assert torch.equal(AbsMax().amax(AMAX, None, kind), wanted)
    found = Percentile(99.0).amax(AMAX, HISTOGRAM, "attn_head")
    for head in range(2):
        magnitudes = VALUES[:, head].abs().float().flatten().sort().values
        assert found[head] == magnitudes[-(len(magnitudes) // 100) - 1]
    assert torch.equal(Percentile(100).amax(AMAX, HISTOGRAM, "tensor"), AMAX.amax().view(1))
    for name in OBSERVERS:
        recipe = ObserverRecipe(name=name)
        refused = pytest.raises(InputError, match="hold no histogram; calibrate with observer mse")
        with refused if recipe.needs_histogram else nullcontext():
            observers.make_observer(recipe).amax(AMAX, None, "tensor")


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
