"""Merging hand-made statistics, and the scales derived from them."""

from dataclasses import replace

import pytest
import torch

from calib.errors import CalibrationError, InputError
from calib.scales.observers import NUM_BINS, AbsMax
from calib.scales.stats import KVStats, LayerStats, TensorStats

K = [[1.0, 8.0], [4.0, 2.0]]
NAME = "a.self_attn"


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
    assert found.k.amax.tolist() == [[3.0, 8.0], [4.0, 9.0]]
    assert found.k.histogram[:, 0].tolist() == [4, 4]
    assert found.k.total.tolist() == [[4.0, 13.0], [4.0, 11.0]]
    assert found.k.low.tolist() == [[-3.0, -8.0], [-4.0, -9.0]]
    assert found.k.high.tolist() == [[1.5, 4.0], [2.0, 4.5]]
    assert found.v.amax.tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert merged.tokens == found.tokens == 15
    assert stats().merge(stats(v=float("nan"))).layers[NAME].v.amax.isnan().all()
    without = KVStats({NAME: replace(layer(K), k=TensorStats(torch.tensor(K)))})
    other = KVStats({"b.self_attn": layer(K)})
    for one, two in ((stats(), without), (without, stats()), (stats(), other)):
        with pytest.raises(InputError, match="of different models .* what was collected differ"):
            one.merge(two)


def test_scale_is_amax_over_the_maximum_of_the_format():
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
def test_bad_numbers_never_become_scales(bad, message):
    for strategy in ("tensor", "attn_head", "channel"):
        with pytest.raises(CalibrationError, match=message) as caught:
            derive(stats(v=bad), strategy=strategy)
        assert len(str(caught.value)) < 200
