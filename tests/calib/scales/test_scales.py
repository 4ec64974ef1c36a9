"""Scales are checked when made, and reduce to the safe side."""

import pytest
import torch

from calib.scales.scales import KVScales, LayerScales, SharedAttention

PER_HEAD = LayerScales(3, torch.tensor([0.5, 2.0]), torch.tensor([0.25, 0.125]), torch.ones(4))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_and_positive_is_refused(bad):
    with pytest.raises(ValueError, match="v scale must be finite, positive float32"):
        LayerScales(0, torch.ones(1), torch.tensor([bad]))


def test_a_scale_of_another_dtype_is_refused():
    with pytest.raises(ValueError, match="k scale must be finite, positive float32"):
        LayerScales(0, torch.ones(1, dtype=torch.bfloat16), torch.ones(1))


def test_reduce_max_gives_one_scale_per_tensor():
    reduced = KVScales("attn_head", "e4m3fn", {"a": PER_HEAD}).reduce_max()
    assert reduced.strategy == "tensor"
    assert {n: s.tolist() for n, s in reduced.layers["a"].items()} == {
        "k": [2.0],
        "v": [0.25],
        "q": [1.0],
    }


def test_a_module_that_shares_a_cache_has_its_owners_scales():
    scales = KVScales("attn_head", "e4m3fn", {"a": PER_HEAD}, {"b": SharedAttention(5, "a")})
    assert scales.expand_shared()["b"].layer_idx == 5
    assert scales.expand_shared()["b"].k is PER_HEAD.k
    assert scales.expand_shared()["b"].q is None
    assert list(scales.layers) == ["a"]
