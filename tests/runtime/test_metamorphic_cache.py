"""How K and V came into the cache, shared, copied or in chunks, does not change the output."""

import pytest
import torch
from checks import STEP, head_errors
from paged import RUNTIME, Case, poisoned

from fp8kv_runtime.cache import PagedKVCache
from fp8kv_runtime.options import AttentionOptions
from fp8kv_runtime.storage import KVBlocks


def new_cache(num_blocks, device, *, heads=2, channels=64, block_size=16):
    """A cache with one layer in which every value is NaN, and the layer."""
    cache = PagedKVCache(num_blocks, block_size=block_size)
    case = Case((), kv_heads=heads, head_dim=channels, block_size=block_size)
    blocks = KVBlocks(
        poisoned(num_blocks, case, device).view(torch.float8_e4m3fn),
        torch.tensor([0.01, 0.02], device=device),
        torch.tensor([0.001, 0.003], device=device),
    )
    cache.add_layer(0, blocks)
    return cache, blocks


def drawn(num_tokens, device, seed=0):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(2, num_tokens, 2, 64, generator=random).half()
    return x.to(device)


def decoded(cache, blocks, sequences, query):
    batch = cache.sequences(sequences).to(query.device)
    return RUNTIME.decode.decode_attention(query, blocks, batch, num_splits=2)


def test_a_shared_prefix_is_as_good_as_a_copy(device):
    tokens = list(range(40))
    key, value = drawn(40, device)
    query = torch.randn(2, 4, 64, device=device).half()
    outputs = []
    for shared in (True, False):
        cache, blocks = new_cache(8, device)
        sequences = []
        for _ in range(2):
            sequence = cache.allocate(tokens if shared else None)
            first = sequence.num_cached_tokens
            ids = {"token_ids": tokens[first:]} if shared else {}
            slots = cache.append(sequence, 40 - first, **ids).to(device)
            RUNTIME.append_kv.append_kv(key[first:], value[first:], blocks, slots)
            cache.commit(sequence)
            sequences.append(sequence)
        assert (sequences[1].num_cached_tokens == 32) == shared
        outputs.append(decoded(cache, blocks, sequences, query))
    assert torch.equal(*outputs)
    assert outputs[0].isfinite().all()


def test_copy_on_write_does_not_reach_the_sharer(device):
    cache, blocks = new_cache(8, device)
    key, value = drawn(40, device)
    query = torch.randn(1, 4, 64, device=device).half()
    first = cache.allocate()
    RUNTIME.append_kv.append_kv(key, value, blocks, cache.append(first, 40).to(device))
    before = decoded(cache, blocks, [first], query)
    second = cache.fork(first)
    assert torch.equal(decoded(cache, blocks, [second], query), before)
    slots = cache.append(second, 40).to(device)
    RUNTIME.append_kv.append_kv(key + 3, value + 3, blocks, slots)
    assert torch.equal(decoded(cache, blocks, [first], query), before)
    assert not torch.equal(decoded(cache, blocks, [second], query), before)


@pytest.mark.parametrize("chunks", [(90,), (1,) * 6 + (84,), (30, 30, 30), (16, 64, 10)])
@pytest.mark.parametrize("implementation", ["kernel", "reference"])
@pytest.mark.parametrize("window", [None, 20])
def test_a_prompt_in_chunks_is_the_prompt_in_one_piece(window, implementation, chunks, device):
    key, value = drawn(90, device)
    query = torch.randn(90, 4, 64, generator=torch.Generator().manual_seed(1)).half().to(device)
    module = RUNTIME.extend if implementation == "kernel" else RUNTIME.reference
    options = AttentionOptions(sliding_window=window)
    outputs = []
    for lengths in (chunks, (90,)):
        cache, blocks = new_cache(8, device)
        sequence, parts, start = cache.allocate(), [], 0
        for length in lengths:
            at = slice(start, start + length)
            slots = cache.append(sequence, length).to(device)
            RUNTIME.append_kv.append_kv(key[at], value[at], blocks, slots)
            ends = torch.tensor([0, length], dtype=torch.int32, device=device)
            batch = cache.sequences([sequence]).to(query.device)
            parts.append(module.extend_attention(query[at], blocks, batch, ends, length, options))
            start += length
        outputs.append(torch.cat(parts))
    if implementation == "kernel" and torch.device(device).type != "cpu":
        # tiles begin at the same positions whatever the chunk, and what a row does not see
        # leaves its sums as they are
        assert torch.equal(*outputs)
    else:
        # a CPU's matrix product of another shape adds up in another order: the last bit of float16
        assert head_errors(outputs[0], outputs[1].cpu().double()).max() <= 2 * STEP[torch.float16]
