"""Decode and extend attention: one or several query tokens per sequence, KV split into parts, then a reduce.

Where each sequence is one part, the first kernel writes the output and nothing is to be joined.

On NVIDIA since Hopper the reduce starts while decode still runs: programmatic dependent launch
(PTX ISA, `griddepcontrol`). Elsewhere neither waits nor starts early.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.kernels.append_kv import load_scale
from fp8kv_runtime.kernels.attend import attend, prepare_query, query_rows, start_softmax
from fp8kv_runtime.kernels.codec import decode_unit
from fp8kv_runtime.kernels.dense import attend_densely, find_prompts
from fp8kv_runtime.kernels.launch import (
    AttentionLayer,
    Launcher,
    attention_constants,
    current_target,
    is_elsewhere,
)
from fp8kv_runtime.kernels.split import find_part, plan_parts
from fp8kv_runtime.kernels.targets import Target
from fp8kv_runtime.kernels.tuning import Config, attention_config, plan_decode, plan_extend, reduce_config
from fp8kv_runtime.options import AttentionOptions, check_attention
from fp8kv_runtime.storage import KVBlocks, check_tensor


def decode_attention(
    query: Tensor,
    blocks: KVBlocks,
    sequences: PagedSequences,
    options: AttentionOptions = AttentionOptions(),  # noqa: B008  frozen
    *,
    num_splits: int | None = None,
) -> Tensor:
    """Attend from the last token of each sequence, `query` [S, H, D], to all of it; return [S, H, D].

    See `reference.decode_attention`. `num_splits`, of a head's KV in all sequences together (see
    `split.py`), is chosen to fill the GPU where it is None.

    Raises:
        ValueError: shapes, types, devices or options do not fit together.
    """
    if is_elsewhere(query):
        with torch.cuda.device(query.device):
            return decode_attention(query, blocks, sequences, options, num_splits=num_splits)
    check_attention(query, blocks, sequences, options)
    num_seqs = len(sequences.seq_lens)
    if query.shape[0] != num_seqs:
        raise ValueError(f"query must have a row per sequence, {num_seqs}, got {query.shape[0]}")
    query, out, longest = _prepare(query, blocks, sequences)
    if num_seqs:
        config, splits = plan_decode(current_target(), query, blocks, longest, num_splits)
        attend_in_parts(query, blocks, sequences, options, config, splits, out)
    return out


def extend_attention(
    query: Tensor,
    blocks: KVBlocks,
    sequences: PagedSequences,
    cu_seqlens: Tensor,
    max_query_len: int,
    options: AttentionOptions = AttentionOptions(),  # noqa: B008  frozen
    *,
    num_splits: int | None = None,
) -> Tensor:
    """Attend from the last tokens of each sequence, `query` [T, H, D], to all before them; return [T, H, D].

    `cu_seqlens` is [S + 1] int32; see `reference.extend_attention`. Prompts go to torch's own attention (see
    `dense.py`) where it is faster. Where new tokens are too few to fill the GPU, KV is split as for decode.
    `num_splits` takes our kernels: 1 leaves KV whole, more is as many parts.

    Raises:
        ValueError: shapes, types, devices or options do not fit together.
    """
    if is_elsewhere(query):
        with torch.cuda.device(query.device):
            return extend_attention(
                query, blocks, sequences, cu_seqlens, max_query_len, options, num_splits=num_splits
            )
    check_attention(query, blocks, sequences, options)
    num_seqs = len(sequences.seq_lens)
    check_tensor("cu_seqlens", cu_seqlens, ((num_seqs + 1,),), torch.int32, query.device)
    query, out, longest = _prepare(query, blocks, sequences)
    if query.shape[0] == 0:
        return out
    cu_seqlens, target = cu_seqlens.contiguous(), current_target()
    batch = (query, blocks, sequences)
    if num_splits is None:
        least_pairs = attention_config("extend", target, query, blocks).pairs
        prompts = find_prompts(*batch, cu_seqlens, max_query_len, options, least_pairs)
        if prompts:
            attend_densely(*batch, options, prompts, out)
            return out
    out.zero_()  # rows of no sequence
    rows = max_query_len * (query.shape[1] // blocks.layout.num_kv_heads)
    config, splits = plan_extend(target, query, blocks, num_seqs, rows, longest, num_splits)
    attend_in_parts(*batch, options, config, splits, out, cu_seqlens, max_query_len)
    return out


def _prepare(query: Tensor, blocks: KVBlocks, sequences: PagedSequences) -> tuple[Tensor, Tensor, int]:
    """Return the query with adjacent channels, memory for the output, and the most tokens of a sequence."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    longest = sequences.block_tables.shape[1] * blocks.layout.block_size  # lengths are on the device
    return query if query.stride(2) == 1 else query.contiguous(), out, longest


def attend_in_parts(
    query: Tensor, blocks: KVBlocks, sequences: PagedSequences, options: AttentionOptions, config: Config,
    splits: int, out: Tensor, cu_seqlens: Tensor | None = None, max_query_len: int = 1,
) -> None:  # fmt: skip
    """Attend to each head's KV in about `splits` parts, then join them in `out` [T, H, D]; 0: as a whole.

    `query` [T, H, D] has one token per sequence, or those of `cu_seqlens` [S + 1] as for extend attention.
    """
    num_heads, head_dim = query.shape[1:]
    tables, lens, starts = sequences.block_tables, sequences.seq_lens, sequences.seq_starts
    num_seqs, num_kv_heads, device = len(lens), blocks.layout.num_kv_heads, query.device
    layer, target = AttentionLayer.of(query, blocks, sequences, options), current_target()
    decode, reduce = decode_launchers(
        layer, target, config, _bucket(num_seqs) if splits else 1, splits, cu_seqlens is not None
    )
    parts, partial, softmax = num_seqs, None, None
    if splits:
        parts += splits
        partial, softmax = (
            torch.empty((parts, max_query_len, num_heads, n), dtype=torch.float32, device=device)
            for n in (head_dim, 2)
        )
    row_tiles = triton.cdiv(max_query_len * (num_heads // num_kv_heads), config.rows)
    batch = (num_seqs, splits, config.least, max_query_len)
    strides, where = (query.stride(0), query.stride(1)), (lens, starts, cu_seqlens)
    decode(
        target, (num_kv_heads, parts, row_tiles), blocks,
        (query, options.q_scale, options.sinks, tables, *where, *strides),
        (query, *blocks.loaded, blocks.k_scale, blocks.v_scale, options.q_scale, blocks.k_center,
         options.sinks, tables, *where, partial, softmax, out, options.scale(head_dim),
         float(options.softcap or 0), *strides, tables.stride(0), *batch),
    )  # fmt: skip
    if splits:
        reduce(
            target, (num_heads, num_seqs, max_query_len), blocks, where,
            (partial, softmax, blocks.v_scale, out, *where, *batch),
        )  # fmt: skip


def _bucket(num_seqs: int) -> int:
    """Return how many sequences kernels are compiled for: few numbers, as batches grow while serving."""
    size = 1 if num_seqs == 1 else 32  # up to a warp's lanes, planning needs no barrier
    while size < num_seqs:
        size *= 4
    return size


@functools.lru_cache(maxsize=1024)
def decode_launchers(
    layer: AttentionLayer, target: Target, config: Config, block_s: int, splits: int, extends: bool
) -> tuple[Launcher, Launcher]:
    """Return decode and reduce for a layer and batches of up to `block_s` sequences, a power of two."""
    constants = {
        "LAYER": attention_constants(layer, target),
        "TILE": config.tile,
        "BLOCK_S": block_s,
        "EXTENDS": extends,
    }
    decode = Launcher(
        decode_kernel, constants | {"BLOCK_M": config.rows, "WHOLE": not splits},
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    joining = reduce_config(max(splits, 1), block_s)
    constants |= {"BLOCK_SPLITS": triton.next_power_of_2(max(splits, 1)), "PARTS": joining.tile}
    overlaps = {"launch_pdl": True} if target.overlaps else {}
    return decode, Launcher(reduce_kernel, constants, num_warps=joining.num_warps, **overlaps)


@triton.jit(do_not_specialize=("stride_block_tables", "num_seqs", "num_splits", "least", "max_query_len"))
def decode_kernel(
    query_ptr: tl.tensor, key_ptr: tl.tensor, value_ptr: tl.tensor, k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor, q_scale_ptr: tl.tensor, k_center_ptr: tl.tensor, sinks_ptr: tl.tensor,
    block_tables_ptr: tl.tensor, seq_lens_ptr: tl.tensor, seq_starts_ptr: tl.tensor,
    cu_seqlens_ptr: tl.tensor, partial_ptr: tl.tensor, softmax_ptr: tl.tensor, out_ptr: tl.tensor,
    softmax_scale: tl.tensor, softcap: tl.tensor, stride_query_token: tl.tensor, stride_query_head: tl.tensor,
    stride_block_tables: tl.tensor, num_seqs: tl.tensor, num_splits: tl.tensor, least: tl.tensor,
    max_query_len: tl.tensor, LAYER: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr, EXTENDS: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """Attend from all query heads of one KV head to one part of one sequence: one program.

    With EXTENDS, from BLOCK_M (token, query head) pairs. It leaves `partial` [parts, max_query_len,
    H, D], unnormalised, and `softmax` [parts, max_query_len, H, 2], both float32. With WHOLE the part is
    all of a sequence, and it writes `out` [T, H, D].
    """
    let_next_start(LAYER.overlaps and not WHOLE)
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    if WHOLE:
        seq, split = program, 0
    else:
        seqs, tiles, parts = plan_parts(
            seq_lens_ptr, seq_starts_ptr, cu_seqlens_ptr, num_seqs, num_splits, least, TILE,
            LAYER.window, LAYER.has_starts, EXTENDS, BLOCK_S,
        )  # fmt: skip
        seq, split, part_tiles = find_part(program, seqs, tiles, parts)
        if seq >= num_seqs:  # there are fewer parts than there could be
            return
    seq = seq.to(tl.int64)
    if EXTENDS:
        query_start, query_len, tokens, heads = query_rows(
            cu_seqlens_ptr, seq, tl.program_id(2), kv_head, LAYER, BLOCK_M
        )
        if tl.program_id(2) * BLOCK_M >= query_len * LAYER.group:
            return
        inside = tokens < tl.minimum(query_len, max_query_len)
        row = (query_start + tokens).to(tl.int64)
    else:
        rows = tl.arange(0, BLOCK_M)
        heads = kv_head * LAYER.group + rows
        inside = rows < LAYER.group
        query_len, tokens, row = 1, tl.zeros([BLOCK_M], tl.int32), seq
    q, q_low, factor, shift = prepare_query(
        query_ptr, row * stride_query_token, stride_query_head, heads, inside, kv_head,
        k_scale_ptr, q_scale_ptr, k_center_ptr, softmax_scale, LAYER,
    )  # fmt: skip

    seq_len = tl.load(seq_lens_ptr + seq)
    rows_at = seq_len - query_len + tokens
    first = 0
    if LAYER.has_starts:
        first = tl.load(seq_starts_ptr + seq)
    if LAYER.window > 0:
        first = tl.maximum(first, seq_len - query_len + 1 - LAYER.window)
    begin, end = first, seq_len
    if not WHOLE:
        origin = first // TILE * TILE
        part = part_tiles * TILE
        begin = tl.maximum(first, origin + split * part)
        end = tl.minimum(seq_len, origin + (split + 1) * part)
    if EXTENDS:  # what no row of the tile sees
        end = tl.minimum(end, tl.max(rows_at, 0) + 1)
        if LAYER.window > 0:
            begin = tl.maximum(begin, tl.min(rows_at, 0) - LAYER.window + 1)

    running_max, running_sum = start_softmax(sinks_ptr, heads, inside, split == 0, LAYER)
    acc, running_max, running_sum = attend(
        q, q_low, factor, shift, rows_at, running_max, running_sum, begin, end, key_ptr,
        value_ptr, block_tables_ptr + seq * stride_block_tables, kv_head, softcap, LAYER, TILE,
    )  # fmt: skip

    channels = tl.arange(0, LAYER.block_d)
    valid = inside[:, None] & (channels < LAYER.head_dim)[None, :]
    if WHOLE:
        scale = load_scale(v_scale_ptr, kv_head, channels, LAYER.v_scales, LAYER.head_dim)
        total = tl.where(running_sum == 0.0, 1.0, running_sum)
        out = acc / total[:, None] * (scale * decode_unit(LAYER.format, LAYER.hardware))[None, :]
        at = row * LAYER.num_heads + heads
        pointers = out_ptr + at[:, None] * LAYER.head_dim + channels[None, :]
        tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=valid)
    else:
        part_at = program.to(tl.int64)
        if EXTENDS:
            part_at = part_at * max_query_len + tokens
        at = part_at * LAYER.num_heads + heads
        tl.store(partial_ptr + at[:, None] * LAYER.head_dim + channels[None, :], acc, mask=valid)
        tl.store(softmax_ptr + at * 2, running_max, mask=inside)
        tl.store(softmax_ptr + at * 2 + 1, running_sum, mask=inside)


@triton.jit(do_not_specialize=("num_seqs", "num_splits", "least", "max_query_len"))
def reduce_kernel(
    partial_ptr: tl.tensor, softmax_ptr: tl.tensor, v_scale_ptr: tl.tensor, out_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor, seq_starts_ptr: tl.tensor, cu_seqlens_ptr: tl.tensor, num_seqs: tl.tensor,
    num_splits: tl.tensor, least: tl.tensor, max_query_len: tl.tensor, LAYER: tl.constexpr,
    TILE: tl.constexpr, BLOCK_S: tl.constexpr, EXTENDS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:  # fmt: skip
    """Join the parts of one token and head, PARTS at a time, and apply V's scale: one program."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    row, rows, token = seq.to(tl.int64), 1, 0
    if EXTENDS:
        token, rows = tl.program_id(2), max_query_len
        row = tl.load(cu_seqlens_ptr + seq).to(tl.int64) + token
        if row >= tl.load(cu_seqlens_ptr + seq + 1):
            return
    seqs, _, parts = plan_parts(
        seq_lens_ptr, seq_starts_ptr, cu_seqlens_ptr, num_seqs, num_splits, least, TILE,
        LAYER.window, LAYER.has_starts, EXTENDS, BLOCK_S,
    )  # fmt: skip
    num_parts = tl.sum(tl.where(seqs == seq, parts, 0))
    at = tl.sum(tl.where(seqs < seq, parts, 0)).to(tl.int64)
    at = (at * rows + token) * LAYER.num_heads + head
    stride = rows * LAYER.num_heads  # from part to part
    channels = tl.arange(0, LAYER.width)
    in_head = channels < LAYER.head_dim
    scale = load_scale(v_scale_ptr, head // LAYER.group, channels, LAYER.v_scales, LAYER.head_dim)
    wait_for_previous(LAYER.overlaps)
    all_splits = tl.arange(0, BLOCK_SPLITS)
    in_split = all_splits < num_parts
    softmax_at = softmax_ptr + (at + all_splits * stride) * 2
    maxima = tl.load(softmax_at, mask=in_split, other=float("-inf"))
    sums = tl.load(softmax_at + 1, mask=in_split, other=0.0)
    overall = tl.max(maxima, 0)
    overall = tl.where(overall == float("-inf"), 0.0, overall)  # nothing to attend to
    total = tl.sum(sums * tl.exp2(maxima - overall), 0)

    joined = tl.zeros([LAYER.width], tl.float32)
    for first in range(0, num_parts, PARTS):
        some = first + tl.arange(0, PARTS)
        inside = some < num_parts
        some_at = at + some * stride
        some_maxima = tl.load(softmax_ptr + some_at * 2, mask=inside, other=float("-inf"))
        partial = tl.load(
            partial_ptr + some_at[:, None] * LAYER.head_dim + channels[None, :],
            mask=inside[:, None] & in_head[None, :],
            other=0.0,
        )
        joined += tl.sum(partial * tl.exp2(some_maxima - overall)[:, None], 0)
    out = joined / tl.where(total == 0.0, 1.0, total) * (scale * decode_unit(LAYER.format, LAYER.hardware))
    out_at = (row * LAYER.num_heads + head) * LAYER.head_dim
    tl.store(out_ptr + out_at + channels, out.to(out_ptr.dtype.element_ty), mask=in_head)


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr) -> None:
    """Let the next kernel start from here on, as far as there is room."""
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr) -> None:
    """Wait until the previous kernel has ended and its writes are visible.

    Before it only memory may be read that decode does not write: lengths, ends, V's scale. What
    ran before decode has ended by then, as decode itself is launched without `launch_pdl`; with
    it, not even these could be read here.
    """
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
