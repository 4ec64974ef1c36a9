"""Prompts that torch's attention computes: gathered exactly, right in any batch, and only where it fits."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import oracle
import pytest
import torch
from checks import assert_attention, assert_gathered
from paged import FORMATS, Case, build
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from tune_kernels import pinned

from fp8kv_runtime import reference
from fp8kv_runtime.kernels import attention, dense
from fp8kv_runtime.kernels.launch import Launcher
from fp8kv_runtime.kernels.tuning import Config

RAGGED = Case((70, 133, 40, 1), query_lens=(20, 133, 0, 1), starts=(3, 33, 0, 0), group=3, center=True)
BF16 = {"dtype": torch.bfloat16}
CASES = {
    "head": {},
    "tensor-D256": {"k_scales": "tensor", "v_scales": "channel", "head_dim": 256, "block_size": 64},
    "e5m2-D80": {"format": "e5m2", "head_dim": 80, "block_size": 48},
    "fnuz-D128": {"format": "e4m3fnuz", "head_dim": 128, "group": 1} | BF16,
    "bf16-tensor-D96": {"k_scales": "tensor", "v_scales": "tensor", "head_dim": 96, "kv_heads": 3} | BF16,
    "float16": {"format": "float16", "window": 133},
}


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels launched, one after the other."""
    names, launch = [], Launcher.__call__

    def record(self, *arguments):
        names.append(self.kernel.__name__)
        launch(self, *arguments)

    monkeypatch.setattr(Launcher, "__call__", record)
    with pinned("extend", Config(64, 4, pairs=1)):
        yield names


@pytest.mark.parametrize("name", CASES)
def test_ragged_prompts(name, launched, device, monkeypatch):
    case = replace(RAGGED, **CASES[name])
    assert_attention(case, device)
    assert launched == ["gather_kernel"] * 3
    if case.kv_heads == 3:  # of which two fit
        monkeypatch.setattr(dense, "WORKSPACE", 2 * 4 * case.head_dim * 100)
        assert_attention(case, device)
        assert len(launched) == 3 + 5


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # NaN is multiplied
@pytest.mark.parametrize(
    ("format", "dtype"), [*product(FORMATS, (torch.float16, torch.bfloat16)), ("float16", torch.float16)]
)
def test_every_pair_of_codes_is_gathered_exactly(format, dtype, device):
    assert_gathered(format, dtype, device)


def test_later_heads_of_a_later_sequence_are_gathered(device):
    batch = build(replace(RAGGED, kv_heads=3), device)
    table = batch.sequences.block_tables[1].tolist()
    for implementation in (dense, reference):
        part = (batch.blocks, batch.sequences, 1, slice(1, 3), slice(33, 133))
        got = implementation.gather(*part, torch.float16)
        for values, stored in zip(got, (batch.blocks.key, batch.blocks.value), strict=True):
            want = oracle.dequantised(stored, torch.ones(3), table, 133)[33:, 1:].transpose(0, 1)
            assert torch.equal(values.cpu().double(), want)


def test_what_torch_has_no_attention_for_is_ours(launched, device):
    for changes in (
        {"window": 132}, {"softcap": 5.0}, {"sinks": True}, {"q_scale": "head"}, {"k_scales": "channel"},
        {"dtype": torch.float32}, {"format": "float16"} | BF16, {"head_dim": 84}, {"extend_splits": 1},
    ):  # fmt: skip
        launched.clear()
        assert_attention(replace(RAGGED, **changes), device)
        assert launched == ["decode_kernel"], changes
    # three query heads: of two tokens alone nine pairs, of one after another six, which are worth less
    for new, most in (2, 9), (1, 1):
        for least, name in ((most, "gather_kernel"), (most + 1, "decode_kernel")):
            launched.clear()
            with pinned("extend", Config(64, 4, pairs=least)):
                assert_attention(Case((2, 2), query_lens=(new, new), kv_heads=1, group=3), device)
            assert {*launched} == {name}


def test_on_hopper_a_prompt_after_others_is_two_softmaxes_of_full_steps(launched, device, monkeypatch):
    shapes = []

    def attend(query, key, value, scale, is_causal):
        shapes.append((query.shape[2], key.shape[2], is_causal))
        scores = scale * query.float() @ key.float().repeat_interleave(query.shape[1] // key.shape[1], 1).mT
        if is_causal:
            scores += torch.full_like(scores, -torch.inf).triu(1)
        out = scores.softmax(-1) @ value.float().repeat_interleave(query.shape[1] // key.shape[1], 1)
        return out.to(query.dtype), scores.logsumexp(-1, keepdim=True)

    monkeypatch.setattr(dense, "_prefers_cudnn", lambda *_: True)
    monkeypatch.setattr(dense, "cudnn", attend)
    monkeypatch.setattr(dense, "_STEP", 16)
    assert_attention(replace(RAGGED, k_scales="tensor", dtype=torch.bfloat16), device)
    # 20 tokens after 47, 133 of which 33 are padding, and one alone
    assert shapes == [(48, 48, True), (48, 32, False), (112, 112, True), (16, 16, True)]
    assert_attention(RAGGED, device)
    assert len(shapes) == 4 + 4 * RAGGED.kv_heads


@pytest.mark.parametrize(("tokens", "most"), [(512, 2), (500, 3)])  # whole steps; filled up: a slice more
def test_a_head_with_a_scale_of_its_own_takes_few_operations_of_python(tokens, most, monkeypatch):
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[-1] += 1
            return func(*args, **kwargs or {})

    def attend(query, *_):
        counts[-1] += 1
        return query, query

    counts = []
    monkeypatch.setattr(dense, "_prefers_cudnn", lambda *_: True)
    monkeypatch.setattr(dense, "cudnn", attend)
    monkeypatch.setattr(dense, "gather", lambda *_: torch.zeros(2, heads, tokens, 64).half())
    for heads in (2, 10):
        batch = build(Case((tokens,), query_lens=(tokens,), kv_heads=heads), "cpu")
        prompt, out = dense.Prompt(0, 0, tokens, 0, tokens), torch.empty_like(batch.query)
        counts.append(0)
        with Count():
            dense.attend_densely(batch.query, batch.blocks, batch.sequences, batch.options, [prompt], out)
    assert (counts[1] - counts[0]) / 8 == most


@pytest.mark.parametrize("fails", [False, True])
def test_heads_start_after_what_is_there_and_end_before_what_follows(fails, monkeypatch):
    class Stream(str):
        wait_event = lambda self, event: log.append(f"{self} waits for {event}")  # noqa: E731
        record_event = lambda self: f"all on {self}"  # noqa: E731
        record = lambda self, stream: log.append(f"{self} on {stream}")  # noqa: E731

    def run(head):
        log.append(f"head {head} on {current[-1]}")
        if fails:
            raise RuntimeError

    log, current, streams = [], [Stream("main")], [(Stream(n), Stream(f"end {n}")) for n in "abc"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    monkeypatch.setattr(dense, "_streams", lambda _: streams)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        dense._run_side_by_side(run, [(0,), (1,)], torch.device("cuda"))
    heads = ["head 0 on a", "head 1 on b"][: 1 if fails else 2]
    ends = ["end a on a", "main waits for end a", "end b on b", "main waits for end b"]
    assert log == ["a waits for all on main", "b waits for all on main", *heads, *ends]
    assert current[-1] == "main"


@pytest.mark.parametrize("queries", [None, (3, 1)])
def test_parts_of_any_values_are_joined_as_their_softmaxes_say(queries, device, monkeypatch):
    """The reduce kernel alone, beside float64: parts are [P, T, H, D], their maxima and sums [P, T, H, 2]."""
    launch, random, drawn = Launcher.__call__, torch.Generator().manual_seed(0), []

    def draw_parts(self, target, grid, blocks, inputs, arguments):
        if self.kernel is attention.reduce_kernel:
            partial, softmax, *_ = arguments
            parts = int(partial[:, 0, 0, 0].isfinite().sum())  # the others are NaN, and nothing may read them
            partial[:parts] = torch.randn(partial[:parts].shape, generator=random).to(device)
            softmax[:parts] = torch.rand(softmax[:parts].shape, generator=random).to(device) * 20 + 0.1
            softmax[1, ..., 0], softmax[1, ..., 1], partial[1] = -torch.inf, 0, 0  # it sees nothing
            drawn.append((parts, partial.cpu().double(), softmax.cpu().double()))
        launch(self, target, grid, blocks, inputs, arguments)

    monkeypatch.setattr(Launcher, "__call__", draw_parts)
    splits = {"num_splits": 5} if queries is None else {"query_lens": queries, "extend_splits": 5}
    case = Case((70, 9), format="float16", v_scales="channel", head_dim=80, group=3, **splits)
    batch = build(case, device)
    batch = replace(batch, blocks=replace(batch.blocks, v_scale=batch.blocks.v_scale * 2**18))  # about one
    with pinned("decode" if queries is None else "extend", Config(16, 4, per_processor=100)):
        out = batch.attend("kernel")
    ((parts, partial, softmax),) = drawn
    assert parts > 3
    of_sequences = zip(queries or (1, 1), (slice(parts - 1), slice(parts - 1, parts)), strict=True)
    rows = [(token, part) for tokens, part in of_sequences for token in range(tokens)]
    scale = batch.blocks.v_scale.cpu().double().repeat_interleave(case.group, 0)
    for row, (token, part) in enumerate(rows):
        values, (maxima, sums) = partial[part, token], softmax[part, token].unbind(-1)
        weights = 2 ** (maxima - maxima.amax(0))
        want = (weights[..., None] * values).sum(0) / (weights * sums).sum(0)[:, None] * scale
        assert_close(out[row].cpu().double(), want, rtol=1e-3, atol=1e-5)  # float16 rounds by 2^-11


def test_a_sequence_of_one_part_is_one_launch(launched, device):
    for length, num_splits, kernels in (
        (40, 1, ["decode_kernel"]), (40, 2, ["decode_kernel", "reduce_kernel"]),
        (64, None, ["decode_kernel"]), (65, None, ["decode_kernel", "reduce_kernel"]),
    ):  # fmt: skip
        launched.clear()
        with pinned("decode", Config(16, 4, per_processor=100)):
            assert_attention(Case((length, 9), num_splits=num_splits), device)
        assert launched == kernels, length
