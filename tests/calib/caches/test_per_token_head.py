"""Cache types with a scale for each token and head, recomputed in numpy's float32 steps."""

from functools import partial, reduce

import numpy as np
import pytest
import torch
from number_grids import E4M3, nearest

from calib.caches import per_token_head as kinds
from calib.errors import InputError

ONE, HALF = np.float32(1), np.float32(0.5)
LEAST = np.float32(1e-6)  # vLLM's least scale
lmdeploy_int8, lmdeploy_int4 = (partial(kinds.lmdeploy, steps=steps) for steps in (255, 15))


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_int8_and_fp8_recomputed_one_by_one_and_halves_as_each_engine_rounds_them():
    x = random(6, 3, 24) * torch.tensor([1, 1e37, 1000, 1e-3, 1e-9, 0])[:, None, None]
    amax = np.abs(x.numpy()).max(-1, keepdims=True)
    codes, scales = kinds.int8_codes(x)
    assert np.array_equal(scales.numpy(), np.maximum(amax / np.float32(127), LEAST))
    scaled = x.numpy() * (ONE / scales.numpy())
    assert np.array_equal(codes.numpy(), np.trunc(scaled + np.copysign(HALF, scaled)))
    assert torch.equal(kinds.int8_per_token_head(x), codes * scales)
    scaled, scales = (part.numpy() for part in kinds.fp8_scaled(x))
    assert np.array_equal(scales, np.maximum(amax / np.float32(448), LEAST))
    assert np.array_equal(scaled, np.clip(x.numpy() * (ONE / scales), -448, 448))
    assert np.array_equal(kinds.fp8_per_token_head(x).numpy(), nearest(scaled, E4M3).astype("f4") * scales)
    # the scale is 1, so these are halves of steps; between 8 and 16 a step of E4M3 is 1
    codes, scale = kinds.int8_codes(torch.tensor([127.0, 0.5, -0.5, 1.5, -1.5, 2.5, 0.0]))
    assert (scale.item(), codes.tolist()) == (1, [127, 1, -1, 2, -2, 3, 0])
    x = torch.tensor([448.0, 8.5, 9.5, -8.5, -9.5])
    assert kinds.fp8_per_token_head(x).tolist() == [448, 8, 10, -8, -10]
    # a step of 1 and a zero point of 7: the codes are the values and 7
    codes, scale, zero = kinds.int4_codes(torch.tensor([-7.0, 8.0, 0.5, 1.5, -0.5, -1.5]))
    assert (scale.item(), zero.item(), codes.tolist()) == (1, 7, [0, 15, 8, 9, 7, 6])
    codes, scale, zero = kinds.zero_point_codes(torch.tensor([0.0, 15.0, 0.5, 1.5, 14.5]), 15)
    assert (scale.item(), zero.item(), codes.tolist()) == (1, 0, [0, 15, 1, 2, 15])


@pytest.mark.parametrize(("dim", "block"), [(64, 64), (80, 16), (6, 2)])
def test_the_rotation_is_blocks_of_a_hadamard_matrix_and_fixed_signs(dim, block):
    generator = torch.Generator().manual_seed(2654435769)  # 2^32 over the golden ratio
    signs = 2 * torch.bernoulli(torch.full((block,), 0.5), generator=generator) - 1
    assert torch.equal(kinds.signs(block), signs)
    x = random(3, dim).double()
    hadamard = reduce(np.kron, [np.array([[1, 1], [1, -1]])] * (block.bit_length() - 1))
    expected = x.reshape(3, -1, block).numpy() * signs.numpy() @ hadamard
    before = x.clone()
    assert np.allclose(kinds.rotate(x), expected.reshape(3, dim), atol=1e-10)
    assert torch.allclose(kinds.rotate_back(kinds.rotate(x)), x, atol=1e-10)
    kinds.rotate_back(x)
    assert torch.equal(x, before)


def test_int4_recomputed_one_by_one_and_odd_head_sizes_refused_there_alone():
    x = random(40, 32) * 30
    x[1], x[2], x[3] = 1e-9, 0, x[3] * 1e15
    x[4] += 100  # of one sign: the zero point stays within the codes
    codes, scale, zero = (part.numpy() for part in kinds.int4_codes(x))
    low, high = x.numpy().min(-1, keepdims=True), x.numpy().max(-1, keepdims=True)
    step = np.maximum((high - low) / np.float32(15), LEAST)
    assert np.array_equal(zero, np.clip(np.trunc(-low / step + HALF), 0, 15))
    assert np.array_equal(codes, np.clip(np.trunc(x.numpy() * (ONE / step) + zero + HALF), 0, 15))
    # the scale's last four bits hold the zero point
    assert np.array_equal(scale.view("i4"), step.view("i4") // 16 * 16)
    codes, scale, zero = kinds.int4_codes(kinds.rotate(x))
    assert torch.equal(kinds.int4_per_token_head(x), kinds.rotate_back((codes - zero) * scale))
    assert lmdeploy_int8(torch.randn(2, 7)).shape == (2, 7)
    odd = {"int4_per_token_head": kinds.int4_per_token_head, "lmdeploy_int4": lmdeploy_int4}
    for name, rounded in odd.items():
        with pytest.raises(InputError, match=f"^{name}: head size 7 is not a multiple of 2$"):
            rounded(torch.randn(2, 7))


@pytest.mark.parametrize(("rounded", "steps"), [(lmdeploy_int8, 255), (lmdeploy_int4, 15)])
def test_zero_points_recomputed_one_by_one(rounded, steps):
    x = random(40, 24) * 30
    x[1] += 100
    codes, scale, zero = (part.numpy() for part in kinds.zero_point_codes(x, steps))
    low, high = x.numpy().min(-1, keepdims=True), x.numpy().max(-1, keepdims=True)
    step = (high - low) / np.float32(steps)
    assert np.array_equal(scale, step)
    assert np.array_equal(zero, -low / step)
    assert np.array_equal(codes, np.trunc(x.numpy() / step + zero + HALF))
    assert (codes.min(), codes.max()) == (0, steps)
    # float16's own rounding of the scale, the zero point and the value: 2^-11 of up to 255 steps
    assert ((rounded(x) - x).abs()[2:].numpy() / step[2:]).max() < 0.5 + 3 * steps * 2**-11
    assert rounded(torch.full((2, 8), 3.0)).isnan().all()  # as in the engine


def test_scale_and_zero_point_are_kept_in_16_bits():
    # 8 bits of mantissa hold 100.5 no better than 100.5 +- 0.25: the step is 1
    x = torch.tensor([-100.3, 154.7, 0.0])
    assert lmdeploy_int8(x, dtype=torch.float16)[2].item() == pytest.approx(-0.3125, abs=1e-6)
    assert lmdeploy_int8(x, dtype=torch.bfloat16)[2].item() == -0.5
    assert torch.equal(lmdeploy_int8(x), lmdeploy_int8(x, dtype=torch.float16))
    of_bfloat16 = lmdeploy_int8(x.bfloat16())
    assert torch.equal(of_bfloat16.float(), lmdeploy_int8(x.bfloat16().float(), dtype=torch.bfloat16))
