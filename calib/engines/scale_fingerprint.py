"""A fingerprint of the scales in force: engines with the same one read each other's FP8 blocks rightly."""

import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from calib.engines.loaded_scales import EngineLayer
from calib.files.stored_scales import Values

# layer -> its cache type, and the scales of K and V that it stores with
Stored = Mapping[int, tuple[str, Values, Values]]

_ALIASES = {"fp8_e4m3": "fp8", "fp8_inc": "fp8"}  # vLLM's names of one cache


def stored_scales(layers: Sequence[EngineLayer]) -> Stored:
    """Return the scales that each layer stores K and V with, of the copies those that its backend reads."""
    return {
        layer.layer: (layer.cache, _written(layer, layer.k), _written(layer, layer.v)) for layer in layers
    }


def fingerprint(stored: Stored) -> str:
    """Return 16 bytes, in hex, of all layers' scales, as float32; empty where no layer has an FP8 cache."""
    digest, has_scales = blake2b(digest_size=16), False
    for index, (cache, *scales) in sorted(stored.items()):
        digest.update(f"{index} {_ALIASES.get(cache, cache)} ".encode())
        for values in scales:
            # one value for all heads is the same scale, however it is stored
            values = values[:1] if len({*values}) == 1 else values
            digest.update(struct.pack(f"<I{len(values)}f", len(values), *values))
            has_scales |= bool(values)
    return digest.hexdigest() if has_scales else ""


def join_ranks(ranks: Sequence[Stored], tensor_parallel_size: int, kv_heads: int) -> Stored:
    """Return the scales of the whole model, of its ranks in order: tensor-parallel ones of a stage together.

    So the fingerprint of a model does not depend on how many GPUs it is split over.
    """
    whole: dict[int, tuple[str, Values, Values]] = {}
    for first in range(0, len(ranks), tensor_parallel_size):
        group = ranks[first : first + tensor_parallel_size]
        for index, (cache, *_) in group[0].items():
            k = _join([rank[index][1] for rank in group], kv_heads)
            whole[index] = (cache, k, _join([rank[index][2] for rank in group], kv_heads))
    return whole


def _join(parts: Sequence[Values], kv_heads: int) -> Values:
    values = tuple(value for part in parts for value in part)
    if len({*values}) == 1:
        return values[:1]
    copies = max(1, len(values) // kv_heads)  # of a head that several ranks hold
    heads = values[::copies]
    is_copied = tuple(value for value in heads for _ in range(copies)) == values
    return heads if is_copied else values  # ranks that differ where they must not


def _written(layer: EngineLayer, copies: Mapping[str, Values]) -> Values:
    if not layer.is_fp8:
        return ()
    first = next(iter(copies.values()), ())
    return next((values for name, values in copies.items() if name in layer.written), first)
