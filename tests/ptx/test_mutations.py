"""What the interpreter is worth: of wrong PTX, nine in ten are noticed."""

import sys
from dataclasses import replace

import pytest
from checks import assert_output, assert_stored
from oracle import attention
from paged import Case, build
from ptx_mutants import KINDS, mutants
from virtual_gpu.launch import virtual_gpu
from virtual_gpu.program import FaultError

from fp8kv_runtime.kernels.targets import TARGETS

MOST = 12  # of a kind and a kernel
# three sequences of four that the kernel could take; parts long enough to load ahead
MASKED = Case(
    (330, 33, 70), group=4, kv_heads=1, head_dim=128, block_size=64, num_splits=2, window=250,
    softcap=5.0, sinks=True, starts=(3, 7, 0),
)  # fmt: skip
PLAIN = Case((330, 33, 70), group=2, kv_heads=2, head_dim=128, block_size=16, num_splits=20)
OTHERS = {"lengths": (400, 65, 0), "seed": 1}  # of another batch, with the same kernels
QUERIES = {"query_lens": (40, 9, 0)}
STORED = Case((), head_dim=80)
CASES = {
    "decode": (MASKED, replace(MASKED, **OTHERS, starts=(200, 5, 0))),
    "reduce": (PLAIN, replace(PLAIN, **OTHERS)),
    "extend": (replace(MASKED, **QUERIES), replace(MASKED, **QUERIES, **OTHERS)),
    "append_kv": (STORED, replace(STORED, seed=1)),
}
RUNS = [
    ("sm_80", "decode"), ("sm_80", "reduce"), ("sm_80", "append_kv"), ("sm_89", "extend"),
    ("sm_90", "decode"), ("sm_90", "extend"), ("sm_100", "decode"), ("sm_100", "extend"),
]  # fmt: skip


def check(case):
    """What fails where the kernels are wrong; the answer is found once."""
    if not case.lengths:
        return lambda: assert_stored(case)
    batch = build(case)
    want = attention(batch)
    return lambda: assert_output(batch.attend("kernel"), want, "kernel", case)


class Run:
    """The checks of one kernel on one target, as it is and with other PTX."""

    def __init__(self, target, kernel):
        self.target, self.kernel = TARGETS[target], f"{kernel}_kernel"
        self.checks = [check(case) for case in CASES[kernel]]
        self.texts = set()
        with virtual_gpu(self.target, self._keep):
            for each in self.checks:
                each()

    def _keep(self, name, text):
        if name == self.kernel:
            self.texts.add(text)
        return text

    def notices(self, mutant):
        """Whether a check fails where the kernel has this PTX."""
        with virtual_gpu(self.target, lambda name, text: mutant if name == self.kernel else text):
            for each in self.checks:
                try:
                    each()
                except (AssertionError, FaultError):
                    return True
        return False


@pytest.mark.parametrize(("target", "kernel"), RUNS)
def test_wrong_instructions_are_noticed(target, kernel):
    run = Run(target, kernel)
    (text,) = run.texts  # one kernel for all batches
    wrong = [each for kind in KINDS for each in mutants(text, kind, MOST)]
    missed = [name for name, mutant in wrong if not run.notices(mutant)]
    sys.stdout.write(f"{target} {kernel}: {len(wrong) - len(missed)} of {len(wrong)} noticed\n")
    sys.stdout.writelines(f"  {name}\n" for name in missed)
    assert len(wrong) > 20
    assert len(missed) <= len(wrong) / 10
