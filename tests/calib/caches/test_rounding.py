"""Roundings of K and V by a cache type's name."""

import pytest
import torch

from calib.caches.blocks import nvfp4
from calib.caches.per_token_head import INT8_STEPS, lmdeploy
from calib.caches.rounding import rounding
from calib.caches.types import CACHES
from calib.errors import InputError

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


def key_and_value():
    return torch.randn(2, 1, 3, 5, 64, generator=torch.Generator().manual_seed(0)).unbind()


def error(rounded, x):
    return ((rounded.float() - x).norm() / x.norm()).item()


@pytest.mark.parametrize("name", CACHES)
def test_every_type_has_one(name):
    key, value = key_and_value()
    for dtype in (torch.float32, torch.bfloat16):
        rounded = rounding(name)(0, key.to(dtype), value.to(dtype))
        for ours, x in zip(rounded, (key, value), strict=True):
            assert ours.dtype == dtype
            assert ours.shape == x.shape
            assert 0 < error(ours, x) < WORST[name]


def test_tokens_and_heads_do_not_touch_each_other():
    key, value = key_and_value()
    for name in CACHES:
        together = rounding(name)(0, key, value)
        alone = rounding(name)(0, key[:, 1:2, 3:4], value[:, 1:2, 3:4])
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole[:, 1:2, 3:4], part), name


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


def test_an_unknown_name():
    with pytest.raises(InputError, match="cache 'fp4' is not one of fp8, fp8_per_token_head, int8"):
        rounding("fp4")
