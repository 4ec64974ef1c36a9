"""Attention of a sequence's new tokens to its whole KV: one program for each tile of query rows."""

import functools

import triton
import triton.language as tl
from torch import Tensor

from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.kernels.append_kv import load_scale
from fp8kv_runtime.kernels.attend import attend, prepare_query, query_rows, start_softmax
from fp8kv_runtime.kernels.codec import decode_unit
from fp8kv_runtime.kernels.launch import AttentionLayer, Launcher, attention_constants
from fp8kv_runtime.kernels.table import Config
from fp8kv_runtime.kernels.targets import Target, current_target
from fp8kv_runtime.options import AttentionOptions
from fp8kv_runtime.storage import KVBlocks


def attend_whole(
    query: Tensor, blocks: KVBlocks, sequences: PagedSequences, options: AttentionOptions,
    config: Config, out: Tensor, cu_seqlens: Tensor | None = None, max_query_len: int = 1,
) -> None:  # fmt: skip
    """Attend to each head's KV as a whole, in one launch, and write `out` [T, H, D].

    `query` [T, H, D] has one token per sequence, or those of `cu_seqlens` as for extend attention.
    """
    tables, lens, starts = sequences.block_tables, sequences.seq_lens, sequences.seq_starts
    target, num_kv_heads = current_target(), blocks.layout.num_kv_heads
    rows = max_query_len * (query.shape[1] // num_kv_heads)
    grid = (triton.cdiv(rows, config.rows), num_kv_heads, len(lens))
    layer = AttentionLayer.of(query, blocks, sequences, options)
    launcher = whole_launcher(layer, target, config, cu_seqlens is not None)
    strides = (query.stride(0), query.stride(1))
    launcher(
        target, grid, blocks,
        (query, options.q_scale, options.sinks, tables, lens, starts, cu_seqlens, *strides),
        (query, *blocks.loaded, blocks.k_scale, blocks.v_scale, options.q_scale, blocks.k_center,
         options.sinks, tables, lens, starts, cu_seqlens, out, options.scale(query.shape[2]),
         float(options.softcap or 0), *strides, tables.stride(0)),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def whole_launcher(layer: AttentionLayer, target: Target, config: Config, extends: bool) -> Launcher:
    """Return the kernel for a layer; where it does not extend, each sequence has one query."""
    constants = {"LAYER": attention_constants(layer, target), "TILE": config.tile, "BLOCK_M": config.rows}
    constants["EXTENDS"] = extends
    return Launcher(extend_kernel, constants, num_warps=config.num_warps, num_stages=config.num_stages)


@triton.jit(do_not_specialize=("stride_block_tables",))
def extend_kernel(
    query_ptr, key_ptr, value_ptr, k_scale_ptr, v_scale_ptr, q_scale_ptr, k_center_ptr, sinks_ptr,
    block_tables_ptr, seq_lens_ptr, seq_starts_ptr, cu_seqlens_ptr, out_ptr, softmax_scale, softcap,
    stride_query_token, stride_query_head, stride_block_tables, LAYER: tl.constexpr,
    TILE: tl.constexpr, BLOCK_M: tl.constexpr, EXTENDS: tl.constexpr,
):  # fmt: skip
    """Attend from BLOCK_M (token, query head) pairs of a KV head and a sequence: one program.

    It writes `out` [T, H, D].
    """
    kv_head = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    query_start, query_len, tokens, heads = query_rows(
        cu_seqlens_ptr, seq, tl.program_id(0), kv_head, LAYER, BLOCK_M, EXTENDS
    )
    inside = tokens < query_len
    if tl.program_id(0) * BLOCK_M >= query_len * LAYER.group:
        return
    at = (query_start + tokens).to(tl.int64)
    q, q_low, factor, shift = prepare_query(
        query_ptr, at * stride_query_token, stride_query_head, heads, inside, kv_head,
        k_scale_ptr, q_scale_ptr, k_center_ptr, softmax_scale, LAYER,
    )  # fmt: skip

    seq_len = tl.load(seq_lens_ptr + seq)
    rows_at = seq_len - query_len + tokens
    first = 0
    if LAYER.has_starts:
        first = tl.load(seq_starts_ptr + seq)
    if LAYER.window > 0:
        first = tl.maximum(first, tl.min(rows_at, 0) - LAYER.window + 1)
    end = tl.minimum(seq_len, tl.max(rows_at, 0) + 1)

    running_max, running_sum = start_softmax(sinks_ptr, heads, inside, True, LAYER)
    acc, running_max, running_sum = attend(
        q, q_low, factor, shift, rows_at, running_max, running_sum, first, end, key_ptr,
        value_ptr, block_tables_ptr + seq * stride_block_tables, kv_head, softcap, LAYER, TILE,
    )  # fmt: skip

    channels = tl.arange(0, LAYER.block_d)
    scale = load_scale(v_scale_ptr, kv_head, channels, LAYER.v_scales, LAYER.head_dim)
    total = tl.where(running_sum == 0.0, 1.0, running_sum)
    out = acc / total[:, None] * (scale * decode_unit(LAYER.format, LAYER.hardware))[None, :]
    out_at = (at * LAYER.num_kv_heads * LAYER.group + heads) * LAYER.head_dim
    valid = inside[:, None] & (channels < LAYER.head_dim)[None, :]
    pointers = out_ptr + out_at[:, None] + channels[None, :]
    tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=valid)
