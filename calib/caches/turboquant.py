"""TurboQuant of vLLM and of LMDeploy: codes of a rotated direction.

vLLM has K in 3 or 4 bits, or in FP8; V in 3 or 4 bits.

K is divided by its length and rotated by a Hadamard matrix, after which each value is about normally
distributed; the codes are those of the best quantiser for that (Lloyd 1982, Max 1960). Its length is
kept in 16 bits. V has a scale and a zero point per token and head.

The writer is v1/attention/ops/triton_turboquant_store.py of vLLM 0.32, the reader `_tq_full_dequant_kv`
in triton_turboquant_decode.py. Both are for decoding: a prompt that vLLM reads in one piece is computed
with K and V as they were.

LMDeploy has K in 3 bits and the sign of what they leave, as long as that is on average; V in 2 bits of
its rotated direction. `_fill_page_quant_turbo_qjl4` and `_fill_page_quant_turbo_int2` in
pytorch/kernels/cuda/fill_kv_cache.py of LMDeploy 0.18, with the levels of turbo_quant.py. The engine
rotates Q, and its output back.
"""

import math
from functools import cache

import torch
from torch import Tensor

from calib.caches.per_token_head import hadamard_product, served_in
from calib.errors import InputError

LEAST_SCALE = 1e-8  # of V, and what is added to a length
# LMDeploy's levels of 2 and of 3 bits and the edges between them, above 0, for values of variance 1
_LEVELS = {2: (0.4527808, 1.5104176), 3: (0.2450942, 0.7560052, 1.3439093, 2.1519456)}
_EDGES = {2: (0.9815992,), 3: (0.5005497, 1.0499573, 1.7479274)}
# vLLM's levels of 3 and of 4 bits, so too
_CENTROIDS = {
    3: (0.2449836, 0.7556455, 1.34318002, 2.1503495),
    4: (0.12842766, 0.3881378, 0.6568799, 0.94244824, 1.25625757, 1.6178818, 2.0684471, 2.7309222),
}


def rotated_key(x: Tensor, bits: int) -> Tensor:
    """Round K `x` [..., D] as its codes of `bits` are read; an InputError where D is not a power of two."""
    codes, length = key_codes(x, bits)
    direction = centroids(x.shape[-1], bits).to(x.device)[codes]
    direction = direction / (direction.square().sum(-1, keepdim=True) + 1e-16).sqrt()
    # the reader rotates Q in place of K, and rounds K to float16 where it has to hold it
    key = (length.half().float() * direction).half().float()
    return (key @ hadamard(x.shape[-1]).to(x.device)).to(x.dtype)


def key_codes(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes [..., D] int64 and lengths [..., 1] float32 of K `x` [..., D].

    Raises an InputError where D is not a power of two.
    """
    size, x = x.shape[-1], x.float()
    length = x.norm(dim=-1, keepdim=True)
    rotated = (x / (length + LEAST_SCALE)) @ hadamard(size).to(x.device)
    levels = centroids(size, bits).to(x.device)
    return torch.bucketize(rotated, (levels[:-1] + levels[1:]) / 2, right=True), length


def value(x: Tensor, bits: int) -> Tensor:
    """Round V `x` [..., D] as its codes of `bits` are read."""
    codes, scale, low = value_codes(x, bits)
    return codes.mul_(scale.half()).add_(low.half()).half().to(x.dtype)


def value_codes(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes [..., D], scales and zero points [..., 1] of V `x` [..., D], float32."""
    x, steps = x.float(), 2**bits - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / steps).clamp_(min=LEAST_SCALE)
    return ((x - low) / scale).add_(0.5).trunc_().clamp_(0, steps), scale, low


def lmdeploy(x: Tensor, bits: int, dtype: torch.dtype | None = None) -> Tensor:
    """Round `x` [..., D], K with 3 `bits` or V with 2, as LMDeploy reads it in a model that runs in `dtype`.

    Raises an InputError where D is not a power of two.
    """
    dtype = served_in(x, dtype)
    codes, *lengths = lmdeploy_codes(x.to(dtype), bits)
    levels, _ = _lmdeploy_levels(x, bits)
    length, *left = (part.to(dtype).float() for part in lengths)
    direction = levels[codes % 2**bits]
    if left:
        direction += left[0] * (2 * (codes >> bits) - 1)
    return ((length * direction).to(dtype).float() @ hadamard(x.shape[-1]).to(x.device)).to(x.dtype)


def lmdeploy_codes(x: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Return codes [..., D] int64 of `x` [..., D], its lengths, and for K the sizes of what they leave.

    Lengths and sizes are [..., 1] float32. V has 2 `bits`. K has 3, and its codes hold a fourth above
    them: the sign of what these leave. Raises an InputError where D is not a power of two.
    """
    levels, edges = _lmdeploy_levels(x, bits)
    rotated = (x.float() @ hadamard(x.shape[-1]).to(x.device)).to(x.dtype).float()
    length = rotated.square().sum(-1, keepdim=True).add_(LEAST_SCALE).sqrt_()
    direction = rotated / length
    codes = torch.bucketize(direction, edges)
    if bits == 2:
        return codes, length
    left = direction - levels[codes]
    size = left.square().sum(-1, keepdim=True).add_(LEAST_SCALE).sqrt_() / math.sqrt(x.shape[-1])
    return codes + ((left >= 0).long() << bits), length, size


def _lmdeploy_levels(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the levels and the edges between them for a head of the size and on the device of `x`."""
    levels, edges = torch.tensor(_LEVELS[bits]), torch.tensor(_EDGES[bits])
    both = (torch.cat([-levels.flip(0), levels]), torch.cat([-edges.flip(0), torch.zeros(1), edges]))
    levels, edges = ((part * (1.0 / math.sqrt(x.shape[-1]))).to(x.device) for part in both)
    return levels, edges


@cache
def hadamard(size: int) -> Tensor:
    """Return the orthonormal Hadamard matrix [size, size]; an InputError for a size not a power of two."""
    if size & (size - 1):
        raise InputError(f"turboquant: head size {size} is not a power of two")
    return hadamard_product(torch.eye(size)) / math.sqrt(size)


def centroids(size: int, bits: int) -> Tensor:
    """Return the levels of vLLM's quantiser for a variance of 1 / `size`: [2 ** bits] float32, ascending.

    vLLM searches for them; these have the same bits for heads of 16 to 2048.
    """
    above = _CENTROIDS[bits]
    levels = [*(-level for level in reversed(above)), *above]
    return torch.tensor([level / math.sqrt(size) for level in levels])
