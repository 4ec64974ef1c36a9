"""The number format, checked against its definition rather than against torch's cast."""

import pytest
import torch

from fp8kv_runtime.fp8 import FP8_DTYPES, dequantize, fp8_max, quantize, scale_from_amax

ONE = torch.ones(1)
MAXIMA = {"e4m3fn": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0}


def grid(dtype):
    """All finite values of the format, ascending, and each one's code."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = values[values.isfinite()]
    return finite.unique()


@pytest.mark.parametrize("name", FP8_DTYPES)
def test_maximum_and_saturation(name):
    dtype = FP8_DTYPES[name]
    assert fp8_max(dtype) == MAXIMA[name]
    x = torch.tensor([1e9, -1e9, float("inf"), -float("inf"), MAXIMA[name] * 1.01])
    signs = torch.tensor([1, -1, 1, -1, 1])
    assert torch.equal(quantize(x, ONE, dtype).float(), MAXIMA[name] * signs)


@pytest.mark.parametrize("name", FP8_DTYPES)
def test_rounding_is_to_the_nearest_value_and_ties_to_even(name):
    dtype = FP8_DTYPES[name]
    values = grid(dtype)
    middles = (values[1:].double() + values[:-1].double()) / 2
    x = torch.cat([middles * (1 - 1e-6), middles, middles * (1 + 1e-6)]).float()
    restored = quantize(x, ONE, dtype).float()
    distance = (restored.double() - x.double()).abs()
    nearest = (values.double()[None] - x.double()[:, None]).abs().amin(1)
    assert torch.equal(distance, nearest)
    codes = quantize(middles.float(), ONE, dtype).view(torch.uint8)
    exact = middles == middles.float().double()
    assert (codes[exact] % 2 == 0).all()


@pytest.mark.parametrize("name", FP8_DTYPES)
def test_every_value_of_the_format_survives(name):
    values = grid(FP8_DTYPES[name])
    assert torch.equal(dequantize(quantize(values, ONE, FP8_DTYPES[name]), ONE), values)


@pytest.mark.parametrize("name", FP8_DTYPES)
def test_nan_stays_nan(name):
    assert quantize(torch.tensor([float("nan")]), ONE, FP8_DTYPES[name]).float().isnan().all()


def test_scale_restores():
    scale = scale_from_amax(torch.tensor([[2.0], [900.0]]))
    x = torch.tensor([[2.0, -1.0], [900.0, 0.0]])
    assert torch.equal(scale * 448, torch.tensor([[2.0], [900.0]]))
    assert torch.equal(quantize(x, scale).float(), torch.tensor([[448.0, -224.0], [448.0, 0.0]]))
    torch.testing.assert_close(dequantize(quantize(x, scale), scale), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("amax", [0.0, -1.0, float("nan"), float("inf"), 1e-44])
def test_no_scale_without_a_usable_amax(amax):
    with pytest.raises(ValueError, match="amax must be finite and large enough"):
        scale_from_amax(torch.tensor([1.0, amax]))
