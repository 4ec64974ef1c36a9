"""Extend attention: the new tokens of each sequence against its cache, which holds them too."""

import torch
from torch import Tensor

from fp8kv_runtime.cache import PagedSequences
from fp8kv_runtime.kernels.decode import attend_in_parts
from fp8kv_runtime.kernels.dense import attend_densely, find_prompts
from fp8kv_runtime.kernels.targets import current_target, is_elsewhere
from fp8kv_runtime.kernels.tuning import extend_config, plan_extend
from fp8kv_runtime.options import AttentionOptions, check_attention
from fp8kv_runtime.storage import KVBlocks, check_tensor


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
    tables, num_seqs = sequences.block_tables, len(sequences.seq_lens)
    check_tensor("cu_seqlens", cu_seqlens, ((num_seqs + 1,),), torch.int32, query.device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if query.shape[0] == 0:
        return out
    query = query if query.stride(2) == 1 else query.contiguous()
    cu_seqlens = cu_seqlens.contiguous()
    target = current_target()
    batch = (query, blocks, sequences)
    if num_splits is None:
        least_pairs = extend_config(target, query, blocks).pairs
        prompts = find_prompts(*batch, cu_seqlens, max_query_len, options, least_pairs)
        if prompts:
            attend_densely(*batch, options, prompts, out)
            return out
    out.zero_()  # rows that see nothing
    rows = max_query_len * (query.shape[1] // blocks.layout.num_kv_heads)
    # no KV is longer than this: lengths are on the device
    longest = tables.shape[1] * blocks.layout.block_size
    config, splits = plan_extend(target, query, blocks, num_seqs, rows, longest, num_splits)
    attend_in_parts(*batch, options, config, splits, out, cu_seqlens, max_query_len)
    return out
