"""What cache types make of K and V: rounded to codes and back, as engines compute it."""

from collections.abc import Callable, Mapping

from torch import Tensor

from calib.caches.per_head import fp8_per_token_head, int8_per_token_head
from calib.caches.rotated import int4_per_token_head
from calib.errors import InputError

# layer, key [B, H, T, D], value [B, H, T, D] -> what attention computes with
CacheRounding = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]

_ROUNDINGS: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "fp8_per_token_head": (fp8_per_token_head, fp8_per_token_head),
    "int8_per_token_head": (int8_per_token_head, int8_per_token_head),
    "int4_per_token_head": (int4_per_token_head, int4_per_token_head),
}


def rounding(name: str) -> CacheRounding:
    """The rounding of the cache type called `name`, one of `calib.caches.types.CACHES`.

    K and V keep their dtype, and are rounded to it once more than in the engine.
    """
    if name not in _ROUNDINGS:
        raise InputError(f"cache '{name[:40]}' is not one of {', '.join(_ROUNDINGS)}")
    of_key, of_value = _ROUNDINGS[name]
    return lambda layer, key, value: (of_key(key), of_value(value))
