"""Operators for `torch.compile`: right for torch, equal to what they call, kept in one graph."""

import pytest
import torch
from paged import Case, build
from torch.library import opcheck

from fp8kv_runtime import append_kv, ops, reference
from fp8kv_runtime.storage import KVBlocks

ATTENTION = {
    "decode": Case(lengths=(5, 40), window=7, softcap=20.0, starts=(1, 0), center=True, sinks=True),
    "decode FP8 queries": Case(lengths=(33, 1), q_scale="head", k_scales="tensor"),
    "decode bfloat16": Case(lengths=(17, 3), dtype=torch.bfloat16, k_scales="channel"),
    "extend": Case(lengths=(9, 40), query_lens=(4, 12), window=7, starts=(1, 0)),
    "extend sinks": Case(lengths=(20, 20), query_lens=(20, 1), sinks=True, softmax_scale=0.5),
}
FLOAT16 = {"decode": {}, "extend": {"query_lens": (3, 2)}}
TESTS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def flat(batch, use_triton):
    """An attention call as its operator takes it."""
    given = ops._of_attention(batch.query, batch.blocks, batch.sequences, batch.options)
    if batch.decodes:
        return torch.ops.fp8kv.decode_attention.default, (*given, use_triton)
    ends = (batch.cu_seqlens, batch.max_query_len)
    return torch.ops.fp8kv.extend_attention.default, (*given, *ends, use_triton)


def layer(dtype=torch.float8_e4m3fn, count=True, center=False, device="cpu"):
    """Three blocks of four tokens, all bytes 0."""
    scale = torch.tensor([0.01, 0.02])
    k_center = torch.linspace(-1, 1, 16).view(2, 8) if center else None
    sizes = {"num_kv_heads": 2, "head_dim": 8, "dtype": dtype, "count": count, "device": device}
    blocks = KVBlocks.empty(3, 4, k_scale=scale, v_scale=scale / 3, k_center=k_center, **sizes)
    blocks.codes.view(torch.uint8).zero_()
    return blocks


def new_tokens(device="cpu"):
    """K, V and slots of six tokens, of which one is skipped."""
    torch.manual_seed(0)
    key, value = torch.randn(2, 6, 2, 8, device=device) * 3
    return key, value, torch.tensor([3, 4, -1, 11, 0, 7], device=device)


def stored(blocks):
    return blocks.codes.view(torch.uint8), blocks.counts


# torch's check of a schema cannot compare FP8, so that one is of float16 blocks
@pytest.mark.parametrize("use_triton", [False, True])
@pytest.mark.parametrize("case", FLOAT16)
def test_schemas_of_attention(case, use_triton, device):
    batch = build(Case(lengths=(5, 9), format="float16", starts=(1, 0), **FLOAT16[case]), device)
    op, given = flat(batch, use_triton)
    opcheck(op, given, test_utils=("test_schema", *TESTS))


@pytest.mark.parametrize("use_triton", [False, True])
def test_what_append_writes_is_in_its_schema(use_triton, device):
    key, value, slots = new_tokens(device)
    for count in (False, True):
        blocks = layer(torch.float16, count=count, device=device)
        given = (key, value, slots, *ops._of_blocks(blocks), blocks.counts, use_triton)
        opcheck(torch.ops.fp8kv.append_kv.default, given, test_utils=("test_schema", *TESTS))
    schema = torch.ops.fp8kv.append_kv.default._schema
    assert {a.name for a in schema.arguments if a.is_write} == {"codes", "counts"}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_on_fp8(case, device):
    op, given = flat(build(ATTENTION[case], device), use_triton=True)
    opcheck(op, given, test_utils=TESTS)


@pytest.mark.parametrize("center", [False, True])
def test_append_and_dense_on_fp8(center, device):
    key, value, slots = new_tokens(device)
    blocks = layer(center=center, device=device)
    given = (key, value, slots, *ops._of_blocks(blocks), blocks.counts, True)
    opcheck(torch.ops.fp8kv.append_kv.default, given, test_utils=TESTS)
    tables = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32, device=device)
    opcheck(torch.ops.fp8kv.dense.default, (*ops._of_blocks(blocks), tables, 7), test_utils=TESTS)
    assert torch.equal(ops.dense(blocks, tables, 7), blocks.dense(tables, 7))


@pytest.mark.parametrize("implementation", ["reference", "kernel"])
@pytest.mark.parametrize("case", ATTENTION)
def test_an_operator_gives_what_it_calls(case, implementation, device):
    batch = build(ATTENTION[case], device)
    given, use_triton = (batch.query, batch.blocks, batch.sequences), implementation == "kernel"
    if batch.decodes:
        found = ops.decode_attention(*given, batch.options, use_triton=use_triton)
    else:
        ends = (batch.cu_seqlens, batch.max_query_len)
        found = ops.extend_attention(*given, *ends, batch.options, use_triton=use_triton)
    assert torch.equal(found, batch.attend(implementation))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("use_triton", [False, True])
def test_append_stores_what_it_calls_stores(use_triton, center, device):
    key, value, slots = new_tokens(device)
    found, expected = (layer(center=center, device=device) for _ in range(2))
    ops.append_kv(key, value, found, slots, use_triton=use_triton)
    (append_kv if use_triton else reference.append_kv)(key, value, expected, slots)
    assert expected.counts.sum() > 0
    for ours, theirs in zip(stored(found), stored(expected), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("use_triton", [False, True])
def test_a_layer_is_one_graph(use_triton, backend, device):
    batch = build(Case(lengths=(5, 9), block_size=4, head_dim=8), device)
    found = batch.blocks
    expected = KVBlocks(found.codes.clone(), found.k_scale, found.v_scale)
    key = torch.randn(2, 2, 8, device=device)
    slots = found.block_size * batch.sequences.block_tables[:, 0].long()

    def attend(blocks, query):
        ops.append_kv(key, -key, blocks, slots, use_triton=use_triton)
        return ops.decode_attention(query, blocks, batch.sequences, batch.options, use_triton=use_triton)

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    out = compiled(found, batch.query.clone().requires_grad_())
    assert torch.equal(out, attend(expected, batch.query))
    assert not out.requires_grad
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
