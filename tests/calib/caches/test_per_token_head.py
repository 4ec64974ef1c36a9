"""Cache types with a scale for each token and head, recomputed in numpy's float32 steps."""

from functools import partial, reduce

import numpy as np
import pytest
import torch
from number_grids import E4M3, nearest

from calib.caches.per_token_head import (
    INT4_STEPS,
    INT8_STEPS,
    fp8_per_token_head,
    fp8_scaled,
    int4_codes,
    int4_per_token_head,
    int8_codes,
    int8_per_token_head,
    lmdeploy,
    rotate,
    rotate_back,
    signs,
    zero_point_codes,
)
from calib.errors import InputError

ONE, HALF = np.float32(1), np.float32(0.5)
LEAST = np.float32(1e-6)  # vLLM's least scale
lmdeploy_int8, lmdeploy_int4 = (partial(lmdeploy, steps=steps) for steps in (INT8_STEPS, INT4_STEPS))
SYMMETRIC = (int8_per_token_head, fp8_per_token_head)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def vectors():
    x = random(6, 3, 24)
    x[2] *= 1000
    x[3] *= 1e-3
    x[4] *= 1e-9  # under the least scale
    return x


def test_int8_recomputed_one_by_one():
    x = vectors()
    codes, scales = int8_codes(x)
    step = np.maximum(np.abs(x.numpy()).max(-1, keepdims=True) / np.float32(127), LEAST)
    scaled = x.numpy() * (ONE / step)
    assert np.array_equal(scales.numpy(), step)
    assert np.array_equal(codes.numpy(), np.trunc(scaled + np.copysign(HALF, scaled)))
    assert torch.equal(int8_per_token_head(x), codes * scales)


def test_fp8_recomputed_one_by_one():
    x = vectors()
    scaled, scales = fp8_scaled(x)
    step = np.maximum(np.abs(x.numpy()).max(-1, keepdims=True) / np.float32(448), LEAST)
    assert np.array_equal(scales.numpy(), step)
    assert np.array_equal(scaled.numpy(), np.clip(x.numpy() * (ONE / step), -448, 448))
    codes = nearest(scaled.numpy(), E4M3).astype("f4")
    assert np.array_equal(fp8_per_token_head(x).numpy(), codes * step)


def test_halves_are_rounded_as_each_engine_does():
    # the scale is 1, so these are halves of steps; between 8 and 16 a step of E4M3 is 1
    codes, scale = int8_codes(torch.tensor([127.0, 0.5, -0.5, 1.5, -1.5, 2.5, 0.0]))
    assert (scale.item(), codes.tolist()) == (1, [127, 1, -1, 2, -2, 3, 0])
    assert fp8_per_token_head(torch.tensor([448.0, 8.5, 9.5, -8.5, -9.5])).tolist() == [448, 8, 10, -8, -10]
    # a step of 1 and a zero point of 7: the codes are the values and 7
    codes, scale, zero = int4_codes(torch.tensor([-7.0, 8.0, 0.5, 1.5, -0.5, -1.5]))
    assert (scale.item(), zero.item(), codes.tolist()) == (1, 7, [0, 15, 8, 9, 7, 6])
    codes, scale, zero = zero_point_codes(torch.tensor([0.0, 15.0, 0.5, 1.5, 14.5]), 15)
    assert (scale.item(), zero.item(), codes.tolist()) == (1, 0, [0, 15, 1, 2, 15])


@pytest.mark.parametrize("rounded", SYMMETRIC)
def test_zeros_and_tiny_and_huge_values(rounded):
    assert rounded(torch.zeros(2, 8)).eq(0).all()
    assert rounded(torch.full((8,), 1e-10)).eq(0).all()
    huge = torch.tensor([3e38, -3e38, 1.0])
    assert torch.allclose(rounded(huge), torch.tensor([3e38, -3e38, 0.0]), rtol=1e-6)


@pytest.mark.parametrize("rounded", [*SYMMETRIC, int4_per_token_head, lmdeploy_int8, lmdeploy_int4])
def test_the_dtype_stays(rounded):
    for dtype in (torch.bfloat16, torch.float16):
        assert rounded(torch.randn(4, 8).to(dtype)).dtype == dtype


def hadamard(size):
    return reduce(np.kron, [np.array([[1, 1], [1, -1]])] * (size.bit_length() - 1))


@pytest.mark.parametrize(("dim", "block"), [(64, 64), (80, 16), (6, 2)])
def test_the_rotation_is_blocks_of_a_hadamard_matrix_and_signs(dim, block):
    x = random(3, dim).double()
    expected = x.reshape(3, -1, block).numpy() * signs(block).numpy() @ hadamard(block)
    assert np.allclose(rotate(x), expected.reshape(3, dim), atol=1e-10)
    assert torch.allclose(rotate_back(rotate(x)), x, atol=1e-10)
    before = x.clone()
    rotate_back(x)
    assert torch.equal(x, before)
    assert torch.allclose(rotate(x) @ rotate(x).T / block, x @ x.T, atol=1e-10)  # scores, of rotated queries


def test_the_signs_are_fixed():
    generator = torch.Generator().manual_seed(2654435769)  # 2^32 over the golden ratio
    expected = 2 * torch.bernoulli(torch.full((64,), 0.5), generator=generator) - 1
    assert torch.equal(signs(64), expected)
    assert set(expected.tolist()) == {-1, 1}


def test_int4_recomputed_one_by_one():
    x = random(40, 32) * 30
    x[1] = 1e-9
    codes, scale, zero = (part.numpy() for part in int4_codes(x))
    low, high = x.numpy().min(-1, keepdims=True), x.numpy().max(-1, keepdims=True)
    step = np.maximum((high - low) / np.float32(15), LEAST)
    assert np.array_equal(zero, np.clip(np.trunc(-low / step + HALF), 0, 15))
    assert np.array_equal(codes, np.clip(np.trunc(x.numpy() * (ONE / step) + zero + HALF), 0, 15))
    # the scale's last four bits hold the zero point
    assert np.array_equal(scale.view("i4"), step.view("i4") // 16 * 16)


def test_int4_of_zeros_and_tiny_and_huge_values_and_of_one_sign():
    assert int4_per_token_head(torch.zeros(2, 8)).eq(0).all()
    assert int4_per_token_head(torch.full((2, 8), 1e-9)).abs().max() <= 1e-6
    huge = random(4, 64) * 1e15
    # half of a fifteenth of the range, which is at most ten times the values' size
    assert ((int4_per_token_head(huge) - huge).norm() / huge.norm()).item() < 1 / 3
    # the zero point stays within the codes, as in vLLM
    codes, _, zero = int4_codes(torch.tensor([15.0, 30.0]))
    assert (zero.item(), codes.tolist()) == (0, [15, 15])


def test_odd_head_sizes_are_refused_in_4_bits_alone():
    assert lmdeploy_int8(torch.randn(2, 7)).shape == (2, 7)
    for name, rounded in (("int4_per_token_head", int4_per_token_head), ("lmdeploy_int4", lmdeploy_int4)):
        with pytest.raises(InputError, match=f"{name}: head size 7 is not a multiple of 2"):
            rounded(torch.randn(2, 7))


@pytest.mark.parametrize(("rounded", "steps"), [(lmdeploy_int8, 255), (lmdeploy_int4, 15)])
def test_zero_points_recomputed_one_by_one(rounded, steps):
    x = random(40, 24) * 30
    x[1] += 100
    codes, scale, zero = (part.numpy() for part in zero_point_codes(x, steps))
    low, high = x.numpy().min(-1, keepdims=True), x.numpy().max(-1, keepdims=True)
    step = (high - low) / np.float32(steps)
    assert np.array_equal(scale, step)
    assert np.array_equal(zero, -low / step)
    assert np.array_equal(codes, np.trunc(x.numpy() / step + zero + HALF))
    assert (codes.min(), codes.max()) == (0, steps)
    error = (rounded(x) - x).abs()[2:].numpy() / step[2:]
    # float16's own rounding of the scale, the zero point and the value: 2^-11 of up to 255 steps
    assert error.max() < 0.5 + 3 * steps * 2**-11
    # as in the engine
    assert rounded(torch.full((2, 8), 3.0)).isnan().all()


def test_scale_and_zero_point_are_kept_in_16_bits():
    # 8 bits of mantissa hold 100.5 no better than 100.5 +- 0.25: the step is 1
    x = torch.tensor([-100.3, 154.7, 0.0])
    assert lmdeploy_int8(x, dtype=torch.float16)[2].item() == pytest.approx(-0.3125, abs=1e-6)
    assert lmdeploy_int8(x, dtype=torch.bfloat16)[2].item() == -0.5
    assert torch.equal(lmdeploy_int8(x), lmdeploy_int8(x, dtype=torch.float16))
    of_bfloat16 = lmdeploy_int8(x.bfloat16())
    assert torch.equal(of_bfloat16.float(), lmdeploy_int8(x.bfloat16().float(), dtype=torch.bfloat16))
