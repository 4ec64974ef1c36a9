"""Caches of other types than static FP8, as engines compute them."""

import torch

from calib.caches.per_head import int8_codes, int8_per_token_head


def test_one_scale_per_token_and_head():
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0))
    x[2] *= 1000
    codes, scale = int8_codes(x)
    assert codes.shape == x.shape
    assert torch.equal(scale.squeeze(-1), x.abs().amax(-1) / 127)
    assert torch.equal(codes.abs().amax(-1), torch.full((5, 3), 127.0))
    error = (int8_per_token_head(x) - x).abs() / scale
    assert error.max() <= 0.5 + 1e-4  # half a step, and the scale's own rounding


def test_halves_are_rounded_away_from_zero():
    # the scale is 1, so these are halves of steps
    x = torch.tensor([127.0, 0.5, -0.5, 1.5, -1.5, 2.5, 0.0])
    codes, scale = int8_codes(x)
    assert scale.item() == 1
    assert codes.tolist() == [127, 1, -1, 2, -2, 3, 0]


def test_zeros_and_tiny_values():
    assert int8_per_token_head(torch.zeros(2, 8)).eq(0).all()
    codes, scale = int8_codes(torch.full((8,), 1e-9))
    assert scale.item() == torch.tensor(1e-6).item()
    assert codes.eq(0).all()


def test_the_dtype_stays():
    x = torch.randn(4, 8).bfloat16()
    assert int8_per_token_head(x).dtype == torch.bfloat16
