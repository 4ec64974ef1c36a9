"""Launchers tell apart what Triton compiles apart, by its own rules, whatever its version."""

import itertools

import torch
import triton
from kernels.offline import launches

from fp8kv_runtime.kernels.targets import TARGETS
from fp8kv_runtime.storage import specialization

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int16, torch.int32, torch.int64)
# of 64 bytes each; the second does not begin at a multiple of 16
TENSORS = {
    f"{dtype} at {first}": torch.zeros(66, dtype=dtype)[first : first + 64]
    for dtype in (*DTYPES, torch.uint8)
    for first in (0, 1)
}
# sizes and strides
INTEGERS = [0, *(2**n + d for n in (0, 1, 4, 5, 8, 30, 31, 32, 40) for d in (-1, 0, 1))]
ARGUMENTS = {"none": None, **TENSORS, **{str(n): n for n in INTEGERS}}


@triton.jit
def takes_one(argument):
    pass


def test_what_triton_compiles_apart_has_keys_apart():
    triton_keys = {
        name: launches(TARGETS["sm_90"], lambda value=value: takes_one[(1,)](value))
        for name, value in ARGUMENTS.items()
    }
    assert {n: len(f) for n, f in triton_keys.items() if len(f) != 1} == {}
    confused = [
        (one, other)
        for one, other in itertools.combinations(ARGUMENTS, 2)
        if triton_keys[one] != triton_keys[other]
        and specialization(ARGUMENTS[one]) == specialization(ARGUMENTS[other])
    ]
    assert confused == []
    # and these kinds it does compile apart, or nothing was tested
    assert len({str(found) for found in triton_keys.values()}) > 2 * len(DTYPES)
