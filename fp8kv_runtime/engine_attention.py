"""Attention to an FP8 cache as engines' kernels round it, in plain fp32 torch.

Ours keep 16 bits of the softmax weights, and of queries unless they have a scale; `reference.py`
rounds neither. These two round more, in the order in which the kernels walk the keys: a weight is
rounded beside the largest score so far, and rescaled when a larger one comes.

FlashAttention 3, as vLLM 0.32 runs it on Hopper: by the source of vllm-project/flash-attention at
617264c (2026-08-06; which commit vLLM 0.32 is built from was not found out), hopper/:
`tile_size_fwd_sm90`, `CollectiveMainloopFwdSm90::mma`, `Softmax` (`max_get_scale`,
`online_softmax`, `finalize`, `finalize_aux`), `gemm` in utils.h.

vLLM's Triton kernel: by the source of vLLM 0.32.0, v1/attention/ops/triton_unified_attention.py
(`kernel_unified_attention`, `_cast_kv_tile`) and triton_attention_helpers.py (`softmax_step`), and
by running it: tests/interop/check_vllm_triton.py. 0.33.0 has the same lines; who gives it queries
in FP8 (`supports_quant_query_input` in v1/attention/backends/triton_attn.py) changed: 0.32 on
NVIDIA, 0.33 also on AMD but for gfx90a and gfx11.

Not modelled: how tensor cores add (about 14 bits inside one product of FP8 tiles on Hopper; from
tile to tile both kernels add in fp32), the last bits of exp2 and tanh, FlashAttention 3's split of
long decodes and its tiles of a sliding window, which start at the window.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fp8kv_runtime.fp8 import dequantize, quantize
from fp8kv_runtime.options import AttentionOptions

_ROWS = 128  # queries at a time: each has a score for every key, several times over
_ONE_GROUP_ROWS = 64  # FlashAttention 3: rows that one group of warps takes, with tiles of its own
_SEGMENTS = 16  # vLLM's Triton kernel: parts of a sequence in a decode
# where vLLM cuts off what it rounds to E4M3FNUZ by its own `QuantFP8`: `get_fp8_min_max`
_FNUZ_QUERIES_MAX = 224.0


class Tiles(NamedTuple):
    """How a kernel walks the keys."""

    size: int
    parts: int = 1  # of a sequence, each with a maximum of its own
    last_first: bool = False


def fa3_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, options: AttentionOptions
) -> Tensor:
    """Attend as FlashAttention 3 does in FP8.

    Queries are E4M3 codes, with scale 1.0 where `options` has none; one scale per head becomes the
    largest of those that share a KV head, as in vLLM. Weights are E4M3 codes of
    exp2(score - largest + 8); their sum is of unrounded ones.

    Args:
        query: [B, H, T, D] float32.
        key: [B, K, N, D] float32, restored from FP8: code times scale.
        value: [B, K, N, D] float32, so too.
        visible: [B or 1, H or 1, T, N] bool.
        options: softmax scale, softcap, sinks, scale of queries; the window is in `visible`.

    Returns:
        [B, H, T, D] float32; zeros where nothing is visible.
    """
    rows = query.shape[2] * (query.shape[1] // key.shape[1])
    tiles = Tiles(_fa3_tile(query.shape[3], rows), last_first=True)
    query = _fp8_query(query, options.q_scale, key.shape[1])
    return _attend(query, key, value, visible, options, tiles, _fp8_weights)


def vllm_triton_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    options: AttentionOptions,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    fp8: torch.dtype = torch.float8_e4m3fn,
) -> Tensor:
    """Attend as vLLM's Triton kernel does to an FP8 cache; arguments as of `fa3_attention`.

    `dtype` is the queries' 16-bit type, to which K and V times their scale, and weights, are
    rounded. None: queries are codes of `fp8`, K and V are multiplied as codes, and weights are
    codes of 256 times the weight, in E4M3FNUZ of 128 times.
    """
    rounded: Callable[[Tensor], Tensor]
    if dtype is None:
        query = _fp8_query(query, options.q_scale, key.shape[1], fp8)
        rounded, decode = partial(_fp8_weights, dtype=fp8), Tiles(32, _SEGMENTS)
    else:
        query, key, value = (x.to(dtype).float() for x in (query, key, value))
        rounded, decode = (lambda weights: weights.to(dtype).float()), Tiles(16, _SEGMENTS)
    tiles = decode if query.shape[2] == 1 else Tiles(32)
    return _attend(query, key, value, visible, options, tiles, rounded, from_sinks=True)


def _fa3_tile(head_dim: int, rows: int) -> int:
    """Keys in a tile: `tile_size_fwd_sm90` for one byte, causal, two-level accumulation."""
    if head_dim in (64, 128) and rows <= _ONE_GROUP_ROWS:
        return 128 if head_dim == 64 else 96
    sizes = {64: 128, 96: 128, 128: 192, 192: 96, 256: 128}
    return sizes[min(size for size in sizes if head_dim <= size)]


def _fp8_query(
    query: Tensor,
    scale: Tensor | None,
    num_kv_heads: int,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Tensor:
    scale = torch.ones(1) if scale is None else scale.float()
    if scale.numel() > 1:
        group = query.shape[1] // num_kv_heads
        scale = scale.view(num_kv_heads, group).amax(1).repeat_interleave(group).view(-1, 1, 1)
    scale = scale.to(query.device)
    if dtype == torch.float8_e4m3fnuz:
        query = query.clamp(-_FNUZ_QUERIES_MAX * scale, _FNUZ_QUERIES_MAX * scale)
    return dequantize(quantize(query, scale, dtype), scale)


def _fp8_weights(weights: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    one = torch.ones(1, device=weights.device)
    factor = 128 if dtype == torch.float8_e4m3fnuz else 256
    return dequantize(quantize(weights * factor, one, dtype), one) / factor


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    options: AttentionOptions,
    tiles: Tiles,
    rounded: Callable[[Tensor], Tensor],
    *,
    from_sinks: bool = False,
) -> Tensor:
    """`from_sinks`: whether the running maximum starts at the sink."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    sinks = None if options.sinks is None else options.sinks.float().view(-1, 1, 1)
    parts = []
    for start in range(0, query.shape[2], _ROWS):
        rows = slice(start, start + _ROWS)
        scores = query[:, :, rows] @ key.mT * options.scale(query.shape[3])
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        scores = scores.masked_fill(~visible[:, :, rows], -torch.inf)
        largest = _running_maximum(scores, tiles, sinks if from_sinks else None)
        weights, total = _weights(scores, largest, sinks, rounded)
        parts.append(weights @ value / total.where(total > 0, 1.0))
    return torch.cat(parts, 2)


def _weights(
    scores: Tensor, largest: Tensor, sinks: Tensor | None, rounded: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Rounded weights [B, H, T, N] beside the largest score of all, and the sum of unrounded ones.

    `largest` [B, H, T, N] is the running maximum when each key was met.
    """
    final = _finite(largest.amax(-1, keepdim=True))
    weights, rescale = (scores - _finite(largest)).exp(), (largest - final).exp()
    total = (weights * rescale).sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - final).exp()
    return rounded(weights) * rescale, total


def _running_maximum(scores: Tensor, tiles: Tiles, start: Tensor | None) -> Tensor:
    """For each score the largest of its tile and those before it, [B, H, T, N]; -inf: all hidden.

    `start` is what the first part begins with.
    """
    length = scores.shape[-1]
    missing = -length % (tiles.parts * tiles.size)
    padded = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    of_tiles = padded.view(*scores.shape[:-1], tiles.parts, -1, tiles.size).amax(-1)
    if start is not None:
        first = of_tiles[..., 0, :].maximum(start)
        of_tiles = torch.cat([first[..., None, :], of_tiles[..., 1:, :]], -2)
    if tiles.last_first:
        of_tiles = of_tiles.flip(-1).cummax(-1).values.flip(-1)
    else:
        of_tiles = of_tiles.cummax(-1).values
    return of_tiles.flatten(-2).repeat_interleave(tiles.size, -1)[..., :length]


def _finite(largest: Tensor) -> Tensor:
    return largest.where(largest > -torch.inf, 0.0)
