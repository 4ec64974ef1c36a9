"""What must not change when nothing that matters changes, bit for bit unless a bound says why."""

from dataclasses import replace

import pytest
import torch
from checks import STEP, head_errors
from paged import RUNTIME, Case, build

from fp8kv_runtime.cache import PagedSequences

IMPLEMENTATIONS = ("kernel", "reference")
HALF = torch.float16

DECODE = Case((70, 33, 0, 129), kv_heads=2, group=3, head_dim=80, num_splits=2, sinks=True)
EXTEND = replace(DECODE, query_lens=(9, 33, 0, 1), window=40, softcap=20.0, block_size=32)
BATCHES = pytest.mark.parametrize("case", [DECODE, EXTEND], ids=["decode", "extend"])
EITHER = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def bytes_of(blocks):
    return blocks.codes.view(torch.uint8)


def with_codes(blocks, codes):
    return replace(blocks, codes=codes.contiguous().view(blocks.codes.dtype))


@BATCHES
@EITHER
def test_where_blocks_lie_does_not_matter(case, implementation, device):
    batch = build(case, device)
    codes, tables = bytes_of(batch.blocks), batch.sequences.block_tables
    order = torch.randperm(codes.shape[1], device=device)
    moved = torch.empty_like(codes)
    moved[:, order] = codes
    tables = torch.where(tables < 0, -1, order[tables.long()].to(torch.int32))
    assert not torch.equal(tables, batch.sequences.block_tables)
    shuffled = replace(
        batch,
        blocks=with_codes(batch.blocks, moved),
        sequences=replace(batch.sequences, block_tables=tables),
    )
    assert torch.equal(shuffled.attend(implementation), batch.attend(implementation))


@EITHER
def test_the_order_of_a_decode_batch_does_not_matter(implementation, device):
    batch = build(DECODE, device)
    order = torch.tensor([2, 0, 3, 1], device=device)
    sequences = PagedSequences(batch.sequences.block_tables[order], batch.sequences.seq_lens[order])
    permuted = replace(batch, query=batch.query[order], sequences=sequences)
    assert torch.equal(permuted.attend(implementation), batch.attend(implementation)[order])


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
    batch = build(replace(DECODE, dtype=dtype), device)
    outputs = [replace(batch, num_splits=n).attend("kernel") for n in (1, 2, 3, 8)]
    for other in outputs[1:]:
        assert head_errors(other, outputs[0].cpu().double()).max() <= bound


@BATCHES
@EITHER
@pytest.mark.parametrize("scales", ["head", "channel"])
def test_twice_the_k_scale_is_half_the_softmax_scale(scales, implementation, case, device):
    batch = build(replace(case, k_scales=scales), device)
    options = replace(batch.options, softmax_scale=80**-0.5 / 2)
    moved = replace(batch, blocks=replace(batch.blocks, k_scale=batch.blocks.k_scale * 2), options=options)
    whole = replace(batch, options=replace(options, softmax_scale=80**-0.5))
    assert torch.equal(moved.attend(implementation), whole.attend(implementation))


@BATCHES
@EITHER
@pytest.mark.parametrize("scales", ["head", "channel"])
def test_twice_the_v_scale_is_twice_the_output(scales, implementation, case, device):
    # float32, in which no output is near the ends of the range
    batch = build(replace(case, v_scales=scales, dtype=torch.float32), device)
    moved = replace(batch, blocks=replace(batch.blocks, v_scale=batch.blocks.v_scale * 2))
    assert torch.equal(moved.attend(implementation), 2 * batch.attend(implementation))


@BATCHES
@EITHER
def test_k_and_v_scales_are_not_one_another(implementation, case, device):
    batch = build(case, device)
    swapped = replace(batch.blocks, k_scale=batch.blocks.v_scale, v_scale=batch.blocks.k_scale)
    want = batch.attend(implementation).cpu().double()
    got = replace(batch, blocks=swapped).attend(implementation)
    assert head_errors(got, want).min() > 0.5  # V's scale is a twelfth of K's


@EITHER
def test_a_centre_without_sinks_and_softcap_changes_nothing(implementation, device):
    # it adds the same to every score of a row, and kernels leave it out; the reference adds
    # it in fp32, to logits of up to 2^5: 2^-19, which exp makes relative, both ways
    batch = build(replace(DECODE, sinks=False, dtype=torch.float32), device)
    centred = replace(batch.blocks, k_center=torch.randn(2, 80, device=device))
    want = batch.attend(implementation)
    got = replace(batch, blocks=centred).attend(implementation)
    if implementation == "kernel":
        assert torch.equal(got, want)
    assert head_errors(got, want.cpu().double()).max() <= 2.0**-18


def test_decode_is_extend_by_one_token(device):
    batch = build(replace(DECODE, num_splits=1), device)
    extended = replace(batch, decodes=False).attend("kernel")
    # the same loop, but the reduce divides by the sum after, not before, V's scale: one more
    # rounding in fp32 can move the output by a step of float16
    assert head_errors(extended, batch.attend("kernel").cpu().double()).max() <= 2 * STEP[HALF]


@pytest.mark.parametrize("extends", [False, True])
def test_blocks_beyond_two_gigabytes(extends, device):
    """Pages that are not touched cost no memory, so the pool can be as large as in production."""
    case = Case((70, 40), block_size=64, head_dim=128, num_splits=2)
    case = replace(case, query_lens=(5, 3)) if extends else case
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
    batch = build(Case((70, 40), kv_heads=3, group=1, query_lens=query_lens), device)
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


@EITHER
@pytest.mark.parametrize("query_lens", [None, ()])
def test_a_batch_of_no_sequences(query_lens, implementation, device):
    batch = build(Case((), query_lens=query_lens), device)
    assert batch.attend(implementation).shape == (0, 4, 64)


@EITHER
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("query_lens", [None, (1, 3)])
def test_sequences_without_tokens(query_lens, sinks, implementation, device):
    batch = build(Case((0, 0), query_lens=query_lens, sinks=sinks), device)
    assert batch.sequences.block_tables.shape == (2, 0)
    out = batch.attend(implementation)
    assert out.shape == batch.query.shape
    assert (out == 0).all()


@BATCHES
@EITHER
@pytest.mark.parametrize("weightless", [float("-inf"), -3e38])
def test_a_sink_without_weight_is_no_sink(case, weightless, implementation, device):
    batch = build(case, device)
    sinks = torch.full_like(batch.options.sinks, weightless)
    without = replace(batch, options=replace(batch.options, sinks=None))
    batch = replace(batch, options=replace(batch.options, sinks=sinks))
    assert torch.equal(batch.attend(implementation), without.attend(implementation))
