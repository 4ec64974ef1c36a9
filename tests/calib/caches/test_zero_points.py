"""LMDeploy's INT8 and INT4."""

from functools import partial

import numpy as np
import pytest
import torch

from calib.caches.per_token_head import INT4_STEPS, INT8_STEPS, lmdeploy, zero_point_codes
from calib.errors import InputError

lmdeploy_int8, lmdeploy_int4 = (partial(lmdeploy, steps=steps) for steps in (INT8_STEPS, INT4_STEPS))


@pytest.mark.parametrize("steps", [255, 15])
def test_codes_recomputed_one_by_one(steps):
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(steps)) * 30
    x[1] += 100
    parts = (part.numpy() for part in zero_point_codes(x, steps))
    for vector, codes, scale, zero in zip(x.numpy(), *parts, strict=True):
        step = (vector.max() - vector.min()) / np.float32(steps)
        assert scale[0] == step
        assert zero[0] == -vector.min() / step
        expected = [int(value / step + zero[0] + np.float32(0.5)) for value in vector]
        assert codes.tolist() == expected
        assert (min(expected), max(expected)) == (0, steps)


def test_ties_are_rounded_up():
    codes, scale, zero = zero_point_codes(torch.tensor([0.0, 15.0, 0.5, 1.5, 14.5]), 15)
    assert (scale.item(), zero.item()) == (1, 0)
    assert codes.tolist() == [0, 15, 1, 2, 15]


def test_scale_and_zero_point_are_kept_in_16_bits():
    # 8 bits of mantissa hold 100.5 no better than 100.5 +- 0.25: the step is 1
    x = torch.tensor([-100.3, 154.7, 0.0])
    assert lmdeploy_int8(x, dtype=torch.float16)[2].item() == pytest.approx(-0.3125, abs=1e-6)
    assert lmdeploy_int8(x, dtype=torch.bfloat16)[2].item() == -0.5
    assert torch.equal(lmdeploy_int8(x), lmdeploy_int8(x, dtype=torch.float16))
    of_bfloat16 = lmdeploy_int8(x.bfloat16())
    assert torch.equal(of_bfloat16.float(), lmdeploy_int8(x.bfloat16().float(), dtype=torch.bfloat16))


@pytest.mark.parametrize(("rounded", "steps"), [(lmdeploy_int8, 255), (lmdeploy_int4, 15)])
def test_at_most_half_a_step_away(rounded, steps):
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * 1e-2
    step = (x.amax(-1) - x.amin(-1)) / steps
    error = (rounded(x) - x).abs().amax(-1) / step
    # float16's own rounding of the scale, the zero point and the value: 2^-11 of up to 255 steps
    assert error.max() < 0.5 + 3 * steps * 2**-11


def test_equal_values_become_nan_as_in_the_engine():
    assert lmdeploy_int8(torch.full((2, 8), 3.0)).isnan().all()
    assert lmdeploy_int4(torch.zeros(2, 8)).isnan().all()


def test_odd_head_sizes_are_refused_in_4_bits_alone():
    assert lmdeploy_int8(torch.randn(2, 7)).shape == (2, 7)
    with pytest.raises(InputError, match="lmdeploy_int4: head size 7 is not a multiple of 2"):
        lmdeploy_int4(torch.randn(2, 7))


@pytest.mark.parametrize("rounded", [lmdeploy_int8, lmdeploy_int4])
def test_the_dtype_stays(rounded):
    assert rounded(torch.randn(4, 8).bfloat16()).dtype == torch.bfloat16
    assert rounded(torch.randn(4, 8), dtype=torch.bfloat16).dtype == torch.float32
