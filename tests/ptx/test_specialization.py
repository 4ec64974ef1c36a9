"""Launchers tell apart what Triton compiles apart, by its own rules, whatever its version."""

import itertools

import torch
import triton
from kernels.offline import launches

from fp8kv_runtime.kernels.targets import TARGETS
from fp8kv_runtime.storage import specialization

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
