"""One scale for each token and head."""

import numpy as np
import pytest
import torch

from calib.caches.per_token_head import (
    fp8_per_token_head,
    fp8_scaled,
    int8_codes,
    int8_per_token_head,
)

E4M3 = sorted(
    (1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6
    for e in range(16)
    for m in range(8)
    if (e, m) != (15, 7)
)


def nearest_e4m3(value):
    """The nearest of all E4M3 values; of two, that with the even code."""
    gaps = [abs(abs(value) - code) for code in E4M3]
    best = min(range(len(E4M3)), key=lambda code: (gaps[code], code % 2))
    return np.copysign(E4M3[best], value)


def vectors():
    x = torch.randn(5, 3, 24, generator=torch.Generator().manual_seed(0))
    x[2] *= 1000
    x[3] *= 1e-3
    return x


def rows(*tensors):
    return zip(*(x.numpy().reshape(-1, x.shape[-1]) for x in tensors), strict=True)


def test_int8_recomputed_one_by_one():
    x = vectors()
    codes, scales = int8_codes(x)
    for vector, code, scale in rows(x, codes, scales):
        step = np.float32(max(np.abs(vector).max() / np.float32(127), np.float32(1e-6)))
        assert scale[0] == step
        scaled = vector * (np.float32(1) / step)
        expected = [np.trunc(v + np.copysign(np.float32(0.5), v)) for v in scaled]
        assert code.tolist() == np.clip(expected, -128, 127).tolist()
    assert torch.equal(int8_per_token_head(x), codes * scales)


def test_fp8_recomputed_one_by_one():
    x = vectors()
    scaled, scales = fp8_scaled(x)
    for vector, mine, scale in rows(x, scaled, scales):
        assert scale[0] == np.abs(vector).max() / np.float32(448)
        expected = np.clip(vector * (np.float32(1) / scale[0]), -448, 448)
        assert mine.tolist() == expected.tolist()
    codes = torch.tensor([nearest_e4m3(v) for v in scaled.flatten().tolist()])
    expected = codes.float().reshape(x.shape) * scales
    assert torch.equal(fp8_per_token_head(x), expected)


def test_one_scale_per_token_and_head():
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0))
    x[2] *= 1000
    codes, scale = int8_codes(x)
    assert codes.shape == x.shape
    assert torch.equal(codes.abs().amax(-1), torch.full((5, 3), 127.0))
    error = (int8_per_token_head(x) - x).abs() / scale
    assert error.max() <= 0.5 + 1e-4  # half a step, and the scale's own rounding


def test_halves_are_rounded_away_from_zero():
    # the scale is 1, so these are halves of steps
    x = torch.tensor([127.0, 0.5, -0.5, 1.5, -1.5, 2.5, 0.0])
    codes, scale = int8_codes(x)
    assert scale.item() == 1
    assert codes.tolist() == [127, 1, -1, 2, -2, 3, 0]


def test_halves_of_fp8_are_rounded_to_even():
    # the scale is 1; between 8 and 16 a step is 1
    x = torch.tensor([448.0, 8.5, 9.5, -8.5, -9.5])
    assert fp8_per_token_head(x).tolist() == [448, 8, 10, -8, -10]


@pytest.mark.parametrize("rounded", [int8_per_token_head, fp8_per_token_head])
def test_zeros_and_tiny_and_huge_values(rounded):
    assert rounded(torch.zeros(2, 8)).eq(0).all()
    # under the least scale
    assert rounded(torch.full((8,), 1e-10)).eq(0).all()
    huge = torch.tensor([3e38, -3e38, 1.0])
    assert torch.allclose(rounded(huge), torch.tensor([3e38, -3e38, 0.0]), rtol=1e-6)


def test_the_least_scale():
    codes, scale = int8_codes(torch.full((8,), 1e-9))
    assert scale.item() == torch.tensor(1e-6).item()
    assert codes.eq(0).all()


@pytest.mark.parametrize("rounded", [int8_per_token_head, fp8_per_token_head])
def test_the_dtype_stays(rounded):
    x = torch.randn(4, 8).bfloat16()
    assert rounded(x).dtype == torch.bfloat16
