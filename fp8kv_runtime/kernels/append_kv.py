"""Quantise K and V and scatter them by slot mapping, in one pass: kernel and launcher."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8kv_runtime.kernels.codec import encode, half_smallest, largest
from fp8kv_runtime.kernels.launch import Launcher, block_constants, current_target, is_elsewhere
from fp8kv_runtime.kernels.targets import Target
from fp8kv_runtime.kernels.tuning import Config, append_config
from fp8kv_runtime.storage import BlocksLayout, KVBlocks, check_tensor


def append_kv(key: Tensor, value: Tensor, blocks: KVBlocks, slot_mapping: Tensor) -> None:
    """Quantise `key` and `value` [T, K, D] and write them to `slot_mapping` [T] int64; -1: skip.

    See `reference.append_kv`.

    Raises:
        ValueError: shapes, types or devices do not fit together.
    """
    if is_elsewhere(key):
        with torch.cuda.device(key.device):
            return append_kv(key, value, blocks, slot_mapping)
    num_tokens, layout, device = slot_mapping.numel(), blocks.layout, blocks.codes.device
    shape = (num_tokens, layout.num_kv_heads, layout.head_dim)
    fit = key.shape == value.shape == shape and key.dtype == value.dtype
    same_device = key.device == value.device == slot_mapping.device == device
    if not (fit and same_device and slot_mapping.dtype == torch.int64):
        check_tensor("slot_mapping", slot_mapping, (slot_mapping.shape,), torch.int64, device)
        check_tensor("key", key, (shape,), key.dtype, device)
        check_tensor("value", value, (shape,), key.dtype, device)
    if num_tokens == 0:
        return
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    target = current_target()
    config, launcher = append_launcher(layout, target)
    grid = (triton.cdiv(num_tokens, config.tile), layout.num_kv_heads, 2)
    strides = (key.stride(0), key.stride(1), value.stride(0), value.stride(1))
    slot_mapping = slot_mapping.contiguous()
    arguments = (
        key, value, *blocks.stored, blocks.k_scale, blocks.v_scale, blocks.k_center, blocks.counts,
        slot_mapping, num_tokens, *strides,
    )  # fmt: skip
    launcher(target, grid, blocks, (key, value, slot_mapping, *strides), arguments)


@functools.cache
def append_launcher(blocks: BlocksLayout, target: Target) -> tuple[Config, Launcher]:
    """Return the kernel for a layer, and its config."""
    config = append_config(target, blocks.head_dim)
    layer = block_constants(
        blocks,
        target,
        has_center=blocks.has_center,
        counts=blocks.counts,
        # the interpreter multiplies and adds with two roundings
        fused=target.backend != "interpreter",
    )
    constants = {"LAYER": layer, "TILE": config.tile}
    return config, Launcher(append_kv_kernel, constants, num_warps=config.num_warps)


@triton.jit(do_not_specialize=("num_tokens",))
def append_kv_kernel(
    key_ptr: tl.tensor, value_ptr: tl.tensor, key_blocks_ptr: tl.tensor, value_blocks_ptr: tl.tensor,
    k_scale_ptr: tl.tensor, v_scale_ptr: tl.tensor, k_center_ptr: tl.tensor, counts_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor, num_tokens: tl.tensor, stride_key_token: tl.tensor,
    stride_key_head: tl.tensor, stride_value_token: tl.tensor, stride_value_head: tl.tensor,
    LAYER: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Store K (third program id 0) or V (1) of TILE tokens of one head: one program."""
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1).to(tl.int64)  # its stride may have 31 bits
    channels = tl.arange(0, LAYER.width)
    slots = tl.load(slot_mapping_ptr + tokens, mask=tokens < num_tokens, other=-1)
    inside = (slots >= 0)[:, None] & (channels < LAYER.head_dim)[None, :]

    block_ids = slots // LAYER.block_size
    rows = (block_ids * LAYER.num_kv_heads + head) * LAYER.block_size + slots % LAYER.block_size
    offsets = rows.to(tl.int64)[:, None] * LAYER.head_dim + channels[None, :]
    token_offsets = tokens.to(tl.int64)[:, None]
    if tl.program_id(2) == 0:
        new = token_offsets * stride_key_token + head * stride_key_head + channels[None, :]
        x = tl.load(key_ptr + new, mask=inside, other=0.0).to(tl.float32)
        if LAYER.has_center:
            center_ptr = k_center_ptr + head * LAYER.head_dim
            center = tl.load(center_ptr + channels, mask=channels < LAYER.head_dim, other=0.0)
            x = tl.where(inside, x - center[None, :], 0.0)
        scaled = divide(x, k_scale_ptr, head, channels, LAYER.k_scales, LAYER.head_dim, LAYER.fused)
        codes = encode(scaled, LAYER.format, LAYER.encodes)
        tl.store(key_blocks_ptr + offsets, codes, mask=inside)
        if LAYER.counts:
            count(counts_ptr + head * 3, x, scaled, LAYER.format)
    else:
        new = token_offsets * stride_value_token + head * stride_value_head + channels[None, :]
        x = tl.load(value_ptr + new, mask=inside, other=0.0).to(tl.float32)
        scaled = divide(x, v_scale_ptr, head, channels, LAYER.v_scales, LAYER.head_dim, LAYER.fused)
        codes = encode(scaled, LAYER.format, LAYER.encodes)
        tl.store(value_blocks_ptr + offsets, codes, mask=inside)
        if LAYER.counts:
            count(counts_ptr + (LAYER.num_kv_heads + head) * 3, x, scaled, LAYER.format)


@triton.jit
def load_scale(
    scale_ptr: tl.tensor, head: tl.tensor, channels: tl.tensor, SCALES: tl.constexpr, HEAD_DIM: tl.constexpr
) -> tl.tensor:
    """Load a head's scales of `channels` [width] or [block_d]: float32, of the same shape."""
    if SCALES == 2:
        return tl.load(scale_ptr + head * HEAD_DIM + channels, mask=channels < HEAD_DIM, other=1.0)
    scale = tl.load(scale_ptr + head * SCALES)
    return tl.full(channels.shape, 1.0, tl.float32) * scale


@triton.jit
def divide(
    x: tl.tensor, scale_ptr: tl.tensor, head: tl.tensor, channels: tl.tensor, SCALES: tl.constexpr,
    HEAD_DIM: tl.constexpr, FUSED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Divide `x` [TILE, width] by its scale, rounded to the nearest: `/` approximates."""
    if FUSED and SCALES < 2:
        return divide_by_one(x, tl.load(scale_ptr + head * SCALES))
    else:
        scale = load_scale(scale_ptr, head, channels, SCALES, HEAD_DIM)
        return tl.div_rn(x, tl.broadcast_to(scale[None, :], x.shape))


@triton.jit
def divide_by_one(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Divide `x` [TILE, width] by one scale, without a division for each value; needs fused multiply-add.

    A product with the reciprocal and two corrections by what is left over (Markstein 1990): equal
    to `div_rn` where the result is below 2 ** 17 and the scale within 2 ** +-60. What is larger
    comes out as 2 ** 17, which no FP8 format holds: infinities would become NaN.
    """
    most = 131072.0 * scale
    x = tl.maximum(x, -most, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, most, propagate_nan=tl.PropagateNan.ALL)
    divisor = tl.full(x.shape, 1.0, tl.float32) * scale
    reciprocal = tl.full(x.shape, 1.0, tl.float32) * tl.div_rn(1.0, scale)
    quotient = x * reciprocal
    # times -1, for Triton negates by 0 - x: the order of signs keeps -0.0
    quotient = tl.fma(-1.0 * tl.fma(quotient, divisor, -1.0 * x), reciprocal, quotient)
    return tl.fma(-1.0 * tl.fma(quotient, divisor, -1.0 * x), reciprocal, quotient)


@triton.jit
def count(counts_ptr: tl.tensor, x: tl.tensor, scaled: tl.tensor, FORMAT: tl.constexpr) -> None:
    """Add to the head's three counters; what lies outside the tile [TILE, width] is 0 and counts nowhere."""
    beyond = ~(tl.abs(scaled) <= largest(FORMAT))  # what is not finite as well
    lost = (tl.abs(scaled) <= half_smallest(FORMAT)) & (x != 0)
    # two counts in one sum: a tile has 2,048 values
    both = tl.sum(tl.where(beyond, 1, 0) + tl.where(lost, 65536, 0))
    if both > 0:
        not_finite = tl.sum((~(tl.abs(x) < float("inf"))).to(tl.int32))
        tl.atomic_add(counts_ptr, ((both & 0xFFFF) - not_finite).to(tl.int64))
        tl.atomic_add(counts_ptr + 1, (both >> 16).to(tl.int64))
        tl.atomic_add(counts_ptr + 2, not_finite.to(tl.int64))
