"""What the interpreter is worth: of wrong PTX, nine in ten are noticed."""

import os
import re
import sys
from dataclasses import replace

import pytest
from checks import assert_output, assert_stored
from oracle import attention
from paged import Case, build
from virtual_gpu.launch import virtual_gpu
from virtual_gpu.program import FaultError

from fp8kv_runtime.kernels.targets import TARGETS

MOST = int(os.environ.get("PTX_MUTANTS", "1"))  # of a kind and a kernel
# three sequences of four that the kernel could take
PLAIN = Case((330, 33, 70), group=2, kv_heads=1, block_size=16)
MASKED = replace(PLAIN, group=16, head_dim=128, block_size=64, softcap=5.0, sinks=True, starts=(3, 7, 0))
EXTENDED = replace(MASKED, group=2, window=250, query_lens=(64, 9, 0))
# rows whose own position, and whose window, is in every eighth of a tile; padding up to each
EXTEND_ENDS = [((330, 33, 70), 1), ((356, 65, 9), 1), ((74, 84, 104), 1)]
PADDING = [8 * i + 2 * (i // 2) + odd for i in range(8) for odd in (0, 1)]
ENDS_OF_PADDING = {"starts": tuple(PADDING), "lengths": tuple(start + 10 for start in PADDING)}
PADDED = replace(EXTENDED, query_lens=(4,) * len(PADDING), **ENDS_OF_PADDING)


def batches(case, *others):
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


CASES = {"decode": list(batches(MASKED, *ENDS)), "reduce": list(batches(PLAIN, *PARTS))}
CASES |= {"extend": [*batches(EXTENDED, *EXTEND_ENDS), PADDED], "append_kv": [Case((), head_dim=80)]}
RUNS = [
    ("sm_80", "append_kv"), ("sm_90", "append_kv"), ("sm_80", "decode"), ("sm_90", "decode"),
    ("sm_80", "reduce"), ("sm_90", "reduce"), ("sm_90", "extend"), ("sm_100", "extend"),
]  # fmt: skip


def check(case):
    if not case.lengths:
        return lambda: assert_stored(case)
    batch = build(case)
    want = attention(batch)
    return lambda: assert_output(batch.attend("kernel"), want, "kernel", case)


# what is looked for, and what takes its place; where it names an instruction, that is gone
KINDS = {
    "barrier": (r"\bbar\.(?:sync\s+0|warp\.sync\s+-1);", ""),
    "wait": (r"cp\.async\.wait_group\s+(\d+);", lambda m: f"cp.async.wait_group {int(m[1]) + 1};"),
    "copy": (r"(cp\.async\.c\w\.[^;]*, 0x[0-9a-f]+), %r\d+;", r"\1, 0;"),
    "prmt": (r"(prmt\.b32 [^;]*, )0x(\w+?)(U?);", lambda m: f"{m[1]}0x{_swapped(m[2])}{m[3]};"),
    "lop3": (r"(lop3\.b32 [^;]*, )0x(\w+);", lambda m: f"{m[1]}{int(m[2], 16) ^ 0x10:#x};"),
    "mask": (r"setp\.(lt|le|gt|ge)\.(s\d)", lambda m: f"setp.{_OFF_BY_ONE[m[1]]}.{m[2]}"),
    # of sums: a maximum of fewer values is an origin of the softmax that is as good
    "shuffle": (r"(shfl\.sync\.bfly\.b32 [^;]*, )(\d+)(, 31, -1;\s*(?:[$.][^\n]*\s*)*add)", r"\g<1>0\3"),
    "matrix": (r"(ldmatrix[^;]*\{%r\d+, )(%r\d+), (%r\d+)(, %r\d+\})", r"\1\3, \2\4"),
}
_BARRIER, _BRANCH = r"bar\.(?:warp\.)?sync", r"\bbra\b|\$L__BB"
_OFF_BY_ONE = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}


def _separates(text, match):
    """Whether shared memory is used on both sides, before the barriers next to this one."""
    before = ["", *re.split(f"({_BARRIER}|{_BRANCH})", text[: match.start()])][-2:]
    after = [*re.split(f"({_BARRIER}|{_BRANCH})", text[match.end() :]), ""][1::-1]
    return all("shared" in side or not re.match(_BARRIER, end) for end, side in (before, after))


def _swapped(selector):
    """The last two digits the other way round; of bytes picked alike, the next bytes."""
    if len(set(selector[-2:])) == 1:
        return selector[:-1] + f"{int(selector[-1], 16) ^ 1:x}"
    return selector[:-2] + selector[-1] + selector[-2]


def mutants(text, kind, most):
    """Name and PTX of at most `most` mutants of a kind, evenly spread over the kernel.

    Left out is what cannot matter, and the plan of the parts, whose steps make up for one another.
    """
    pattern, new = KINDS[kind]
    found = [m for m in re.finditer(pattern, text) if kind != "barrier" or _separates(text, m)]
    for plan in re.findall(r'\.file\s+(\d+)\s+"[^"]*split\.py"', text):
        found = [m for m in found if re.findall(r"\.loc\s+(\d+)", text[: m.start()])[-1:] != [plan]]
    step = max(1, -(-len(found) // most))
    for number, match in enumerate(found[::step]):
        line = " ".join(text[match.start() :].split(";")[0].split())
        put = new(match) if callable(new) else match.expand(new)
        yield f"{kind} {number * step} {line[:60]}", text[: match.start()] + put + text[match.end() :]


@pytest.mark.parametrize(("target", "kernel"), RUNS)
def test_most_wrong_instructions_are_noticed(target, kernel):
    checks, texts = [check(case) for case in CASES[kernel]], set()

    def run(change):
        def of_kernel(name, text):
            return change(text) if name == f"{kernel}_kernel".replace("extend", "decode") else text

        with virtual_gpu(TARGETS[target], of_kernel):
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
    # of tensor memory's barriers several suffice
    assert len(missed) <= max(2, len(wrong) / (4 if target == "sm_100" else 8))
