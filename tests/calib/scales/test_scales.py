"""Scales are checked when made, reduce to the safe side, and show themselves in a notebook."""

from xml.etree import ElementTree

import pytest
import torch
from command_line import calibrate, succeeded
from engine_fixtures import make_scales

from calib import load_recipe, load_scales, load_stats, run
from calib.scales.scales import KVScales, LayerScales, SharedAttention, layers_html

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
    """The text of every cell below the headings."""
    root = ElementTree.fromstring(html)
    return [[cell.text for cell in row] for row in root.iter("tr")][1:]


def lines(html):
    return [line.text for line in ElementTree.fromstring(html).iter("p")]


def test_statistics_and_scales_show_every_layer(tiny_directory, tmp_path):
    succeeded(calibrate(tiny_directory, "-o", tmp_path / "out", "--strategy", "attn_head"))
    stats, scales = load_stats(tmp_path / "out"), load_scales(tmp_path / "out")
    html = stats._repr_html_()
    assert f"Statistics of {stats.tokens} tokens" in html
    for row, (name, layer) in zip(rows(html), stats.layers.items(), strict=True):
        heads = layer.k.amax.amax(1).tolist()
        assert row[:3] == [str(layer.layer_idx), name, f"{min(heads):.4g} to {max(heads):.4g}"]
        assert len(row) == 5  # Q too
    html = scales._repr_html_()
    assert "attn_head, e4m3fn" in html
    for row, (name, layer) in zip(rows(html), scales.layers.items(), strict=True):
        assert row[1] == name
        assert row[3] == f"{float(layer.v.min()):.4g} to {float(layer.v.max()):.4g}"
    one = make_scales("tensor")
    assert [row[2] for row in rows(one._repr_html_())] == [f"{float(x.k):.4g}" for x in one.layers.values()]


def test_a_result_shows_layers_and_warnings(tiny_directory, tmp_path):
    small = {"data.dataset": "random", "data.samples": 4, "data.seq_len": 16, "device": "cpu"}
    result = run(str(tiny_directory), load_recipe(None, small), tmp_path / "out")
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
    shown = rows(layers_html("", {"a": 0, "b": 1}, values))
    assert shown == [["0", "a", "nan", None], ["1", "b", "1", "0"]]
    for layers, hidden in ((100, []), (101, ["1 more layers are not shown"])):
        names = {f"m{i}": i for i in range(layers)}
        html = layers_html("", names, {(name, "K"): torch.ones(1) for name in names})
        assert [row[1] for row in rows(html)] == [f"m{i}" for i in range(100)]
        assert lines(html) == hidden
