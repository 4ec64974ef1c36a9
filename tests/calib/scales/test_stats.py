"""Merging, saving, and deriving scales from hand-made statistics."""

from dataclasses import replace

import pytest
import torch

from calib.errors import CalibrationError, InputError
from calib.files.names import STATS_FILE
from calib.scales.observers import NUM_BINS, AbsMax, group_amax
from calib.scales.scales import SharedAttention
from calib.scales.stats import KVStats, LayerStats, TensorStats
from calib.scales.stats_file import load_stats, save_stats


def histogram_of(k):
    counts = torch.zeros(len(k), NUM_BINS, dtype=torch.int64)
    counts[:, 0] = k[:, 0].long()
    return counts


def layer(k, v=1.0, q=2.0, tokens=10):
    k = torch.tensor(k)
    return LayerStats(
        0,
        tokens,
        TensorStats(k, histogram_of(k), k.double(), -k, k / 2),
        TensorStats(torch.full((2, 2), v)),
        TensorStats(torch.full((4, 2), q)),
    )


def stats(**changes):
    return KVStats({"a.self_attn": layer([[1.0, 8.0], [4.0, 2.0]], **changes)})


def test_merge_takes_maxima_and_sums():
    merged = stats().merge(KVStats({"a.self_attn": layer([[3.0, 5.0], [0.0, 9.0]], v=7.0, tokens=5)}))
    found = merged.layers["a.self_attn"]
    assert found.k.amax.tolist() == [[3.0, 8.0], [4.0, 9.0]]
    assert found.k.histogram[:, 0].tolist() == [4, 4]
    assert found.k.total.tolist() == [[4.0, 13.0], [4.0, 11.0]]
    assert found.k.low.tolist() == [[-3.0, -8.0], [-4.0, -9.0]]
    assert found.k.high.tolist() == [[1.5, 4.0], [2.0, 4.5]]
    assert found.v.amax.tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert merged.tokens == found.tokens == 15


def test_merge_keeps_nan():
    merged = stats().merge(stats(v=float("nan")))
    assert merged.layers["a.self_attn"].v.amax.isnan().all()


def test_statistics_of_different_models_do_not_merge():
    with pytest.raises(InputError, match="of different models"):
        stats().merge(KVStats({"b.self_attn": layer([[1.0, 8.0], [4.0, 2.0]])}))


def test_what_only_one_side_collected_is_refused_not_dropped():
    k = torch.tensor([[1.0, 8.0], [4.0, 2.0]])
    found = stats().layers["a.self_attn"]
    without = KVStats({"a.self_attn": replace(found, k=TensorStats(k))})
    for one, other in ((stats(), without), (without, stats())):
        with pytest.raises(InputError, match="what was collected differ"):
            one.merge(other)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("tensor", [8.0]),
        ("attn_head", [8.0, 4.0]),
        ("channel", [[1.0, 8.0], [4.0, 2.0]]),
    ],
)
@pytest.mark.parametrize(("name", "limit"), [("e4m3fn", 448), ("e4m3fnuz", 240), ("e5m2", 57344)])
def test_scale_is_amax_over_the_maximum_of_the_format(strategy, expected, name, limit):
    scales = stats().scales(strategy=strategy, observer=AbsMax(), fp8_dtype=name)
    assert torch.equal(scales.layers["a.self_attn"].k, torch.tensor(expected) / limit)
    assert scales.layers["a.self_attn"].k.dtype == torch.float32
    assert scales.layers["a.self_attn"].q is None


def test_headroom_multiplies_and_qkv_adds_q():
    scales = stats().scales(strategy="tensor", observer=AbsMax(), headroom=1.5, targets="qkv")
    assert torch.equal(scales.layers["a.self_attn"].k, torch.tensor([12.0]) / 448)
    assert torch.equal(scales.layers["a.self_attn"].q, torch.tensor([3.0]) / 448)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (float("nan"), "a.self_attn V: NaN or Inf was seen"),
        (float("inf"), "a.self_attn V: NaN or Inf was seen"),
        (0.0, "a.self_attn V: only zeros were seen"),
        (1e-43, "a.self_attn V: a scale would be"),
        (1e-32, "a.self_attn V: a scale would be 2.23e-35"),
        (1e38, "a.self_attn V: a scale would be"),
    ],
)
@pytest.mark.parametrize("strategy", ["tensor", "attn_head", "channel"])
def test_bad_numbers_never_become_scales(bad, message, strategy):
    with pytest.raises(CalibrationError, match=message) as caught:
        stats(v=bad).scales(strategy=strategy, observer=AbsMax())
    assert len(str(caught.value)) < 200


def test_a_dead_head_takes_the_largest_scale_of_its_layer():
    dead = KVStats({"a.self_attn": layer([[0.0, 0.0], [4.0, 2.0]])})
    scales = dead.scales(strategy="attn_head", observer=AbsMax())
    assert torch.equal(scales.layers["a.self_attn"].k, torch.tensor([4.0, 4.0]) / 448)
    amax = dead.layers["a.self_attn"].k.amax
    zeros = {name: int((group_amax(amax, name) == 0).sum()) for name in ("attn_head", "channel", "tensor")}
    assert zeros == {"attn_head": 1, "channel": 2, "tensor": 0}


def test_a_file_gives_back_what_was_saved(tmp_path):
    shared = {"b.self_attn": SharedAttention(1, "a.self_attn")}
    saved = KVStats(stats().layers, shared)
    save_stats(saved, tmp_path / STATS_FILE)
    loaded = load_stats(tmp_path)
    assert loaded.shared == shared
    assert loaded.tokens == 10
    for which in "kvq":
        before = getattr(saved.layers["a.self_attn"], which)
        after = getattr(loaded.layers["a.self_attn"], which)
        assert torch.equal(before.amax, after.amax)
        assert (before.histogram is None) == (after.histogram is None)
        for field in ("total", "low", "high"):
            assert (getattr(before, field) is None) == (getattr(after, field) is None)
    assert torch.equal(loaded.layers["a.self_attn"].k.low, saved.layers["a.self_attn"].k.low)
    assert torch.equal(loaded.layers["a.self_attn"].k.high, saved.layers["a.self_attn"].k.high)
    assert loaded.layers["a.self_attn"].k.total.dtype == torch.float64


def test_a_file_that_holds_no_statistics_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read statistics"):
        load_stats(tmp_path)
    (tmp_path / STATS_FILE).write_bytes(b"junk")
    with pytest.raises(InputError, match="cannot read statistics"):
        load_stats(tmp_path)
