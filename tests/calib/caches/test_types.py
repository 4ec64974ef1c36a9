"""Cache types by name: their bytes, the layers they hold, and how they round K and V."""

from itertools import product

import pytest
import torch

from calib.caches.rounding import rounding
from calib.caches.types import CACHES, LATENT_CACHES, Layers, Shape, cache_type
from calib.errors import InputError

# bytes of one head of 64 values of K and V, NVFP4 as 32 bytes and 4 scales; and the most that rounding
# errs beside the size of normal values, none of 64 beyond five: half a step
TYPES = {
    "fp8": (64 + 64, 1 / 16),
    "fp8_e5m2": (64 + 64, 1 / 8),
    "fp8_per_token_head": (64 + 4 + 64 + 4, 1 / 16),
    "int8_per_token_head": (64 + 4 + 64 + 4, 2.5 / 127),
    "int4_per_token_head": (32 + 4 + 32 + 4, 5 / 15),
    "turboquant_k8v4": (64 + 32 + 4, 5 / 15),
    "turboquant_4bit_nc": (32 + 2 + 32 + 4, 5 / 15),
    "turboquant_k3v4_nc": (24 + 2 + 32 + 4, 5 / 15),
    "turboquant_3bit_nc": (24 + 2 + 24 + 4, 5 / 7),
    "ultraquant_4bit": (32 + 2 + 32 + 2, 1 / 4),
    "nvfp4": (32 + 4 + 32 + 4, 1 / 4),
    "nvfp4_4over6": (32 + 4 + 32 + 4, 1 / 4),
    "fp8_k_nvfp4_v": (64 + 32 + 4, 1 / 4),
    "mxfp8": (64 + 2 + 64 + 2, 1 / 16),
    "fp4_mx_block16": (32 + 4 + 32 + 4, 1 / 4),
    "lmdeploy_int8": (64 + 4 + 64 + 4, 5 / 255),
    "lmdeploy_int4": (32 + 4 + 32 + 4, 5 / 15),
    "lmdeploy_turboquant": (32 + 2 + 2 + 16 + 2, 5 / 15),
}
HEADS, LATENTS = Shape(2, 64, 64), Shape(1, 512, 64, "latents")
ONE = Layers({0: HEADS}, 1)


def test_bytes_per_token_and_sizes_that_do_not_fit():
    assert [*TYPES] == ["fp8", *CACHES]
    for name, (size, _) in TYPES.items():
        kind = cache_type(name)
        assert kind.bytes_per_token([(3, 64, 64)] * 5) == 15 * size, name
        for layers, in_16_bits in ((range(5), 4), (range(3), 2), ([3, 7], 0)):  # a hybrid keeps none
            model = Layers(dict.fromkeys(layers, Shape(1, 64, 64)), layers[-1] + 1, is_hybrid=not in_16_bits)
            in_16_bits *= name.startswith(("turboquant", "ultraquant"))
            assert kind.model_bytes(model) == size * (len(layers) - in_16_bits) + 256 * in_16_bits, name
    # layers, and K and V, are counted apart
    assert cache_type("fp8_k_nvfp4_v").bytes_per_token([(2, 128, 64), (1, 32, 256)]) == 2 * 164 + 176
    # 61 layers of DeepSeek-V3: latents of 512, k_pe of 64
    for name, size in {"fp8": 576, "fp8_ds_mla": 512 + 4 * 4 + 2 * 64, "nvfp4_ds_mla": 352}.items():
        for shape in (LATENTS, LATENTS._replace(attention="sparse latents")):
            assert shape.values == 576
            assert cache_type(name).bytes_per_token([shape] * 61) == 61 * size, name
    # a shorter last tile has a scale of its own
    assert cache_type("fp8_ds_mla").bytes_per_token([Shape(1, 576, 192, "latents")]) == 576 + 5 * 4 + 2 * 192
    assert cache_type("fp8").bytes_per_token([HEADS, LATENTS]) == 256 + 576
    with pytest.raises(InputError, match=r"^nvfp4 holds K and V of heads, .* latents \(MLA\)$"):
        cache_type("nvfp4").bytes_per_token([HEADS, LATENTS])
    for name, shape, problem in (
        ("nvfp4", (1, 72, 72), "head size 72 is not a multiple of 16"),
        ("lmdeploy_int4", (1, 7, 7), "head size 7 is not a multiple of 2"),
        ("turboquant_3bit_nc", (1, 24, 24), "head size 24 is not a power of two"),
        ("fp8", (1, 0, 0), "head size 0 is not a multiple of 1"),
        ("nvfp4_ds_mla", (1, 24, 8, "latents"), "latent size 24 is not a multiple of 16"),
    ):
        with pytest.raises(InputError, match=f"^{name}: {problem}$"):
            cache_type(name).bytes_per_token([shape])


def test_every_type_rounds_k_and_v_token_by_token_and_keeps_their_dtype():
    key, value = torch.randn(2, 1, 3, 5, 64, generator=torch.Generator().manual_seed(0)).unbind()
    key[0, 0, 2, 3] = value[0, 0, 2, 3] = float("nan")
    for name, dtype in product((*TYPES, *LATENT_CACHES), (torch.float32, torch.bfloat16)):
        _, worst = TYPES.get(name, (0, 1 / 4))
        pair = key.to(dtype), value.to(dtype)
        together = rounding(name, ONE)(0, *pair)
        alone = rounding(name, ONE)(0, *(x[:, 1:2, 3:4] for x in pair))
        for x, whole, part in zip((key, value), together, alone, strict=True):
            assert (whole.dtype, whole.shape) == (dtype, x.shape)
            assert 0 < ((whole.float() - x)[:, 1:].norm() / x[:, 1:].norm()).item() < worst, name
            assert torch.equal(whole[:, 1:2, 3:4], part), name
            assert whole[0, 0, 2].isnan().any()
        if name == "lmdeploy_turboquant":  # what 3 bits of a normal distribution leave, and its sign
            assert 0.1 < ((together[0].float() - key)[:, 1:].norm() / key[:, 1:].norm()).item() < 0.13
    key, value = key[:, 1:], value[:, 1:]
    five = Layers(dict.fromkeys(range(5), HEADS), 5)
    rounded = rounding("turboquant_k8v4", five)
    with pytest.raises(InputError, match="turboquant_k8v4 is not known for a model where layers share"):
        rounding("turboquant_k8v4", five._replace(total=7))
    for layer in range(5):
        assert all(map(torch.equal, rounded(layer, key, value), (key, value))) == (layer != 2)
