"""What rows of a weight give for fixed inputs, with no more read than these rows."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from calib.errors import InputError
from calib.files.model_directory import ModelDirectory
from calib.files.tensors import Source, StoredTensor
from calib.models.quantized.detect import find_weight_format
from calib.models.quantized.weights import DequantizedTensor, all_weights
from calib.same_model.record import PROBES, Mark

# tensors whose first dimension is the weight's wherever it is as long
_BY_ROW = ("weight", "weight_packed", "weight_scale")
_DECODED_FROM = 32  # codes of most layouts can be decoded from multiples of this


def readable_weights(checkpoint: ModelDirectory) -> Mapping[str, Source]:
    """The weights of a checkpoint that can be read as numbers, by name; codes of others are not."""
    sources = all_weights(checkpoint, find_weight_format(checkpoint), torch.float32)
    # bytes are codes, which transformers decodes
    return {n: s for n, s in sources.items() if s.dtype.is_floating_point and s.dtype.itemsize > 1}


def probe_vector(source: Source) -> Mark:
    """The mark of a vector [n], which is read whole."""
    vector = source.read().float()
    return _mark(source, (vector @ signs(len(vector))).view(1, -1))


def probe_rows(
    source: Source, places: list[int], norm: Tensor | None = None, bias: Tensor | None = None
) -> Mark:
    """The mark of a matrix [rows, n]: what its rows at `places` give behind a norm.

    The norm's output is taken to be the fixed inputs times `norm` [n] plus `bias` [n], None being
    1 and 0: a factor that a tool moves from the norm into the matrix changes nothing.
    """
    columns = source.shape[1]
    if any(each is not None and len(each) != columns for each in (norm, bias)):
        raise InputError(f"a norm of another size than the {columns} columns of a weight behind it")
    inputs = signs(columns)
    inputs = inputs if norm is None else inputs * norm[:, None]
    inputs = inputs if bias is None else inputs + bias[:, None]
    return _mark(source, read_rows(source, places) @ inputs)


def sampled(rows: int, count: int) -> list[int]:
    """Places of at most `count` rows, in every part of a matrix and on changing channels.

    Those of a large matrix are near rows from which codes can be decoded.
    """
    step = _DECODED_FROM if rows >= 1024 else 1
    part = max(rows // count, 1)
    return sorted({min(i * rows // count // step * step + i % part, rows - 1) for i in range(count)})


def sampled_heads(rows: int, heads: int, head_dim: int) -> list[int]:
    """Places of rows of Q, K and V in one matrix, at least 4 of K's and 4 of V's among them.

    Heads of K and V come after those of Q, of all or of the group that shares them.
    """
    kv = (rows // head_dim - heads) // 2
    group, some = rows // head_dim // kv, sampled(kv, 4)
    blocks = {b for j in some for b in ((j + 1) * group - 2, (j + 1) * group - 1)}
    blocks |= {b for j in some for b in (heads + j, heads + kv + j)}
    within = sampled(head_dim, -(-4 // len(some)))
    return sorted(block * head_dim + at for block in blocks for at in within)


@lru_cache(maxsize=8)
def signs(size: int) -> Tensor:
    """The fixed inputs [size, PROBES] float32: signs at random, the same for ever."""
    data = hashlib.shake_256(b"fp8kv marks").digest(size * PROBES // 8)
    bits = np.unpackbits(np.frombuffer(data, np.uint8)).reshape(size, PROBES)
    return torch.from_numpy(bits).float() * 2 - 1


def is_by_row(source: Source) -> bool:
    """Whether rows can be read without the whole weight."""
    if not isinstance(source, DequantizedTensor):
        return True
    names = {name.rpartition(".")[2] for name in source.coded.parts.values()}
    return not names.isdisjoint(_BY_ROW[:2])


def read_rows(source: Source, places: list[int]) -> Tensor:
    """Rows at `places` of a weight in float32; reads these alone where the layout allows it."""
    if isinstance(source, StoredTensor):
        return torch.cat([_stored_rows(source, at, at + 1) for at in places]).float()
    assert isinstance(source, DequantizedTensor)
    parts = {part: _part(source, part, places) for part in source.stored}
    return torch.cat([source.coded.rows(parts, at, at + 1) for at in places])


def _part(source: DequantizedTensor, part: str, places: list[int]) -> Tensor:
    stored = source.stored[part]
    by_row = source.coded.parts[part].rpartition(".")[2] in _BY_ROW
    if not (by_row and stored.shape[:1] == source.shape[:1]):
        return stored.read()
    # rows that nobody asks for are never filled: pages that are not touched take no memory
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for at in places:
        whole[at : at + 1] = _stored_rows(stored, at, at + 1)
    return whole


def _stored_rows(source: StoredTensor, start: int, stop: int) -> Tensor:
    row = source.nbytes // source.shape[0]
    shape = (stop - start, *source.shape[1:])
    return replace(source, shape=shape, offset=source.offset + start * row).read()


def _mark(source: Source, values: Tensor) -> Mark:
    if not values.isfinite().all():
        raise InputError("a weight holds NaN or Inf; download the model again")
    return Mark(source.shape, _bits(source), values)


def _bits(source: Source) -> int:
    """Bits of the codes that a value is stored in; 16 for all floats."""
    if not isinstance(source, DequantizedTensor):
        return 16
    most = max(stored.nbytes for stored in source.stored.values())
    return max(1, min(16, 8 * most // prod(source.shape)))
