"""Cache types by name: their bytes, the layers they hold, and how they round K and V."""

import pytest
import torch

from calib.caches.blocks import nvfp4
from calib.caches.per_token_head import INT8_STEPS, lmdeploy
from calib.caches.rounding import rounding
from calib.caches.types import CACHES, LATENT_CACHES, Shape, cache_type
from calib.errors import InputError

# of one head of 64 values of K and V; NVFP4 as 32 bytes and 4 scales
BYTES = {
    "fp8": 64 + 64,
    "fp8_per_token_head": 64 + 4 + 64 + 4,
    "int8_per_token_head": 64 + 4 + 64 + 4,
    "int4_per_token_head": 32 + 4 + 32 + 4,
    "nvfp4": 32 + 4 + 32 + 4,
    "nvfp4_4over6": 32 + 4 + 32 + 4,
    "fp8_k_nvfp4_v": 64 + 32 + 4,
    "lmdeploy_int8": 64 + 4 + 64 + 4,
    "lmdeploy_int4": 32 + 4 + 32 + 4,
}
# half a step, over the size of normal values: a sixteenth of a value in E4M3; the 127th part, or
# of the range the 255th or the 15th part, where none of 64 is beyond five; at most one half to two
# or a quarter to one in E2M1
WORST = {
    "fp8_per_token_head": 1 / 16,
    "int8_per_token_head": 2.5 / 127,
    "int4_per_token_head": 5 / 15,
    "nvfp4": 1 / 4,
    "nvfp4_4over6": 1 / 4,
    "fp8_k_nvfp4_v": 1 / 4,
    "lmdeploy_int8": 5 / 255,
    "lmdeploy_int4": 5 / 15,
}
HEADS, LATENTS = Shape(2, 64, 64), Shape(1, 512, 64, "latents")


def test_bytes_per_token():
    assert [*BYTES] == ["fp8", *CACHES]
    for name, size in BYTES.items():
        kind = cache_type(name)
        assert kind.name == name
        assert kind.bytes_per_token([(1, 64, 64)]) == size, name
        assert kind.bytes_per_token([(3, 64, 64)] * 5) == 15 * size, name
        assert kind.bytes_per_token([]) == 0
    # layers, and K and V, are counted apart
    assert cache_type("fp8_k_nvfp4_v").bytes_per_token([(2, 128, 64), (1, 32, 256)]) == 2 * 164 + 176
    # 61 layers of DeepSeek-V3: latents of 512, k_pe of 64
    for name, size in {"fp8": 576, "fp8_ds_mla": 512 + 4 * 4 + 2 * 64, "nvfp4_ds_mla": 352}.items():
        for shape in (LATENTS, LATENTS._replace(attention="sparse latents")):
            assert shape.values == 576
            assert cache_type(name).bytes_per_token([shape] * 61) == 61 * size, name
    # a shorter last tile has a scale of its own
    long = Shape(1, 576, 192, "latents")
    assert cache_type("fp8_ds_mla").bytes_per_token([long]) == 576 + 5 * 4 + 2 * 192


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("nvfp4", (1, 72, 72), "nvfp4: head size 72 is not a multiple of 16"),
        ("int4_per_token_head", (1, 7, 7), "int4_per_token_head: head size 7 is not a multiple of 2"),
        ("lmdeploy_int4", (1, 7, 7), "lmdeploy_int4: head size 7 is not a multiple of 2"),
        ("fp8", (1, 0, 0), "fp8: head size 0 is not a multiple of 1"),
        ("nvfp4_ds_mla", (1, 24, 8, "latents"), "nvfp4_ds_mla: latent size 24 is not a multiple of 16"),
    ],
)
def test_sizes_that_do_not_fit(name, shape, problem):
    with pytest.raises(InputError, match=problem):
        cache_type(name).bytes_per_token([shape])


def test_types_are_for_latents_or_for_heads():
    for name in LATENT_CACHES:
        with pytest.raises(InputError, match=f"{name} holds latents .MLA., .* K and V of heads$"):
            cache_type(name).bytes_per_token([HEADS])
    for shapes in ([LATENTS], [HEADS, LATENTS]):
        with pytest.raises(InputError, match=r"nvfp4 holds K and V of heads, .* latents \(MLA\)$"):
            cache_type("nvfp4").bytes_per_token(shapes)
    assert cache_type("fp8").bytes_per_token([HEADS, LATENTS]) == 256 + 576


@pytest.mark.parametrize("find", [cache_type, rounding])
def test_unknown_names(find):
    with pytest.raises(InputError, match="cache 'int7' is not one of fp8, fp8_per_token_head, int8"):
        find("int7")


def key_and_value():
    return torch.randn(2, 1, 3, 5, 64, generator=torch.Generator().manual_seed(0)).unbind()


@pytest.mark.parametrize("name", CACHES)
def test_every_type_rounds_k_and_v_token_by_token(name):
    key, value = key_and_value()
    for dtype in (torch.float32, torch.bfloat16):
        pair = key.to(dtype), value.to(dtype)
        together = rounding(name)(0, *pair)
        alone = rounding(name)(0, *(x[:, 1:2, 3:4] for x in pair))
        for x, whole, part in zip((key, value), together, alone, strict=True):
            assert (whole.dtype, whole.shape) == (dtype, x.shape)
            assert 0 < ((whole.float() - x).norm() / x.norm()).item() < WORST[name]
            assert torch.equal(whole[:, 1:2, 3:4], part)


def test_k_in_fp8_beside_v_in_nvfp4_at_scale_one():
    key, value = key_and_value()
    rounded = rounding("fp8_k_nvfp4_v")(0, key, value)
    assert torch.equal(rounded[0], key.to(torch.float8_e4m3fn).float())
    assert torch.equal(rounded[1], nvfp4(value))
    assert torch.equal(rounding("fp8")(0, key, value)[1], value.to(torch.float8_e4m3fn).float())


def test_lmdeploy_keeps_its_scales_in_the_dtype_that_is_served():
    key, value = key_and_value()
    rounded = rounding("lmdeploy_int8", dtype=torch.bfloat16)(0, key, value)
    assert torch.equal(rounded[1], lmdeploy(value, INT8_STEPS, torch.bfloat16))
    assert not torch.equal(rounded[1], rounding("lmdeploy_int8")(0, key, value)[1])
