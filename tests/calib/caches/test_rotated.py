"""INT4 after a randomised Hadamard rotation."""

import struct
from functools import reduce

import numpy as np
import pytest
import torch

from calib.caches.per_token_head import int4_codes, int4_per_token_head, rotate, rotate_back, signs
from calib.errors import InputError


def hadamard(size):
    return reduce(np.kron, [np.array([[1, 1], [1, -1]])] * (size.bit_length() - 1))


@pytest.mark.parametrize(("dim", "block"), [(64, 64), (80, 16), (96, 32), (6, 2), (128, 128)])
def test_the_rotation_is_blocks_of_a_hadamard_matrix_and_signs(dim, block):
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(dim)).double()
    expected = x.reshape(3, -1, block).numpy() * signs(block).numpy() @ hadamard(block)
    assert np.allclose(rotate(x), expected.reshape(3, dim), atol=1e-10)
    assert torch.allclose(rotate_back(rotate(x)), x, atol=1e-10)


def test_the_signs_are_fixed():
    generator = torch.Generator().manual_seed(2654435769)  # 2^32 over the golden ratio
    expected = 2 * torch.bernoulli(torch.full((64,), 0.5), generator=generator) - 1
    assert torch.equal(signs(64), expected)
    assert set(expected.tolist()) == {-1, 1}


def test_scores_do_not_change_where_the_query_is_rotated_too():
    key, query = torch.randn(2, 7, 96, generator=torch.Generator().manual_seed(0)).double()
    turned = rotate(query) @ rotate(key).T / 32
    assert torch.allclose(turned, query @ key.T, atol=1e-10)


def test_codes_recomputed_one_by_one():
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(1)) * 30
    one, half = np.float32(1), np.float32(0.5)
    parts = (part.numpy() for part in int4_codes(x))
    for vector, codes, scale, zero in zip(x.numpy(), *parts, strict=True):
        step = np.float32((vector.max() - vector.min()) / np.float32(15))
        assert zero[0] == np.trunc(-vector.min() / step + half)
        shifted = vector * (one / step) + zero[0]
        assert codes.tolist() == [min(max(int(v + half), 0), 15) for v in shifted]
        bits = struct.unpack("<i", struct.pack("<f", step))[0]
        assert scale[0] == struct.unpack("<f", struct.pack("<i", bits - bits % 16))[0]


def test_ties_are_rounded_up():
    # a step of 1 and a zero point of 7: the codes are the values and 7
    x = torch.tensor([-7.0, 8.0, 0.5, 1.5, -0.5, -1.5])
    codes, scale, zero = int4_codes(x)
    assert (scale.item(), zero.item()) == (1, 7)
    assert codes.tolist() == [0, 15, 8, 9, 7, 6]


def test_zeros_and_tiny_and_huge_values():
    assert int4_per_token_head(torch.zeros(2, 8)).eq(0).all()
    assert int4_per_token_head(torch.full((2, 8), 1e-9)).abs().max() <= 1e-6
    huge = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 1e15
    # half of a fifteenth of the range, which is at most ten times the values' size
    assert ((int4_per_token_head(huge) - huge).norm() / huge.norm()).item() < 1 / 3


def test_values_of_one_sign_are_out_of_range():
    # the zero point stays within the codes, as in vLLM
    codes, _, zero = int4_codes(torch.tensor([15.0, 30.0]))
    assert zero.item() == 0
    assert codes.tolist() == [15, 15]


def test_odd_head_sizes_are_refused():
    with pytest.raises(InputError, match="int4_per_token_head: head size 7 is not a multiple of 2"):
        int4_per_token_head(torch.zeros(2, 7))


def test_the_dtype_stays():
    assert int4_per_token_head(torch.randn(4, 8).half()).dtype == torch.float16


def test_rotating_leaves_the_argument_as_it_was():
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))  # one block
    before = x.clone()
    rotate_back(x)
    assert torch.equal(x, before)
