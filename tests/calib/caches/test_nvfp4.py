"""NVFP4, recomputed from the values of its formats."""

import numpy as np
import pytest
import torch

from calib.caches.blocks import e2m1, nvfp4, nvfp4_four_over_six
from calib.errors import InputError

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
E4M3 = [m / 8 * 2.0**-6 for m in range(8)]
E4M3 += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]


def nearest(value, codes):
    """The nearest of `codes`; of two, that with the even number."""
    gaps = [abs(abs(value) - code) for code in codes]
    best = min(range(len(codes)), key=lambda code: (gaps[code], code % 2))
    return float(np.copysign(codes[best], value))


def block(values, largest):
    """A block of 16 as NVFP4 holds it, in float32 steps."""
    f = np.float32
    values = values.astype(f)
    scale = f(nearest(f(np.abs(values).max()) / f(largest), E4M3))
    if scale == 0:
        return np.zeros(16, f)
    inverse = f(1) / scale
    return np.array([f(nearest(v * inverse, E2M1)) * scale for v in values], f)


def vectors():
    x = torch.randn(6, 2, 48, generator=torch.Generator().manual_seed(0))
    x[1] *= 500
    x[2] *= 1e-2
    x[3] *= 1e-4
    x[4] *= 1e4  # beyond 6 times 448
    return x


def test_recomputed_block_by_block():
    x = vectors()
    blocks = x.reshape(-1, 16).numpy()
    expected = np.stack([block(b, 6) for b in blocks]).reshape(x.shape)
    assert np.array_equal(nvfp4(x).numpy(), expected)


def test_four_over_six_recomputed_block_by_block():
    x = vectors()
    chosen, fours = [], 0
    for values in x.reshape(-1, 16).numpy():
        six, four = block(values, 6), block(values, 4)
        takes_four = ((four - values) ** 2).sum() < ((six - values) ** 2).sum()
        chosen.append(four if takes_four else six)
        fours += takes_four
    assert np.array_equal(nvfp4_four_over_six(x).numpy(), np.stack(chosen).reshape(x.shape))
    assert 0 < fours < len(chosen)  # both are chosen


def test_e2m1_has_eight_values_and_ties_go_to_even_codes():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert e2m1(-ties).tolist() == [0, -1, -1, -2, -2, -4, -4]
    assert e2m1(torch.tensor([6.9, 7.1, 100.0, -9.0])).tolist() == [6, 6, 6, -6]
    grid = torch.linspace(-8, 8, 4001)
    assert e2m1(grid).tolist() == [nearest(v, E2M1) for v in grid.tolist()]


def test_zeros_and_values_too_small_for_a_scale():
    assert nvfp4(torch.zeros(2, 16)).eq(0).all()
    # 6 times the half of E4M3's least value
    assert nvfp4(torch.full((16,), 6 * 2.0**-10)).eq(0).all()
    assert nvfp4(torch.full((16,), 6 * 2.0**-9)).eq(6 * 2.0**-9).all()


def test_huge_values_saturate():
    assert nvfp4(torch.full((16,), 1e30)).eq(6 * 448).all()


@pytest.mark.parametrize("rounded", [nvfp4, nvfp4_four_over_six])
def test_head_sizes_of_broken_blocks_are_refused(rounded):
    with pytest.raises(InputError, match="NVFP4: head size 72 is not a multiple of 16"):
        rounded(torch.zeros(2, 72))


@pytest.mark.parametrize("rounded", [nvfp4, nvfp4_four_over_six])
def test_the_dtype_stays(rounded):
    assert rounded(torch.randn(4, 32).bfloat16()).dtype == torch.bfloat16
