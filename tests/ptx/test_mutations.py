"""What the interpreter is worth: of wrong PTX, nine in ten are noticed."""

import os
import random
import sys
from dataclasses import replace

import pytest
import torch
from checks import assert_output, assert_stored, without_nan_signs
from oracle import attention
from paged import Case, build
from ptx_mutants import KINDS, mutants
from virtual_gpu.launch import virtual_gpu
from virtual_gpu.program import FaultError

from fp8kv_runtime import reference
from fp8kv_runtime.kernels import append_kv
from fp8kv_runtime.kernels.targets import TARGETS

MOST = int(os.environ.get("PTX_MUTANTS", "1"))  # of a kind and a kernel
# three sequences of four that the kernel could take
MASKED = Case(
    (330, 33, 70), group=16, kv_heads=1, head_dim=128, block_size=64, softcap=5.0, sinks=True,
    starts=(3, 7, 0),
)  # fmt: skip
PLAIN = Case((330, 33, 70), group=2, kv_heads=1, block_size=16)
EXTENDED = replace(MASKED, group=2, window=250, query_lens=(64, 9, 0))
# rows whose own position, and whose window, is in every eighth of a tile; padding up to each
EXTEND_ENDS = [((330, 33, 70), 1), ((356, 65, 9), 1), ((74, 84, 104), 1)]
PADDING = [8 * i + 2 * (i // 2) + odd for i in range(8) for odd in (0, 1)]
PADDED = {
    "starts": tuple(PADDING),
    "lengths": tuple(start + 10 for start in PADDING),
    "query_lens": (4,) * len(PADDING),
}
STORED = Case((), head_dim=80)
INF, NAN = float("inf"), float("nan")
SPECIAL = [
    *(0.0, -0.0, INF, -INF, NAN, 1.0, -3.0, 448.0, -448.0, 464.0, 500.0, -1e4, 2.0**-6, 2.0**-7),
    *(2.0**-9, 2.0**-10, -(2.0**-10), 2.0**-10 * 1.01, 2.0**-10 * 0.99, 17.0, -19.0, 2.0**-9 * 2.5),
]


def batches(case, *others):
    """The layer with other lengths and numbers of parts, for which nothing is compiled."""
    for lengths, num_splits in others:
        starts = case.starts and tuple(map(min, (20, 7, 55 - num_splits, 0), lengths))
        yield replace(case, lengths=lengths, num_splits=num_splits, starts=starts)


# parts whose first, second and later tiles end in every quarter; of several tiles, and of one
ENDS = [
    *(((330, 33, 70), 2), ((400, 65, 0), 2), ((74, 84, 104), 1), ((119, 138, 158), 1)),
    *(((183, 202, 212), 1), ((232, 250, 90), 1), ((900, 33, 150), 3), ((100, 20, 55), 4)),
    ((70, 33, 130, 20), 2),  # as many sequences as the kernel takes
]
PARTS = [
    *(((330, 33, 70), 10), ((2040, 0, 0), 16), ((1000, 33, 70), 16), ((700, 200, 70), 12)),
    *(((500, 300, 129), 9), ((900, 300, 280), 11), ((64, 0, 2000), 14)),
]


def random_batches(least, most):
    """Lengths, and numbers of parts that one reduce is compiled for."""
    rng = random.Random(0)
    for largest in 2 * (100, 900):
        yield (65, rng.randint(0, largest), rng.randint(0, largest)), rng.randint(least, most)


CASES = {
    "decode": list(batches(MASKED, *ENDS, *random_batches(1, 9))),
    "reduce": list(batches(PLAIN, *PARTS, *random_batches(9, 16))),
    "extend": [*batches(EXTENDED, *EXTEND_ENDS), replace(EXTENDED, **PADDED)],
    "append_kv": [STORED],
}
RUNS = [
    ("sm_80", "append_kv"), ("sm_90", "append_kv"), ("sm_80", "decode"), ("sm_90", "decode"),
    ("sm_80", "reduce"), ("sm_90", "reduce"), ("sm_90", "extend"), ("sm_100", "extend"),
]  # fmt: skip


def check(case):
    """What fails where the kernels are wrong; the answer is found once."""
    if not case.lengths:
        return lambda: (assert_stored(case), assert_special_values_stored(case))
    batch = build(case)
    want = attention(batch)
    return lambda: assert_output(batch.attend("kernel"), want, "kernel", case)


def assert_special_values_stored(case):
    """The reference's bytes and counts, of values at which rounding and counting change."""
    some, rng = torch.tensor(SPECIAL), torch.Generator().manual_seed(0)
    key, value = some[torch.randint(len(some), (2, 64, 2, case.head_dim), generator=rng)].half()
    key[16:32] = value[16:32] = 1  # a program's tokens, with one value to count
    key[20, :, 7] = value[20, :, 7] = 1e4
    made = []
    for module in (reference, append_kv):
        blocks = build(replace(case, lengths=(64,))).blocks
        counts = torch.zeros(2, case.kv_heads, 3, dtype=torch.int64)
        blocks = replace(blocks, k_scale=torch.ones(2), v_scale=torch.ones(2), counts=counts)
        module.append_kv(key, value, blocks, torch.arange(64))
        made.append((without_nan_signs(blocks.codes), counts))
    (want, counted), (got, got_counted) = made
    assert torch.equal(got, want)
    assert torch.equal(got_counted, counted)


@pytest.mark.parametrize(("target", "kernel"), RUNS)
def test_most_wrong_instructions_are_noticed(target, kernel):
    checks, texts = [check(case) for case in CASES[kernel]], set()

    def run(change):
        with virtual_gpu(
            TARGETS[target], lambda name, text: change(text) if name == f"{kernel}_kernel" else text
        ):
            for each in checks:
                each()

    def is_noticed(mutant):
        try:
            run(lambda text: mutant)
        except (AssertionError, FaultError):
            return True
        return False

    run(lambda text: texts.add(text) or text)
    (text,) = texts  # one kernel for all batches
    wrong = [each for kind in KINDS for each in mutants(text, kind, MOST)]
    missed = [name for name, mutant in wrong if not is_noticed(mutant)]
    sys.stdout.write(f"{target} {kernel}: {len(wrong) - len(missed)} of {len(wrong)} noticed\n")
    sys.stdout.writelines(f"  {name}\n" for name in missed)
    assert len(wrong) >= 3
    # docs/runtime.md says which, and why: of tensor memory's barriers and fences several suffice
    assert len(missed) <= max(2, len(wrong) / (4 if target == "sm_100" else 8))
