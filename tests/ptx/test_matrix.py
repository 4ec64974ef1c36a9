"""The compiled kernels, run by their launchers, on every NVIDIA target: against the oracle."""

import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import triton
from checks import assert_attention, assert_gathered, assert_rounded, assert_stored
from kernel_grid import cover_pairs
from kernels.offline import launches
from paged import Case
from virtual_gpu.launch import virtual_gpu
from virtual_gpu.program import FaultError

from fp8kv_runtime.kernels.targets import TARGETS
from fp8kv_runtime.kernels.tuning import Config
from fp8kv_runtime.storage import specialization

# by the number of parts: three sequences in room for four, one of them empty; parts of several tiles, so that
# copies run ahead, and of one; more parts than there are tiles
LENGTHS = {2: (330, 33, 0), 1: (300, 64, 65), 16: (600, 1, 129), 64: (900, 20, 300)}
SETTINGS = {"num_splits": LENGTHS, "head_dim": (64, 80, 96, 112, 128, 256), "group": (1, 4, 7, 16, 20)}
SETTINGS |= {"block_size": (16, 48, 64, 256), "dtype": (torch.float16, torch.bfloat16, torch.float32)}
SETTINGS |= {"format": ("e4m3fn", "e5m2", "float16"), "k_scales": ("head", "tensor", "channel")}
SETTINGS |= {"center": (False, True), "q_scale": (None, "head", "tensor"), "window": (None, 37, 200)}
SETTINGS |= {"softcap": (None, 5.0), "sinks": (False, True), "starts": (None, (70, 1, 0))}
PLAIN = Case((330, 33, 0), group=4, head_dim=128, block_size=64, num_splits=2)
USUAL = {
    "plain": PLAIN,
    "plain-D64": replace(PLAIN, head_dim=64),
    "plain-bf16-D256": replace(PLAIN, head_dim=256, dtype=torch.bfloat16),
    "plain-q_head": replace(PLAIN, q_scale="head"),
    "plain-float16": replace(PLAIN, format="float16"),
    "plain-channel": replace(PLAIN, k_scales="channel", v_scales="channel"),
    "masked": replace(PLAIN, window=200, softcap=5.0, sinks=True, starts=(3, 7, 0)),
}


def _is_supported(row):
    """Kernels take no FP8 query with K and V in 16 bits, or with scales per channel."""
    return not row["q_scale"] or (row["format"] != "float16" and row["k_scales"] != "channel")


CASES = USUAL.copy()
for seed, row in enumerate(cover_pairs(SETTINGS, _is_supported, candidates=1000)):
    others = {"lengths": LENGTHS[row["num_splits"]], "kv_heads": 1 + (row["group"] < 7)}
    CASES["-".join(map(str, row.values()))] = Case(**row, **others, v_scales=row["k_scales"], seed=seed)
NVIDIA = ("sm_80", "sm_89", "sm_90", "sm_100")
# a case that is not usual goes to one of the first two, which differ in how they decode FP8
EACH = [(sm, name) for sm in NVIDIA for i, name in enumerate(CASES) if name in USUAL or sm != NVIDIA[i % 2]]
QUERIES = (40, 9, 0)  # extend
STORED = {
    "D64": Case((), head_dim=64),
    "D80": Case((), head_dim=80, k_scales="tensor", v_scales="tensor"),
    "D128": Case((), head_dim=128, center=True, dtype=torch.bfloat16),
    "D256": Case((), head_dim=256, dtype=torch.float32),
    "channels": Case((), head_dim=128, k_scales="channel", v_scales="channel", center=True),
    "e5m2": Case((), head_dim=96, format="e5m2", dtype=torch.bfloat16),
    "float16": Case((), head_dim=64, format="float16", dtype=torch.float32),
}


@pytest.fixture(params=NVIDIA)
def target(request):
    with virtual_gpu(TARGETS[request.param]):
        yield request.param


@pytest.mark.parametrize(("target", "name"), EACH, indirect=["target"])
def test_decode(name, target):
    assert_attention(CASES[name])


@pytest.mark.parametrize(("target", "name"), EACH, indirect=["target"])
def test_extend(name, target):
    case = CASES[name]
    # Triton 3.6 has no fence between copies and matrix units that read them as they are
    unfenced = case.format == "float16" and target in ("sm_90", "sm_100") and triton.__version__[:4] == "3.6."
    with pytest.raises(FaultError, match="proxy fence") if unfenced else nullcontext():
        assert_attention(replace(case, query_lens=tuple(map(min, QUERIES, case.lengths))))


# KV in parts: with decode's config for few rows, with extend's for more, in one row tile or two
PARTS = [(name, (4, 3, 0)) for name in USUAL]
PARTS += ("plain", QUERIES), ("masked", QUERIES), ("plain-channel", (12, 7, 0)), ("plain-q_head", (30, 1, 0))


@pytest.mark.parametrize(("name", "queries"), PARTS)
def test_extend_in_parts(name, queries, target):
    assert_attention(replace(CASES[name], query_lens=queries, extend_splits=5))


@pytest.mark.parametrize("target", NVIDIA)
def test_prompts_that_torch_attends_to(target):
    usual = [case for name, case in USUAL.items() if name not in ("masked", "plain-q_head", "plain-channel")]
    e5m2 = replace(PLAIN, format="e5m2", head_dim=96, k_scales="tensor", v_scales="channel", block_size=16)
    with virtual_gpu(TARGETS[target], configs={"extend": Config(64, 4, pairs=1)}):
        for case in (*usual, replace(e5m2, starts=(70, 1, 0)), replace(e5m2, head_dim=80, block_size=48)):
            assert_attention(replace(case, query_lens=tuple(map(min, QUERIES, case.lengths))))


def test_a_batch_that_more_than_a_warp_plans(target):
    lengths = tuple(range(0, 240, 6))
    case = Case(lengths, kv_heads=1, block_size=64, num_splits=30, extend_splits=30)
    assert_attention(case)
    assert_attention(replace(case, query_lens=tuple(min(2, n) for n in lengths)))


@pytest.mark.parametrize("name", STORED)
def test_append(name, target):
    assert_stored(STORED[name])


@pytest.mark.parametrize("format", ["e4m3fn", "e5m2"])
def test_all_bfloat16_values_are_rounded(format, target):
    assert_rounded(format)


@pytest.mark.parametrize(("format", "dtype"), [("e4m3fn", torch.float16), ("e5m2", torch.bfloat16)])
def test_every_pair_of_codes_is_gathered_exactly(format, dtype, target):
    assert_gathered(format, dtype)


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int16, torch.int32, torch.int64)
# of 64 bytes each; the second does not begin at a multiple of 16
TENSORS = {(d, at): torch.zeros(66, dtype=d)[at : at + 64] for d in (*DTYPES, torch.uint8) for at in (0, 1)}
# sizes and strides
INTEGERS = [0, *(2**n + d for n in (0, 1, 4, 5, 8, 30, 31, 32, 40) for d in (-1, 0, 1))]
ARGUMENTS = {"none": None, **{str(name): x for name, x in TENSORS.items()}, **{str(n): n for n in INTEGERS}}


@triton.jit
def takes_one(argument):
    pass


def test_what_triton_compiles_apart_has_keys_apart():
    triton_keys, ours = {}, {}
    for name, value in ARGUMENTS.items():
        (triton_keys[name],) = launches(TARGETS["sm_90"], lambda value=value: takes_one[(1,)](value))
        ours[name] = specialization(value)
    pairs = [pair for pair in itertools.combinations(ARGUMENTS, 2) if ours[pair[0]] == ours[pair[1]]]
    assert [(one, other) for one, other in pairs if triton_keys[one] != triton_keys[other]] == []
    # and these kinds it does compile apart, or nothing was tested
    assert len({str(found) for found in triton_keys.values()}) > 2 * len(DTYPES)
