"""Latents as DeepSeek's cache types hold them, beside their layouts written out in numpy."""

import numpy as np
import pytest
import torch

from calib.caches.rounding import rounding
from calib.caches.types import LATENT_CACHES, Shape, cache_type
from calib.errors import InputError

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# all E4M3 numbers: eight steps to an octave, subnormals below 2^-6, nothing above 448
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)]
)


def nearest(x, numbers):
    """The nearest of `numbers`, of two as near the one with the even index."""
    away = np.abs(np.abs(x)[..., None] - numbers)
    away = away + (np.arange(len(numbers)) % 2) * 1e-12 * numbers[1]
    return np.copysign(numbers[away.argmin(-1)], x)


def tiled(latent, size=128):
    """The latent in E4M3, each tile over the least power of two that leaves none above 448."""
    out = np.empty_like(latent)
    for start in range(0, latent.shape[-1], size):
        tile = latent[..., start : start + size]
        amax = np.abs(tile).max(-1, keepdims=True)
        scale = 2.0 ** np.ceil(np.log2(np.maximum(amax / 448, 1e-4)))
        out[..., start : start + size] = nearest(tile / scale, E4M3) * scale
    return out


def blocked(latent):
    """The latent in E2M1, blocks of 16 over an E4M3 scale of at least 2^-9."""
    blocks = latent.reshape(*latent.shape[:-1], -1, 16)
    amax = np.abs(blocks).max(-1, keepdims=True)
    scale = nearest(np.maximum(amax / 6, 2.0**-9), E4M3)
    return (nearest(blocks / scale, E2M1) * scale).reshape(latent.shape)


def values(latent, k_pe, size=1.0):
    generator = torch.Generator().manual_seed(latent)
    x = torch.randn(2, 1, 5, latent + k_pe, generator=generator) * size
    x[0, 0, 0] = 0
    x[0, 0, 1, ::3] *= 40
    return x.split((latent, k_pe), -1)


@pytest.mark.parametrize("size", [1.0, 1e-3, 3e3])
@pytest.mark.parametrize(("latent", "k_pe"), [(512, 64), (256, 32), (576, 192), (16, 8)])
def test_fp8_ds_mla_is_tiles_of_128_beside_bfloat16(latent, k_pe, size):
    key, value = values(latent, k_pe, size)
    rounded = rounding("fp8_ds_mla")(0, key, value)
    assert np.array_equal(rounded[0].double().numpy(), tiled(key.double().numpy()))
    assert torch.equal(rounded[1], value.bfloat16().float())
    assert not torch.equal(rounded[0], key)


@pytest.mark.parametrize("size", [1.0, 1e-3, 300])
@pytest.mark.parametrize(("latent", "k_pe"), [(512, 64), (576, 192), (16, 8)])
def test_nvfp4_ds_mla_is_blocks_of_16_beside_e4m3(latent, k_pe, size):
    key, value = values(latent, k_pe, size)
    rounded = rounding("nvfp4_ds_mla")(0, key, value)
    # a product with 1 / scale in float32 and one with scale: two roundings
    ours, theirs = rounded[0].double().numpy(), blocked(key.double().numpy())
    np.testing.assert_allclose(ours, theirs, rtol=2**-22)
    whole = np.minimum(np.abs(value.double().numpy()), 448)
    assert np.array_equal(rounded[1].double().numpy(), np.copysign(nearest(whole, E4M3), value.numpy()))


@pytest.mark.parametrize("name", LATENT_CACHES)
def test_dtypes_stay_and_tokens_do_not_touch_each_other(name):
    key, value = values(256, 32)
    for dtype in (torch.float32, torch.bfloat16):
        pair = key.to(dtype), value.to(dtype)
        together = rounding(name)(0, *pair)
        alone = rounding(name)(0, *(x[1:, :, 2:3] for x in pair))
        for x, whole, part in zip(pair, together, alone, strict=True):
            assert (whole.dtype, whole.shape) == (dtype, x.shape)
            assert torch.equal(whole[1:, :, 2:3], part)


def test_a_value_that_is_no_number_stays_none():
    key, value = (x.clone() for x in values(256, 32))
    key[0, 0, 2, 3] = value[0, 0, 2, 3] = float("nan")
    for name in LATENT_CACHES:
        for rounded in rounding(name)(0, key, value):
            assert rounded[0, 0, 2, 3].isnan()
            assert rounded[1].isfinite().all()


# of DeepSeek-V3: latents of 512, k_pe of 64
@pytest.mark.parametrize(
    ("name", "size"), [("fp8", 576), ("fp8_ds_mla", 512 + 4 * 4 + 2 * 64), ("nvfp4_ds_mla", 352)]
)
def test_bytes_of_deepseek(name, size):
    for attention in ("latents", "sparse latents"):
        shape = Shape(1, 512, 64, attention)
        assert shape.values == 576
        assert cache_type(name).bytes_per_token([shape] * 61) == 61 * size


def test_a_shorter_last_tile_has_a_scale_of_its_own():
    assert cache_type("fp8_ds_mla").bytes_per_token([Shape(1, 576, 192, "latents")]) == (
        576 + 5 * 4 + 2 * 192
    )


def test_a_latent_that_blocks_do_not_divide():
    with pytest.raises(InputError, match=r"nvfp4_ds_mla: latent size 24 is not a multiple of 16"):
        cache_type("nvfp4_ds_mla").bytes_per_token([Shape(1, 24, 8, "latents")])
    with pytest.raises(InputError, match="NVFP4: latent size 24 is not a multiple of 16"):
        rounding("nvfp4_ds_mla")(0, *values(24, 8))


def test_types_are_for_latents_or_for_heads():
    heads, latents = Shape(2, 64, 64), Shape(1, 512, 64, "latents")
    for name in LATENT_CACHES:
        with pytest.raises(InputError, match=f"{name} holds latents .MLA., .* K and V of heads$"):
            cache_type(name).bytes_per_token([heads])
    for shapes in ([latents], [heads, latents]):
        with pytest.raises(InputError, match=r"nvfp4 holds K and V of heads, .* latents \(MLA\)$"):
            cache_type("nvfp4").bytes_per_token(shapes)
    assert cache_type("fp8").bytes_per_token([heads, latents]) == 256 + 576
