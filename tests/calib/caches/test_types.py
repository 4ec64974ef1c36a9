"""Cache types by name: their bytes, the layers they hold; how they round K and V, as recorded, in numpy."""

from dataclasses import asdict
from functools import partial
from hashlib import sha256
from itertools import product

import numpy as np
import pytest
import torch
from families import tiny_model
from number_grids import E2M1, E4M3, nearest
from pydantic import TypeAdapter

from calib.caches import per_token_head
from calib.caches.blocks import e2m1, nvfp4, nvfp4_four_over_six
from calib.caches.rounding import rounded_attention, rounding
from calib.caches.types import ALL_CACHES, LATENT_CACHES, UNSIMULATED, CacheType, Layers, Shape, cache_type
from calib.errors import InputError

# by hand: bytes of one head of 64 values of K and V, NVFP4 as 32 bytes and 4 scales, or of a latent of 512
# and k_pe of 64; and the most that rounding errs beside the size of normal values, none of 64 beyond five:
# half a step. Then, of float32 and of bfloat16, what was read when check_caches.py found that engines store
# the same
TYPES = {
    "fp8": (64 + 64, 1 / 16),
    "fp8_e5m2": (64 + 64, 1 / 8, "423e6f161a9c", "c506f7e76b1a"),
    "fp8_per_token_head": (64 + 4 + 64 + 4, 1 / 16, "cf026a96588d", "aedb10721671"),
    "int8_per_token_head": (64 + 4 + 64 + 4, 2.5 / 127, "962b33ed85ec", "73297accc4af"),
    "int4_per_token_head": (32 + 4 + 32 + 4, 5 / 15, "e8b86d3090a7", "bc11eff0ac26"),
    "turboquant_k8v4": (64 + 32 + 4, 5 / 15, "1590c5301b28", "e514b3e51357"),
    "turboquant_4bit_nc": (32 + 2 + 32 + 4, 5 / 15),
    "turboquant_k3v4_nc": (24 + 2 + 32 + 4, 5 / 15),
    "turboquant_3bit_nc": (24 + 2 + 24 + 4, 5 / 7),
    "ultraquant_4bit": (32 + 2 + 32 + 2, 1 / 4, "ecf2d4d38f9b", "bc2e79ff37d8"),
    "nvfp4": (32 + 4 + 32 + 4, 1 / 4),
    "nvfp4_4over6": (32 + 4 + 32 + 4, 1 / 4),
    "fp8_k_nvfp4_v": (64 + 32 + 4, 1 / 4, "2bf9f3d40472", "cd1b9e89bc2c"),
    "mxfp8": (64 + 2 + 64 + 2, 1 / 16, "f550c3363f22", "d7fabccc9fa8"),
    "fp4_mx_block16": (32 + 4 + 32 + 4, 1 / 4, "fb5862921b13", "27b7d1c40eae"),
    "lmdeploy_int8": (64 + 4 + 64 + 4, 5 / 255, "4f7f27280aa8", "433a88adb408"),
    "lmdeploy_int4": (32 + 4 + 32 + 4, 5 / 15, "170f641c84fb", "6005404b6ae6"),
    "lmdeploy_turboquant": (32 + 2 + 2 + 16 + 2, 5 / 15),
    "fp8_ds_mla": (512 + 4 * 4 + 2 * 64, 1 / 4, "6f565e972643", "4b8839a1b467"),
    "nvfp4_ds_mla": (256 + 32 + 64, 1 / 4, "bce7c9432fcb", "dc035d98962b"),
}
HEADS, LATENTS = Shape(2, 64, 64), Shape(1, 512, 64, "latents")
ONE = Layers({0: HEADS}, 1)


def test_bytes_per_token_and_sizes_that_do_not_fit():
    assert [*TYPES] == [*ALL_CACHES]
    for kind in map(cache_type, (*ALL_CACHES, *UNSIMULATED)):
        assert TypeAdapter(CacheType).validate_python(asdict(kind)) == kind
    for name, (size, *_) in TYPES.items():
        kind = cache_type(name)
        if name in LATENT_CACHES:  # 61 layers of DeepSeek-V3
            for shape in (LATENTS, LATENTS._replace(attention="sparse latents")):
                assert kind.bytes_per_token([shape] * 61) == 61 * size, name
            continue
        assert kind.bytes_per_token([(3, 64, 64)] * 5) == 15 * size, name
        for layers, in_16_bits in ((range(5), 4), (range(3), 2), ([3, 7], 0)):  # a hybrid keeps none
            model = Layers(dict.fromkeys(layers, Shape(1, 64, 64)), layers[-1] + 1, is_hybrid=not in_16_bits)
            in_16_bits *= name.startswith(("turboquant", "ultraquant"))
            assert kind.model_bytes(model) == size * (len(layers) - in_16_bits) + 256 * in_16_bits, name
    # layers, and K and V, are counted apart
    assert cache_type("fp8_k_nvfp4_v").bytes_per_token([(2, 128, 64), (1, 32, 256)]) == 2 * 164 + 176
    # a shorter last tile has a scale of its own
    assert cache_type("fp8_ds_mla").bytes_per_token([Shape(1, 576, 192, "latents")]) == 576 + 5 * 4 + 2 * 192
    assert LATENTS.values == 576
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
    for (name, (_, worst, *_)), dtype in product(TYPES.items(), (torch.float32, torch.bfloat16)):
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


lmdeploy_int8 = partial(per_token_head.lmdeploy, steps=255)


def numbers(size):
    """Rows of eleven kinds; each value is computed alone, so that every processor finds the same."""
    column = torch.arange(size)
    x = (torch.arange(11 * size) * 7919 % 2003 - 1001).view(11, size) / 7
    x[0] *= 2.0 ** -(column // 8 % 24)  # over many octaves
    x[1:4] *= torch.tensor([2.0**-20, 2.0**-14, 2.0**9])[:, None]
    x[4] = x[4].abs() + 100  # of one sign
    x[5] = 0
    # halves of a step of E2M1, of INT8, of E4M3
    ties = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    x[6] = torch.cat([ties, -ties]).repeat(size // 16)
    x[7:9] = column % 127 - 31.5
    x[7:9, 0] = torch.tensor([127, 448])
    x[9:] = 49 * x[7:9]  # 49 times 1 / 49 is not 1
    return x[None, None]


@pytest.mark.parametrize("name", [name for name, (_, _, *recorded) in TYPES.items() if recorded])
def test_types_read_what_they_read_when_it_was_compared(name):
    sizes = (576, 64) if name.endswith("mla") else (64, 96)
    layers = Layers({0: Shape(1, *sizes, "latents" if name.endswith("mla") else "heads")}, 1)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        pair = rounding(name, layers)(0, *(numbers(size).to(dtype) for size in sizes))
        # what LMDeploy divides by 0 has no sign that every processor agrees on
        values = [x.float().nan_to_num(-1.0).contiguous().view(torch.uint8) for x in pair]
        found.append(sha256(torch.cat([x.flatten() for x in values]).numpy()).hexdigest()[:12])
    assert found == [*TYPES[name][2:]]


def test_halves_are_rounded_as_each_engine_rounds_them():
    # a step of 1 and a zero point of 7: the codes are the values and 7
    codes, scale, zero = per_token_head.int4_codes(torch.tensor([-7.0, 8.0, 0.5, 1.5, -0.5, -1.5]))
    assert (scale.item(), zero.item(), codes.tolist()) == (1, 7, [0, 15, 8, 9, 7, 6])
    codes, scale, zero = per_token_head.zero_point_codes(torch.tensor([0.0, 15.0, 0.5, 1.5, 14.5]), 15)
    assert (scale.item(), zero.item(), codes.tolist()) == (1, 0, [0, 15, 1, 2, 15])
    assert lmdeploy_int8(torch.full((2, 8), 3.0)).isnan().all()  # as in the engine


def test_scale_and_zero_point_are_kept_in_16_bits():
    # 8 bits of mantissa hold 100.5 no better than 100.5 +- 0.25: the step is 1
    x = torch.tensor([-100.3, 154.7, 0.0])
    assert lmdeploy_int8(x, dtype=torch.float16)[2].item() == pytest.approx(-0.3125, abs=1e-6)
    assert lmdeploy_int8(x, dtype=torch.bfloat16)[2].item() == -0.5
    assert torch.equal(lmdeploy_int8(x), lmdeploy_int8(x, dtype=torch.float16))
    of_bfloat16 = lmdeploy_int8(x.bfloat16())
    assert torch.equal(of_bfloat16.float(), lmdeploy_int8(x.bfloat16().float(), dtype=torch.bfloat16))


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
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4]
    x = torch.cat([-ties, torch.linspace(-9, 9, 4001), torch.tensor([100.0])])
    assert e2m1(x).tolist() == nearest(x.numpy(), E2M1).tolist()


def test_sizes_that_do_not_fit():
    one, odd = Layers({0: Shape(1, 7, 7)}, 1), torch.zeros(1, 1, 2, 7)
    assert rounding("lmdeploy_int8", one)(0, odd, odd)[0].shape == odd.shape
    for name, problem in (
        ("int4_per_token_head", "int4_per_token_head: head size 7 is not a multiple of 2"),
        ("lmdeploy_int4", "lmdeploy_int4: head size 7 is not a multiple of 2"),
        ("nvfp4", "blocks of 16: head size 7 is not a multiple of 16"),
        ("turboquant_4bit_nc", "turboquant: head size 7 is not a power of two"),
        ("ultraquant_4bit", "ultraquant: head size 7 is not a power of two"),
    ):
        with pytest.raises(InputError, match=f"^{problem}$"):
            rounding(name, one)(0, odd, odd)


def test_rounding_is_given_the_heads_that_the_cache_holds():
    shapes = set()

    def note(layer_idx, key, value):
        shapes.add((key.shape, value.shape))
        return key, value

    model = tiny_model("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    with rounded_attention(model, note):
        model(torch.arange(3, 12)[None])
    assert shapes == {((1, 2, 9, 16), (1, 2, 9, 16))}
