"""Inputs of attention: what is refused before a kernel runs, and views, which kernels do not read."""

import re
from dataclasses import replace

import pytest
import torch
from paged import RUNTIME, Case, build

from fp8kv_runtime.options import AttentionOptions

META = torch.device("meta")  # another device, which every machine has


def refused(batch):
    """What is wrong in a decode of one sequence by four heads, by the message."""
    query = batch.query

    def options(**changed):
        return {"options": AttentionOptions(**changed)}

    of_q_scale = "q_scale must be [1] or [4] float32 on cpu, got "
    elsewhere = "all must be on cpu, where the query is, got blocks on cpu, block_tables on "
    return {
        "query must be [tokens, a multiple of 2 heads, 64], got [1, 3, 64]": {"query": query[:, :3]},
        "query must be float16, bfloat16 or float32, got torch.float64": {"query": query.double()},
        "query must have a row per sequence, 1, got 2": {"query": query.repeat(2, 1, 1)},
        "sliding_window must be at least 1, got 0": options(sliding_window=0),
        "softcap must be positive, got 0.0": options(softcap=0.0),
        "sinks must be [4], got [2]": options(sinks=torch.zeros(2)),
        of_q_scale + "[2] float32 on cpu": options(q_scale=torch.ones(2)),
        of_q_scale + "[4] float16 on cpu": options(q_scale=torch.ones(4).half()),
        of_q_scale + "[4] float32 on meta": options(q_scale=torch.ones(4, device=META)),
        elsewhere.replace("must be on cpu", "must be on meta") + "cpu": {"query": query.to(META)},
        elsewhere + "meta": {"sequences": batch.sequences.to(META)},
        elsewhere + "cpu, sinks on meta": options(sinks=torch.zeros(4, device=META)),
        "num_splits must be at least 1, or None to choose, got 0": {"num_splits": 0},
    }


def test_what_kernels_take_for_granted_is_checked():
    batch = build(Case((9,)))
    for message, changes in refused(batch).items():
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            replace(batch, **changes).attend("kernel")


REFUSED_LAYERS = {
    "FP8 queries need FP8 blocks, got float16": {"format": "float16"},
    "FP8 queries need K scales [1] or [K]: one per channel cannot be taken out": {"k_scales": "channel"},
}


def test_every_implementation_checks(device):
    for query_lens in (None, (1,)):
        for implementation in ("kernel", "reference"):
            for message, changes in REFUSED_LAYERS.items():
                batch = build(Case((9,), query_lens=query_lens, **changes), device)
                wrong = replace(batch, options=AttentionOptions(q_scale=torch.ones(1, device=device)))
                with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                    wrong.attend(implementation)
        for head_dim, message in (
            (65, "kernels need an even head_dim, got 65"),
            (320, "320 is more than the 256"),
        ):
            batch = build(Case((9,), head_dim=head_dim, query_lens=query_lens), device)
            with pytest.raises(ValueError, match=message):
                batch.attend("kernel")


def test_ends_of_queries_and_their_splits_are_checked():
    batch = build(Case((9,), query_lens=(3,)))
    for ends, got in (
        (torch.tensor([0, 3]), "[2] int64 on cpu"),
        (torch.zeros(2, dtype=torch.int32, device=META), "[2] int32 on meta"),
        (torch.tensor([0, 3, 3], dtype=torch.int32), "[3] int32 on cpu"),
    ):
        message = f"cu_seqlens must be [2] int32 on cpu, got {got}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            replace(batch, cu_seqlens=ends).attend("kernel")
    with pytest.raises(ValueError, match="^num_splits must be at least 1, or None to choose, got -3$"):
        replace(batch, extend_splits=-3).attend("kernel")


def test_tables_and_lengths_are_int32_of_as_many_sequences_on_one_device():
    sequences = build(Case((9, 3), starts=(0, 1))).sequences
    tables, lens, starts = sequences.block_tables, sequences.seq_lens, sequences.seq_starts
    for changes, message in (
        (
            {"block_tables": tables.long()},
            "block_tables must be [2, 1] int32 on cpu, got [2, 1] int64 on cpu",
        ),
        ({"block_tables": tables[:1]}, "block_tables must be [2, 1] int32 on cpu, got [1, 1] int32 on cpu"),
        ({"seq_lens": lens.to(META)}, "seq_lens must be [2] int32 on cpu, got [2] int32 on meta"),
        ({"seq_lens": lens[:1]}, "seq_starts must be [1] int32 on cpu, got [2] int32 on cpu"),
        ({"seq_starts": starts.float()}, "seq_starts must be [2] int32 on cpu, got [2] float32 on cpu"),
        ({"seq_starts": starts[:1]}, "seq_starts must be [2] int32 on cpu, got [1] int32 on cpu"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            replace(sequences, **changes)


@pytest.mark.parametrize("query_lens", [None, (7, 3)])
def test_everything_that_is_a_view(query_lens, device):
    batch = build(Case((40, 17), query_lens=query_lens, starts=(3, 1)), device)
    one = torch.ones(1, device=device)
    options = AttentionOptions(sinks=one.expand(4), q_scale=(one / 20).expand(4))
    want = replace(batch, options=AttentionOptions(sinks=one.repeat(4), q_scale=one / 20))

    def strided(x):
        return torch.stack([x, x * 0 - 7], -1)[..., 0]

    sequences = batch.sequences
    parts = (sequences.block_tables, sequences.seq_lens, sequences.seq_starts)
    views = replace(
        batch,
        options=options,
        sequences=RUNTIME.cache.PagedSequences(*map(strided, parts)),
        cu_seqlens=strided(batch.cu_seqlens),
    )
    want = want.attend("kernel")
    assert torch.equal(views.attend("kernel"), want)
    # heads of a fused QKV tensor, and channels that are not next to each other
    fused = torch.randn(len(batch.query), 12, 64, device=device).half()
    fused[:, 4:8] = batch.query
    apart = batch.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert apart.stride(2) != 1
    for query in (fused[:, 4:8], apart):
        assert torch.equal(replace(views, query=query).attend("kernel"), want)
