"""The number format, checked against its definition rather than against torch's cast."""

import pytest
import torch

from fp8kv_runtime.fp8 import FP8_DTYPES, dequantize, fp8_max, quantize, scale_from_amax

ONE, MAXIMA = torch.ones(1), {"e4m3fn": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0}
OF_EVERY_FORMAT = pytest.mark.parametrize("format", FP8_DTYPES)


@OF_EVERY_FORMAT
def test_rounding_is_to_the_nearest_value_with_ties_to_even_and_saturates(format):
    dtype, largest = FP8_DTYPES[format], MAXIMA[format]
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    values = values[values.isfinite()].unique()
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, middles * (1 - 1e-6), middles, middles * (1 + 1e-6)]).float()
    distance = (quantize(x, ONE, dtype).double() - x.double()).abs()
    assert torch.equal(distance, (values[None] - x.double()[:, None]).abs().amin(1))
    exact = middles.float()[middles == middles.float().double()]
    assert (quantize(exact, ONE, dtype).view(torch.uint8) % 2 == 0).all()
    assert fp8_max(dtype) == values[-1] == largest
    beyond = torch.tensor([1e9, -1e9, float("inf"), -float("inf"), largest * 1.01])
    assert quantize(beyond, ONE, dtype).float().tolist() == [largest, -largest, largest, -largest, largest]
    assert quantize(torch.tensor([float("nan")]), ONE, dtype).float().isnan().all()


def test_scale_restores():
    amax, x = torch.tensor([[2.0], [900.0]]), torch.tensor([[2.0, -1.0], [900.0, 0.0]])
    scale = scale_from_amax(amax)
    assert torch.equal(scale * 448, amax)
    assert torch.equal(quantize(x, scale).float(), torch.tensor([[448.0, -224.0], [448.0, 0.0]]))
    for amax in (0.0, -1.0, float("nan"), float("inf"), 1e-44):
        with pytest.raises(ValueError, match=r"^amax must be finite and large enough to scale, got \[1.0, "):
            scale_from_amax(torch.tensor([1.0, amax]))


@OF_EVERY_FORMAT
def test_dequantize_is_value_times_scale(format):
    codes = torch.arange(256, dtype=torch.uint8).view(FP8_DTYPES[format])
    # with NaN, and without: another way
    finite = torch.where(codes.float().isfinite(), codes.view(torch.uint8), 0).view(codes.dtype)
    # with 24 bits in use, that the product is rounded once shows in the last of them
    for scale in (torch.tensor([0.1]), torch.rand(4, 1) + 0.1, torch.rand(3, 1, 1) + 0.1):
        for each in (codes.view(4, 64), finite.view(4, 64)):
            got, want = dequantize(each, scale), each.float() * scale
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    view = finite[:124].view(4, 31).T[1:]
    assert not view.is_contiguous()
    assert torch.equal(dequantize(view, ONE), view.float())
    assert torch.equal(dequantize(view[0, 0], torch.tensor(2.0)), view[0, 0].float() * 2)
    assert dequantize(view[:0], ONE).shape == (0, 4)
