"""NVFP4, and latents as DeepSeek's cache types hold them, beside their layouts written out in numpy."""

import numpy as np
import pytest
import torch
from number_grids import E2M1, E4M3, nearest

from calib.caches.blocks import e2m1, nvfp4, nvfp4_four_over_six
from calib.caches.rounding import rounding
from calib.caches.types import Layers, Shape
from calib.errors import InputError

ONE = Layers({0: Shape(1, 512, 64, "latents")}, 1)


def blocks_of_16(x, largest=6):
    """NVFP4 in float32 steps: E2M1 over an E4M3 scale for each 16 values."""
    blocks = x.reshape(-1, 16)
    scale = nearest(np.abs(blocks).max(-1, keepdims=True) / np.float32(largest), E4M3).astype("f4")
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    return (nearest(blocks * inverse, E2M1).astype("f4") * scale).reshape(x.shape)


def test_nvfp4_recomputed_block_by_block_and_ties_go_to_even_codes():
    x = torch.randn(6, 2, 48, generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([1, 500, 1e-2, 1e-4, 1e4, 0])[:, None, None]  # 1e4: beyond 6 times 448
    assert np.array_equal(nvfp4(x).numpy(), blocks_of_16(x.numpy()))
    six, four = (blocks_of_16(x.numpy(), largest).reshape(-1, 16) for largest in (6, 4))
    errors = [((found - x.reshape(-1, 16).numpy()) ** 2).sum(-1) for found in (six, four)]
    takes_four = errors[1] < errors[0]
    assert 0 < takes_four.sum() < len(takes_four)  # both are chosen
    expected = np.where(takes_four[:, None], four, six).reshape(x.shape)
    assert np.array_equal(nvfp4_four_over_six(x).numpy(), expected)
    with pytest.raises(InputError, match="^NVFP4: head size 72 is not a multiple of 16$"):
        nvfp4(torch.zeros(2, 72))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4]
    x = torch.cat([-ties, torch.linspace(-9, 9, 4001), torch.tensor([100.0])])
    assert e2m1(x).tolist() == nearest(x.numpy(), E2M1).tolist()


def latent_and_k_pe(latent, k_pe, size=1.0):
    x = torch.randn(2, 1, 5, latent + k_pe, generator=torch.Generator().manual_seed(latent)) * size
    x[0, 0, 0] = 0
    x[0, 0, 1, ::3] *= 40
    return x.split((latent, k_pe), -1)


def tiles_of_128(latent):
    """The latent in E4M3, each tile over the least power of two that leaves none above 448."""
    out = np.empty_like(latent)
    for start in range(0, latent.shape[-1], 128):
        tile = latent[..., start : start + 128]
        amax = np.abs(tile).max(-1, keepdims=True)
        scale = 2.0 ** np.ceil(np.log2(np.maximum(amax / 448, 1e-4)))
        out[..., start : start + 128] = nearest(tile / scale, E4M3) * scale
    return out


@pytest.mark.parametrize("size", [1.0, 1e-3, 3e3])
@pytest.mark.parametrize("shape", [(512, 64), (576, 192), (16, 8)])  # 576 has a shorter last tile
def test_latents_are_tiles_of_128_beside_bfloat16_or_blocks_of_16_beside_e4m3(shape, size):
    latent, k_pe = latent_and_k_pe(*shape, size)
    exact = latent.double().numpy()
    rounded = rounding("fp8_ds_mla", ONE)(0, latent, k_pe)
    assert np.array_equal(rounded[0].double().numpy(), tiles_of_128(exact))
    assert torch.equal(rounded[1], k_pe.bfloat16().float())
    rounded = rounding("nvfp4_ds_mla", ONE)(0, latent, k_pe)
    blocks = exact.reshape(-1, 16)
    scale = nearest(np.maximum(np.abs(blocks).max(-1, keepdims=True) / 6, 2.0**-9), E4M3)
    expected = (nearest(blocks / scale, E2M1) * scale).reshape(latent.shape)
    # a product with 1 / scale in float32 and one with scale: two roundings
    np.testing.assert_allclose(rounded[0].double().numpy(), expected, rtol=2**-22)
    assert np.array_equal(rounded[1].double().numpy(), nearest(k_pe.double().numpy(), E4M3))
