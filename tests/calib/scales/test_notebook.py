"""What a notebook shows is well-formed, is of every layer, and nobody's names are markup."""

from xml.etree import ElementTree

import pytest
import torch
from command_line import calibrate
from engine_fixtures import make_scales

from calib import load_recipe, load_scales, load_stats, run
from calib.scales.scales import layers_html

HOSTILE = "<script>alert('&')</script>\x1b[31m"


def rows(html):
    """The text of every cell below the headings."""
    root = ElementTree.fromstring(html)
    return [[cell.text for cell in row] for row in root.iter("tr")][1:]


@pytest.fixture
def output(tiny_directory, tmp_path):
    done = calibrate(tiny_directory, "-o", tmp_path / "out", "--strategy", "attn_head")
    assert done.exit_code == 0, done.stderr
    return tmp_path / "out"


def test_statistics_show_the_range_of_the_heads_amax(output):
    stats = load_stats(output)
    html = stats._repr_html_()
    assert f"Statistics of {stats.tokens} tokens" in html
    for row, (name, layer) in zip(rows(html), stats.layers.items(), strict=True):
        heads = layer.k.amax.amax(1).tolist()
        assert row[:3] == [str(layer.layer_idx), name, f"{min(heads):.4g} to {max(heads):.4g}"]
        assert len(row) == 5  # Q too


def test_scales_show_every_layer(output):
    scales = load_scales(output)
    html = scales._repr_html_()
    assert "attn_head, e4m3fn" in html
    for row, (name, layer) in zip(rows(html), scales.layers.items(), strict=True):
        assert row[1] == name
        assert row[3] == f"{float(layer.v.min()):.4g} to {float(layer.v.max()):.4g}"


def test_one_scale_is_one_figure():
    scales = make_scales("tensor")
    figures = [row[2] for row in rows(scales._repr_html_())]
    assert figures == [f"{float(layer.k):.4g}" for layer in scales.layers.values()]


def test_a_result_shows_layers_and_warnings(tiny_directory, tmp_path):
    small = {"data.dataset": "random", "data.samples": 4, "data.seq_len": 16, "device": "cpu"}
    result = run(str(tiny_directory), load_recipe(None, small), tmp_path / "out")
    html = result._repr_html_()
    assert [row[2] for row in rows(html)] == [f"{layer.k_amax:.4g}" for layer in result.layers]
    shown = [line.text for line in ElementTree.fromstring(html).iter("p")]
    amounts = "documents: 4, samples: 4; 64 tokens read, 0 left unread"
    assert [*(f"warning: {warning}" for warning in result.warnings), amounts] == shown


def test_names_are_no_markup():
    html = layers_html(HOSTILE, {HOSTILE: 0}, {(HOSTILE, HOSTILE): torch.ones(1)}, [HOSTILE])
    assert "<script" not in html
    assert "\x1b" not in html
    assert html.count("alert") == 4
    assert rows(html)[0][1].startswith("<script>alert('&')")


def test_a_layer_without_q_and_one_that_is_no_number():
    values = {
        ("a", "K"): torch.tensor(torch.nan),
        ("b", "K"): torch.ones(1),
        ("b", "Q"): torch.zeros(1),
    }
    assert rows(layers_html("", {"a": 0, "b": 1}, values)) == [
        ["0", "a", "nan", None],
        ["1", "b", "1", "0"],
    ]


@pytest.mark.parametrize(("layers", "hidden"), [(100, None), (101, "1"), (126, "26")])
def test_layers_after_the_first_hundred_are_counted(layers, hidden):
    names = {f"m{i}": i for i in range(layers)}
    html = layers_html("", names, {(name, "K"): torch.ones(1) for name in names})
    assert [row[1] for row in rows(html)] == [f"m{i}" for i in range(100)]
    notes = [line.text for line in ElementTree.fromstring(html).iter("p")]
    assert notes == ([f"{hidden} more layers are not shown"] if hidden else [])
