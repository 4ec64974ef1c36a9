"""Attention on an FP8 cache from its definition: dense, fp64, one query token after the other."""

import torch


def dequantised(stored, scale, table, length):
    size, as_bytes = stored.shape[2], stored.view(torch.uint8)
    rows = [as_bytes[int(table[at // size]), :, at % size] for at in range(length)]
    codes, scale = torch.stack(rows).cpu().view(stored.dtype), scale.cpu().double()
    return codes.double() * (scale if scale.dim() == 2 else scale.view(1, -1, 1))


def attention(batch):
    """[T, H, D] fp64; zeros where there is nothing to attend to."""
    blocks, options, query = batch.blocks, batch.options, batch.query.cpu()
    if options.q_scale is not None:
        scale, limit = options.q_scale.cpu().view(1, -1, 1), torch.finfo(blocks.key.dtype).max
        query = (query.float() / scale).clamp(-limit, limit).to(blocks.key.dtype)  # divided in fp32
        query = query.double() * scale.double()
    out, ends = torch.zeros(query.shape, dtype=torch.float64), batch.cu_seqlens.tolist()
    for s, length in enumerate(batch.sequences.seq_lens.tolist()):
        if length == 0:
            continue
        table = batch.sequences.block_tables[s].tolist()
        key = dequantised(blocks.key, blocks.k_scale, table, length)
        if blocks.k_center is not None:
            key += blocks.k_center.cpu().double()
        value = dequantised(blocks.value, blocks.v_scale, table, length)
        starts = batch.sequences.seq_starts
        start = 0 if starts is None else int(starts[s])
        for token in range(ends[s], ends[s + 1]):
            position = length - ends[s + 1] + token
            out[token] = attend(query[token].double(), key, value, position, start, options)
    return out


def attend(query, key, value, position, start, options):
    first = start
    if options.sliding_window is not None:
        first = max(start, position - options.sliding_window + 1)
    if first > position:
        return torch.zeros_like(query)
    kv_heads = torch.arange(query.shape[0]) // (query.shape[0] // key.shape[1])
    key, value = (x[first : position + 1, kv_heads] for x in (key, value))  # [N, H, D]
    logits = (key * query).sum(2) * (options.softmax_scale or query.shape[1] ** -0.5)
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    if options.sinks is not None:
        logits = torch.cat([logits, options.sinks.cpu().double()[None]])
    weights = torch.exp(logits - logits.amax(0))
    weights = weights / weights.sum(0)
    return (weights[: len(value), :, None] * value).sum(0)
