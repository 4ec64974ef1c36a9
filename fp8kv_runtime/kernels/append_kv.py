"""Quantise K and V and scatter them by slot mapping, in one pass: kernel and launcher."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8kv_runtime.kernels.codec import encode, largest
from fp8kv_runtime.kernels.launch import scale_dims
from fp8kv_runtime.kernels.targets import Target, current_target
from fp8kv_runtime.kernels.tuning import append_config
from fp8kv_runtime.storage import KVBlocks


def append_kv(key: Tensor, value: Tensor, blocks: KVBlocks, slot_mapping: Tensor) -> None:
    """Quantise `key` and `value` [T, K, D] and write them to their slots [T] int64; -1: skip.

    See `reference.append_kv`.

    Raises:
        ValueError: shapes or types do not fit together.
    """
    num_tokens = slot_mapping.numel()
    shape = (num_tokens, blocks.num_kv_heads, blocks.head_dim)
    if key.shape != shape or value.shape != shape or key.dtype != value.dtype:
        raise ValueError(
            f"key and value must be {list(shape)}, got {list(key.shape)} and {list(value.shape)}"
        )
    if num_tokens == 0:
        return
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    slot_mapping = slot_mapping.contiguous()
    target = current_target()
    config = append_config(target, blocks.head_dim)
    grid = (triton.cdiv(num_tokens, config.tile), blocks.num_kv_heads, 2)
    append_kv_kernel[grid](
        key, value, blocks.key.view(torch.uint8), blocks.value.view(torch.uint8), blocks.k_scale,
        blocks.v_scale, blocks.k_center, blocks.counts, slot_mapping, num_tokens, key.stride(0),
        key.stride(1), value.stride(0), value.stride(1), TILE=config.tile,
        **append_constants(blocks, target), num_warps=config.num_warps,
    )  # fmt: skip


def append_constants(blocks: KVBlocks, target: Target) -> dict[str, Any]:
    """Compile-time constants that the layer fixes."""
    return {
        "NUM_KV_HEADS": blocks.num_kv_heads,
        "HEAD_DIM": blocks.head_dim,
        "BLOCK_D": triton.next_power_of_2(blocks.head_dim),
        "BLOCK_SIZE": blocks.block_size,
        "K_SCALES": scale_dims(blocks.k_scale),
        "V_SCALES": scale_dims(blocks.v_scale),
        "HAS_CENTER": blocks.k_center is not None,
        "COUNT": blocks.counts is not None,
        "FORMAT": blocks.format,
        "HARDWARE": target.encodes(blocks.format),
    }


@triton.jit
def append_kv_kernel(
    key_ptr,
    value_ptr,
    key_blocks_ptr,
    value_blocks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_center_ptr,
    counts_ptr,
    slot_mapping_ptr,
    num_tokens,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    K_SCALES: tl.constexpr,  # 0: one per tensor, 1: per head, 2: per channel
    V_SCALES: tl.constexpr,
    HAS_CENTER: tl.constexpr,
    COUNT: tl.constexpr,
    FORMAT: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """One program stores K (third program id 0) or V (1) of TILE tokens of one head."""
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    channels = tl.arange(0, BLOCK_D)
    slots = tl.load(slot_mapping_ptr + tokens, mask=tokens < num_tokens, other=-1)
    inside = (slots >= 0)[:, None] & (channels < HEAD_DIM)[None, :]

    block_ids = slots // BLOCK_SIZE
    rows = (block_ids * NUM_KV_HEADS + head) * BLOCK_SIZE + slots % BLOCK_SIZE
    offsets = rows.to(tl.int64)[:, None] * HEAD_DIM + channels[None, :]
    token_offsets = tokens.to(tl.int64)[:, None]
    if tl.program_id(2) == 0:
        new = token_offsets * stride_key_token + head * stride_key_head + channels[None, :]
        x = tl.load(key_ptr + new, mask=inside, other=0.0).to(tl.float32)
        if HAS_CENTER:
            center = tl.load(
                k_center_ptr + head * HEAD_DIM + channels, mask=channels < HEAD_DIM, other=0.0
            )
            x = tl.where(inside, x - center[None, :], 0.0)
        scale = load_scale(k_scale_ptr, head, channels, K_SCALES, HEAD_DIM)
        scaled = tl.div_rn(x, tl.broadcast_to(scale[None, :], x.shape))  # `/` approximates
        codes = encode(scaled, FORMAT, HARDWARE)
        tl.store(key_blocks_ptr + offsets, codes, mask=inside)
        if COUNT:
            count(counts_ptr + head * 3, x, scaled, codes, FORMAT)
    else:
        new = token_offsets * stride_value_token + head * stride_value_head + channels[None, :]
        x = tl.load(value_ptr + new, mask=inside, other=0.0).to(tl.float32)
        scale = load_scale(v_scale_ptr, head, channels, V_SCALES, HEAD_DIM)
        scaled = tl.div_rn(x, tl.broadcast_to(scale[None, :], x.shape))
        codes = encode(scaled, FORMAT, HARDWARE)
        tl.store(value_blocks_ptr + offsets, codes, mask=inside)
        if COUNT:
            count(counts_ptr + (NUM_KV_HEADS + head) * 3, x, scaled, codes, FORMAT)


@triton.jit
def load_scale(scale_ptr, head, channels, SCALES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The scale of each channel of a head: [BLOCK_D]."""
    if SCALES == 2:
        return tl.load(scale_ptr + head * HEAD_DIM + channels, mask=channels < HEAD_DIM, other=1.0)
    scale = tl.load(scale_ptr + head * SCALES)
    return tl.full(channels.shape, 1.0, tl.float32) * scale


@triton.jit
def count(counts_ptr, x, scaled, codes, FORMAT: tl.constexpr):
    """Add to the head's three counters; what lies outside the tile is 0 and counts nowhere."""
    finite = tl.abs(x) < float("inf")
    saturated = finite & (tl.abs(scaled) > largest(FORMAT))
    underflowed = (tl.abs(x) > 0) & ((codes & 0x7F) == 0)
    tl.atomic_add(counts_ptr, tl.sum(saturated.to(tl.int64)))
    tl.atomic_add(counts_ptr + 1, tl.sum(underflowed.to(tl.int64)))
    tl.atomic_add(counts_ptr + 2, tl.sum((~finite).to(tl.int64)))
