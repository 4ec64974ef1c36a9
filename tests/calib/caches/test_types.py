"""Facts about cache types."""

import pytest

from calib.caches.types import CACHES, cache_type
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


@pytest.mark.parametrize("name", ["fp8", *CACHES])
def test_bytes_per_token(name):
    kind = cache_type(name)
    assert kind.name == name
    assert kind.bytes_per_token([(1, 64, 64)]) == BYTES[name]
    assert kind.bytes_per_token([(3, 64, 64)] * 5) == 15 * BYTES[name]
    assert kind.bytes_per_token([]) == 0


def test_layers_and_k_and_v_are_counted_apart():
    kind = cache_type("fp8_k_nvfp4_v")
    assert kind.bytes_per_token([(2, 128, 64), (1, 32, 256)]) == 2 * (128 + 36) + 32 + 144


@pytest.mark.parametrize(
    ("name", "head_dim", "multiple"),
    [("nvfp4", 72, 16), ("int4_per_token_head", 7, 2), ("lmdeploy_int4", 7, 2), ("fp8", 0, 1)],
)
def test_head_sizes_that_do_not_fit(name, head_dim, multiple):
    with pytest.raises(InputError, match=f"{name}: head size {head_dim} is not .* of {multiple}"):
        cache_type(name).bytes_per_token([(1, head_dim, head_dim)])


def test_unknown_names():
    with pytest.raises(InputError, match="cache 'int7' is not one of fp8, fp8_per_token_head"):
        cache_type("int7")
