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

Products are added in fp32, or for FlashAttention 3 also as Hopper's tensor cores add them (`HopperAdds`).

Not modelled: the last bits of exp2 and tanh, FlashAttention 3's split of long decodes and its tiles
of a sliding window, which start at the window.
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

_STEP = 32  # products that Hopper's tensor cores add in one instruction
_FRACTION = 2.0**-13
_EXPONENT_BITS, _KEPT_BITS = 0x7F800000, -(1 << 10)  # of float32: all but the last 10 of 23 fraction bits
_SUBNORMAL = 2.0**-6  # smaller E4M3 codes have its exponent
_PRODUCTS = 2**18  # at a time, which stay in a processor's cache


class KernelOrder(NamedTuple):
    """The order in which a kernel walks the keys, and its rounding of weights."""

    tile: int  # keys at a time
    round_weights: Callable[[Tensor], Tensor]  # [B, H, T, N] float32 -> the same, rounded
    parts: int = 1  # of a sequence, each with a maximum of its own
    last_first: bool = False
    starts_at_sinks: bool = False  # whether the first part's maximum does
    adds: "HopperAdds | None" = None  # of products of codes; None: in fp32
    factor: Tensor | float = 1.0  # [H, 1, 1] of scores of codes


class HopperAdds(NamedTuple):
    """Sums of products as an H100 has them; these depend on codes, so their scales must be known."""

    k_scale: Tensor  # [1] or [K] float32
    v_scale: Tensor  # [1] or [K] float32
    every: int | None = 1  # tiles of keys after which the output is added to one in fp32; None: never


def fa3_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, options: AttentionOptions,
    adds: HopperAdds | None = None,
) -> Tensor:  # fmt: skip
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
        adds: how products are added; by default in fp32.

    Returns:
        [B, H, T, D] float32; zeros where nothing is visible.
    """
    num_heads, tokens, head_dim = query.shape[1:]
    if head_dim in (64, 128) and tokens * (num_heads // key.shape[1]) <= _ONE_GROUP_ROWS:
        tile = 128 if head_dim == 64 else 96
    else:  # `tile_size_fwd_sm90` for one byte, causal, two-level accumulation
        sizes = {64: 128, 96: 128, 128: 192, 192: 96, 256: 128}
        tile = sizes[min(size for size in sizes if head_dim <= size)]
    order = KernelOrder(tile, _round_weights, last_first=True)
    if adds is None:
        query = _round_query(query, options.q_scale, key.shape[1])
        return _attend(query, key, value, visible, options, order)
    q_scale = _query_scale(query, options.q_scale, key.shape[1])
    k_scale, v_scale = (x.to(query.device).view(-1, 1, 1) for x in (adds.k_scale, adds.v_scale))
    query, key, value = (
        quantize(x, scale).float() for x, scale in ((query, q_scale), (key, k_scale), (value, v_scale))
    )
    k_scale, v_scale = (s.repeat_interleave(num_heads // len(s), 0) for s in (k_scale, v_scale))
    order = order._replace(adds=adds, factor=q_scale * k_scale)
    return _attend(query, key, value, visible, options, order) * v_scale


def vllm_triton_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, options: AttentionOptions, *,
    dtype: torch.dtype | None = torch.bfloat16, fp8: torch.dtype = torch.float8_e4m3fn,
) -> Tensor:  # fmt: skip
    """Attend as vLLM's Triton kernel does to an FP8 cache, query [B, H, T, D], key and value [B, K, N, D].

    `visible` broadcasts to [B, H, T, N]. `dtype` is the queries' 16-bit type, to which K and V times their
    scale, and weights, are rounded. None: queries are codes of `fp8`, K and V are multiplied as codes, and
    weights are codes of 256 times the weight, in E4M3FNUZ of 128 times.
    """
    round_weights: Callable[[Tensor], Tensor]
    if dtype is None:
        query = _round_query(query, options.q_scale, key.shape[1], fp8)
        round_weights, decode_tile = partial(_round_weights, dtype=fp8), 32
    else:
        query, key, value = (x.to(dtype).float() for x in (query, key, value))
        round_weights, decode_tile = (lambda weights: weights.to(dtype).float()), 16
    tile, parts = (decode_tile, _SEGMENTS) if query.shape[2] == 1 else (32, 1)
    order = KernelOrder(tile, round_weights, parts, starts_at_sinks=True)
    return _attend(query, key, value, visible, options, order)


def _round_query(
    query: Tensor, scale: Tensor | None, num_kv_heads: int, dtype: torch.dtype = torch.float8_e4m3fn
) -> Tensor:
    scale = _query_scale(query, scale, num_kv_heads)
    if dtype == torch.float8_e4m3fnuz:
        query = query.clamp(-_FNUZ_QUERIES_MAX * scale, _FNUZ_QUERIES_MAX * scale)
    return dequantize(quantize(query, scale, dtype), scale)


def _query_scale(query: Tensor, scale: Tensor | None, num_kv_heads: int) -> Tensor:
    """Return `scale` [1], or [H, 1, 1] of the largest among heads that share a KV head."""
    scale = torch.ones(1) if scale is None else scale.float()
    if scale.numel() > 1:
        group = query.shape[1] // num_kv_heads
        scale = scale.view(num_kv_heads, group).amax(1).repeat_interleave(group).view(-1, 1, 1)
    return scale.to(query.device)


def _round_weights(weights: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    one = torch.ones(1, device=weights.device)
    factor = 128 if dtype == torch.float8_e4m3fnuz else 256
    return dequantize(quantize(weights * factor, one, dtype), one) / factor


def _attend(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, options: AttentionOptions, order: KernelOrder
) -> Tensor:
    """Attend in a kernel's `order`; arguments and result have the shapes of `fa3_attention`."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    sinks = None if options.sinks is None else options.sinks.float().view(-1, 1, 1)
    outputs = []
    for start in range(0, query.shape[2], _ROWS):
        rows = slice(start, start + _ROWS)
        multiply = torch.matmul if order.adds is None else hopper_product
        scores = multiply(query[:, :, rows], key.mT) * (options.scale(query.shape[3]) * order.factor)
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        scores = scores.masked_fill(~visible[:, :, rows], -torch.inf)
        largest = _running_maximum(scores, order, sinks)
        final = _replace_infinity(largest.amax(-1, keepdim=True))
        weights, rescale = (scores - _replace_infinity(largest)).exp(), (largest - final).exp()
        total = (weights * rescale).sum(-1, keepdim=True)  # of unrounded weights
        if sinks is not None:
            total = total + (sinks - final).exp()
        weights = order.round_weights(weights)
        if order.adds is not None:
            output = _add_tiles(weights, value, largest, order.tile, order.adds.every)
        else:
            output = weights * rescale @ value
        outputs.append(output / total.where(total > 0, 1.0))
    return torch.cat(outputs, 2)


def _add_tiles(weights: Tensor, value: Tensor, largest: Tensor, tile_size: int, every: int | None) -> Tensor:
    """Return weights [B, H, T, N] @ value [B, H, N, D] as Hopper's tensor cores add it, last tile first."""
    before = torch.full_like(largest[..., :1], -torch.inf)
    output = sums = value.new_zeros(*weights.shape[:-1], value.shape[-1])
    count = 0
    for start in reversed(range(0, weights.shape[-1], tile_size)):
        tile = slice(start, start + tile_size)
        if not weights[..., tile].any():  # hidden: the kernel does not visit it
            continue
        now, count = largest[..., start : start + 1], count + 1
        rescale = (before - now).exp().nan_to_num(0.0)  # both -inf: nothing is visible so far
        output, sums, before = output * rescale, sums * rescale, now
        sums = hopper_product(weights[..., tile] * 256, value[..., tile, :], sums)
        if every is not None and count % every == 0:
            output, sums = output + sums, torch.zeros_like(sums)
    return (output + sums) / 256


def _running_maximum(scores: Tensor, order: KernelOrder, sinks: Tensor | None) -> Tensor:
    """Return for each score the largest of its tile and those before it, [B, H, T, N].

    It is -inf where all of them are hidden.
    """
    length = scores.shape[-1]
    missing = -length % (order.parts * order.tile)
    padded = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    maxima = padded.view(*scores.shape[:-1], order.parts, -1, order.tile).amax(-1)
    if order.starts_at_sinks and sinks is not None:
        first = maxima[..., 0, :].maximum(sinks)
        maxima = torch.cat([first[..., None, :], maxima[..., 1:, :]], -2)
    maxima = maxima.flip(-1).cummax(-1).values.flip(-1) if order.last_first else maxima.cummax(-1).values
    return maxima.flatten(-2).repeat_interleave(order.tile, -1)[..., :length]


def _replace_infinity(largest: Tensor) -> Tensor:
    return largest.where(largest > -torch.inf, 0.0)


def hopper_product(a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """Return start + a @ b, float32 [..., rows, columns], as an H100 adds products of FP8 codes.

    `a` [..., rows, n] and `b` [..., n, columns] are float32 values of E4M3 codes without their scale; n is
    walked in order. One WGMMA instruction adds 32 products to an accumulator: significands, the accumulator's
    too, are shifted to the largest exponent among them and cut off, towards zero, after 13 fraction bits, and
    so is their exact sum.

    By the model of microsoft/MMA-Sim (arXiv 2511.10909), which its authors compared bit by bit with an H100;
    DeepSeek-V3's report (arXiv 2412.19437, 3.3.2 and 3.5.2) describes the same. Nothing here ran beside one.
    """
    total = a.new_zeros(*a.shape[:-1], b.shape[-1]) if start is None else start
    rows = max(1, _PRODUCTS // (_STEP * b[..., 0, :].numel()))
    parts = zip(torch.split(a, rows, -2), torch.split(total, rows, -2), strict=True)
    return torch.cat([_add_rows(part, b, begin) for part, begin in parts], -2)


def _add_rows(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    for k in range(0, a.shape[-1], _STEP):
        # [..., rows, 32, 1] and [..., 1, 32, columns]
        x, y = a[..., k : k + _STEP, None], b[..., None, k : k + _STEP, :]
        largest = (_code_power(x) * _code_power(y)).amax(-2)
        step = largest.maximum(_power(total)).mul_(_FRACTION).clamp_(min=2.0**-100)
        products = (x * y).div_(step[..., None, :]).trunc_().sum(-2)
        sums = products.add_((total / step).trunc_()).mul_(step)
        total = (sums.view(torch.int32) & _KEPT_BITS).view(torch.float32)
    return total


def _power(x: Tensor) -> Tensor:
    """Return the largest power of two up to |x|; 0 for 0."""
    return (x.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def _code_power(codes: Tensor) -> Tensor:
    return _power(codes.contiguous()).clamp(min=_SUBNORMAL).where(codes != 0, 0.0)
