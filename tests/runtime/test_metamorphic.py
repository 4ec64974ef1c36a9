"""What must not change when nothing that matters changes, bit for bit unless a bound says why."""

from dataclasses import replace

import pytest
import torch
from checks import STEP, head_errors
from paged import RUNTIME, Case, build

from fp8kv_runtime.cache import PagedSequences

IMPLEMENTATIONS = ("kernel", "reference")
HALF = torch.float16

DECODE = Case((40, 17, 0, 33), kv_heads=1, group=3, head_dim=80, num_splits=2, sinks=True)
EXTEND = replace(DECODE, query_lens=(9, 17, 0, 1), window=20, softcap=20.0, block_size=32)
EITHER = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def bytes_of(blocks):
    return blocks.codes.view(torch.uint8)


def with_codes(blocks, codes):
    return replace(blocks, codes=codes.contiguous().view(blocks.codes.dtype))


@EITHER
def test_a_batch_is_its_sequences_one_by_one(implementation, device):
    batch = build(EXTEND, device)
    out = batch.attend(implementation)
    ends = batch.cu_seqlens.tolist()
    for s, length in enumerate(ends[1:]):
        tokens = slice(ends[s], length)
        alone = replace(
            batch,
            query=batch.query[tokens],
            sequences=PagedSequences(
                batch.sequences.block_tables[s : s + 1], batch.sequences.seq_lens[s : s + 1]
            ),
            cu_seqlens=torch.tensor([0, length - ends[s]], dtype=torch.int32, device=device),
            max_query_len=length - ends[s],
        )
        assert torch.equal(alone.attend(implementation), out[tokens])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_number_of_splits_hardly_matters(dtype, device):
    # each part has its own maximum, so its float16 weights are others, 2^-11 apart at most each
    # way; with float32 queries weights have 22 bits. The output's own rounding comes on top.
    bound = 2 * 2.0**-11 + STEP[dtype] if dtype == HALF else 2 * 2.0**-20
    decode = build(replace(DECODE, dtype=dtype), device)
    extend = build(replace(DECODE, lengths=(70, 30), query_lens=(2, 3), window=50, dtype=dtype), device)
    whole = replace(decode, num_splits=2), replace(extend, extend_splits=None)
    for batch, one in zip((decode, extend), whole, strict=True):
        want = one.attend("kernel").cpu().double()
        for splits in (1, 5):
            got = replace(batch, num_splits=splits, extend_splits=splits).attend("kernel")
            assert head_errors(got, want).max() <= bound, splits


@EITHER
@pytest.mark.parametrize("scales", ["head", "channel"])
def test_a_power_of_two_may_be_in_either_scale(scales, implementation, device):
    # float32, in which no output is near the ends of the range
    case = replace(EXTEND, k_scales=scales, v_scales=scales, dtype=torch.float32, softmax_scale=0.1)
    batch = build(case, device)
    blocks = replace(batch.blocks, k_scale=batch.blocks.k_scale * 4, v_scale=batch.blocks.v_scale * 2)
    moved = replace(batch, blocks=blocks, options=replace(batch.options, softmax_scale=0.1 / 4))
    assert torch.equal(moved.attend(implementation), 2 * batch.attend(implementation))


def test_decode_is_extend_by_one_token(device):
    batch = build(replace(DECODE, num_splits=1), device)
    extended = replace(batch, decodes=False)
    # the same loop, but the reduce divides by the sum after, not before, V's scale: one more
    # rounding in fp32 can move the output by a step of float16
    errors = head_errors(extended.attend("kernel"), batch.attend("kernel").cpu().double())
    assert errors.max() <= 2 * STEP[HALF]
    in_parts = replace(batch, num_splits=5)
    assert torch.equal(replace(extended, extend_splits=5).attend("kernel"), in_parts.attend("kernel"))


@EITHER
@pytest.mark.parametrize("case", [DECODE, EXTEND], ids=["decode", "extend"])
def test_a_sink_without_weight_is_no_sink(case, implementation, device):
    batch = build(case, device)
    without = replace(batch, options=replace(batch.options, sinks=None)).attend(implementation)
    for weightless in (float("-inf"), -3e38):
        sinks = torch.full_like(batch.options.sinks, weightless)
        with_it = replace(batch, options=replace(batch.options, sinks=sinks))
        assert torch.equal(with_it.attend(implementation), without), weightless


@EITHER
def test_batches_without_sequences_and_sequences_without_tokens(implementation, device):
    for query_lens in (None, ()):
        batch = build(Case((), query_lens=query_lens), device)
        assert batch.attend(implementation).shape == (0, 4, 64)
    for query_lens in (None, (1, 3)):
        for sinks in (False, True):
            batch = build(Case((0, 0), query_lens=query_lens, sinks=sinks), device)
            assert batch.sequences.block_tables.shape == (2, 0)
            out = batch.attend(implementation)
            assert out.shape == batch.query.shape
            assert (out == 0).all()


@pytest.mark.parametrize("query_lens", [None, (5, 3)])
def test_blocks_beyond_two_gigabytes(query_lens, device):
    """Pages that are not touched cost no memory, so the pool can be as large as in production."""
    case = Case((40, 20), block_size=64, head_dim=128, num_splits=2, group=1, query_lens=query_lens)
    batch = build(case, device)
    small = bytes_of(batch.blocks)
    count = small.shape[1]
    per_block = small[0, 0].numel()
    num_blocks = 2**31 // per_block + count + 1
    codes = torch.empty(2, num_blocks, *small.shape[2:], dtype=torch.uint8, device=device)
    first = num_blocks - count
    assert first * per_block > 2**31
    codes[:, first:] = small
    tables = batch.sequences.block_tables
    tables = torch.where(tables < 0, -1, tables + first)
    large = replace(
        batch,
        blocks=with_codes(batch.blocks, codes),
        sequences=replace(batch.sequences, block_tables=tables),
    )
    for implementation in IMPLEMENTATIONS:
        assert torch.equal(large.attend(implementation), batch.attend(implementation))

    key, value = (torch.randn(3, 2, 128, device=device) for _ in "kv")
    slots = torch.tensor([5, 64 * count - 1, 64], device=device)
    for module in (RUNTIME.append_kv, RUNTIME.reference):
        codes[:, first:] = 0x7F
        small.fill_(0x7F)
        module.append_kv(key, value, batch.blocks, slots)
        module.append_kv(key, value, large.blocks, slots + first * 64)
        assert torch.equal(bytes_of(large.blocks)[:, first:], small)
        assert (small != 0x7F).any()


@pytest.mark.parametrize("launcher", ["append", "decode", "extend"])
def test_heads_beyond_two_gigabytes(launcher, device):
    """Heads of queries, K and V as far apart as a stride of 32 bits allows."""
    memory = torch.empty(2**32 + 2**20, dtype=HALF, device=device)

    def far_apart(x):
        strides, middle = (x.shape[2], 2**30, 1), 2**31
        # 0 is where the offset of the third head wraps to
        memory.as_strided(x.shape, strides, 0).copy_(x + 1)
        return memory.as_strided(x.shape, strides, middle).copy_(x)

    query_lens = (5, 3) if launcher == "extend" else None
    batch = build(Case((40, 20), kv_heads=3, group=1, query_lens=query_lens), device)
    if launcher != "append":
        far = replace(batch, query=far_apart(batch.query))
        assert torch.equal(far.attend("kernel"), batch.attend("kernel"))
        return
    new, slots = torch.randn(5, 3, 64, device=device).half(), torch.arange(5, device=device)
    stored = []
    for key, value in ((new, new), (far_apart(new), new), (new, far_apart(new))):
        bytes_of(batch.blocks).fill_(0x7F)
        RUNTIME.append_kv.append_kv(key, value, batch.blocks, slots)
        stored.append(bytes_of(batch.blocks).clone())
    assert [torch.equal(each, stored[0]) for each in stored] == [True] * 3
