"""The kernels' work in plain fp32 torch, one function per launcher with its name and signature."""

import torch
from torch import Tensor

from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.fp8 import dequantize, fp8_max, quantize
from fp8kv_runtime.options import AttentionOptions, check_attention
from fp8kv_runtime.storage import KVBlocks, per_channel


def append_kv(key: Tensor, value: Tensor, blocks: KVBlocks, slot_mapping: Tensor) -> None:
    """Quantise `key` and `value` [T, K, D] and write them to `slot_mapping` [T] int64; -1: skip.

    Where `blocks.counts` is there, it counts magnitudes beyond the format's largest value
    (saturated), values other than 0 that become 0 (underflowed), and NaN and Inf (nonfinite).
    """
    if (slot_mapping < 0).any():
        written = slot_mapping >= 0
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    x = torch.stack([key, value]).float().transpose(1, 2)[:, None]  # [2, 1, K, T, D]
    codes, slots = blocks.encode(x), slot_mapping[None]
    blocks.write(codes, slots // blocks.block_size, slots % blocks.block_size)
    if blocks.counts is not None:
        blocks.counts.add_(_count(x, blocks.scales, codes))


def decode_attention(
    query: Tensor,
    blocks: KVBlocks,
    sequences: PagedSequences,
    options: AttentionOptions = AttentionOptions(),  # noqa: B008  frozen
    *,
    num_splits: int | None = None,
) -> Tensor:
    """Attend from the last token of each sequence, `query` [S, H, D], to all of it; return [S, H, D].

    As `extend_attention`, for one token per sequence; an empty sequence gets zeros.
    """
    ends = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
    return extend_attention(query, blocks, sequences, ends, 1, options)


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
    """Attend from the last tokens of each sequence to what is before them and to themselves.

    K and V of the new tokens are in the cache already and are read from there, in FP8, as engines
    do: a prompt in chunks gives what the prompt in one piece gives.

    Args:
        query: [T, H, D], the new tokens of all sequences, one sequence after the other.
        blocks: the layer's cache, K and V of these tokens included.
        sequences: where the S sequences lie.
        cu_seqlens: [S + 1] int32, where each sequence's new tokens start in `query`, and behind the last
            where they end. Rows of `query` from there on, which a recorded graph has, get zeros.
        max_query_len: the most new tokens of any sequence.
        options: softmax scale, window, softcap, sinks, FP8 queries.
        num_splits: parts of a head's KV that kernels take in parallel; no difference here.

    Returns:
        [T, H, D] in the query's type; zeros for tokens with nothing to attend to.
    """
    check_attention(query, blocks, sequences, options)
    if options.q_scale is not None:
        scale = per_channel(options.q_scale).transpose(0, 1)
        query32 = dequantize(quantize(query, scale, blocks.codes.dtype), scale)
    else:
        query32 = query.float()
    out = torch.zeros_like(query, dtype=torch.float32)
    for s, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        length = int(sequences.seq_lens[s])
        if start == end or length == 0:
            continue
        key, value = (x[0] for x in blocks.dense(sequences.block_tables[s : s + 1], length))
        first = 0 if sequences.seq_starts is None else int(sequences.seq_starts[s])
        visible = _visible(end - start, length, first, options.sliding_window).to(query.device)
        out[start:end] = _attend(query32[start:end], key, value, visible, options)
    return out.to(query.dtype)


def gather(
    blocks: KVBlocks, sequences: PagedSequences, seq: int, heads: slice, tokens: slice, dtype: torch.dtype
) -> Tensor:
    """Return K and V of some heads and tokens of a sequence as `dtype`, without scales: [2, heads, N, D]."""
    codes = blocks.codes.float()[:, sequences.block_tables[seq].long()]  # [2, blocks, K, block_size, D]
    return codes.transpose(1, 2).flatten(2, 3)[:, heads, tokens].to(dtype)


def _visible(query_len: int, length: int, first: int, window: int | None) -> Tensor:
    """Return whether each of the last `query_len` tokens sees each of `length`: [T, N] bool."""
    rows = torch.arange(length - query_len, length)[:, None]
    columns = torch.arange(length)[None]
    visible = (columns <= rows) & (columns >= first)
    return visible if window is None else visible & (columns > rows - window)


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, options: AttentionOptions) -> Tensor:
    """Attend from [T, H, D] to [K, N, D] where `visible` [T, N]; return [T, H, D]; all float32."""
    group = query.shape[1] // key.shape[0]
    key, value = (x.repeat_interleave(group, 0) for x in (key, value))
    scores = torch.einsum("thd,hnd->htn", query, key) * options.scale(query.shape[2])
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], 2)
    weights = scores.softmax(2)[:, :, : key.shape[1]]
    weights = weights.masked_fill(~visible.any(1)[None, :, None], 0.0)  # not 0 / 0
    # what is not visible may be NaN, and 0 * NaN is NaN
    value = value.masked_fill(~visible.any(0)[None, :, None], 0.0)
    return torch.einsum("htn,hnd->thd", weights, value)


def _count(x: Tensor, scale: Tensor, codes: Tensor) -> Tensor:
    """Return how many values saturate, underflow or are not finite: [2, K, 3] int64."""
    finite = x.isfinite()
    saturated = finite & ((x / scale).abs() > fp8_max(codes.dtype))
    underflowed = (x != 0) & (codes.float() == 0)
    return torch.stack([c.sum((1, 3, 4)) for c in (saturated, underflowed, ~finite)], 2)
