"""What a kernel may not do is noticed, and what is next to it is not."""

import pytest
import torch
from small_kernels import run
from virtual_gpu.program import FaultError

ADDRESS = "mov.b32 %r8, global_smem; shl.b32 %r9, %r2, 2; add.s32 %r8, %r8, %r9;"
LOAD = "ld.global.b32 {%r5}, [%rd1];"
STORE = "st.global.b32 [%rd0], {%r5};"
# the next thread's four bytes, where the last one has the first's
OTHER = """add.s32 %r10, %r2, 1; and.b32 %r10, %r10, 63; shl.b32 %r10, %r10, 2;
    mov.b32 %r11, global_smem; add.s32 %r11, %r11, %r10;"""
COPY = "cp.async.ca.shared.global [%r8], [%rd1], 4; cp.async.commit_group;"
WRITE, READ = "st.shared.b32 [%r8], %r5;", "ld.shared.b32 %r5, [%r11];"
FIRST_WARP = "setp.lt.u32 %p1, %r2, 32; @!%p1 bra DONE;"

# what is right, what is wrong about it, and what is said
PAIRS = {
    "a race to read": (f"{LOAD} {WRITE} bar.sync 0; {READ} {STORE}", "bar.sync 0;", "race: read"),
    "a race to overwrite": (
        f"{LOAD} {WRITE} bar.sync 0; {READ} bar.sync 0; {WRITE} {STORE}",
        "bar.sync 0;",
        "race: write to what another thread read",
    ),
    "a copy on its way": (
        f"{COPY} cp.async.wait_group 0; bar.sync 0; {READ} {STORE}",
        "cp.async.wait_group 0;",
        "that a copy has not delivered",
    ),
    "a copy that only its thread waited for": (
        f"{COPY} cp.async.wait_group 0; bar.sync 0; {READ} {STORE}",
        "bar.sync 0;",
        "race: read",
    ),
    "a copy of a group that is not closed": (
        f"{COPY} cp.async.wait_group 0; bar.sync 0; {READ} {STORE}",
        "cp.async.commit_group;",
        "that a copy has not delivered",
    ),
    "memory that was not written": (
        f"{LOAD} {WRITE} bar.sync 0; {READ} {STORE}",
        WRITE,
        "never written",
    ),
    "a barrier for some": (
        f"{LOAD} {FIRST_WARP} add.s32 %r5, %r5, 1; DONE: {STORE}",
        None,
        "not all threads",
    ),
}
WRONG = {
    "a barrier for some": f"{LOAD} {FIRST_WARP} bar.sync 0; DONE: bar.sync 0; bar.sync 0; {STORE}"
}


def replaced_last(text, removed):
    assert removed in text
    return "".join(text.rpartition(removed)[::2])


@pytest.mark.parametrize("name", PAIRS)
def test_faults_in_shared_memory(name):
    right, removed, message = PAIRS[name]
    wrong = WRONG.get(name) or replaced_last(right, removed)
    given, got = torch.arange(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    run(ADDRESS + OTHER + right, got, given, threads=64, shared=256)
    with pytest.raises(FaultError, match=message):
        run(ADDRESS + OTHER + wrong, got, given, threads=64, shared=256)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 {%r5}, [%rd1 + 4];", "beyond every tensor"),
        ("ld.global.b32 {%r5}, [%rd1 + -4];", "beyond every tensor"),
        ("ld.global.b32 {%r5}, [%rd1 + 2];", "not aligned"),
        ("st.global.b32 [%rd1 + 128], {%r5};", "beyond every tensor"),
        ("ld.param.b64 %rd1, [small_param_1]; st.global.b32 [%rd1], {%r2};", "different values"),
        ("mov.b32 %r8, global_smem; st.shared.b32 [%r8+64], %r2;", "beyond 64"),
        ("mov.b32 %r8, global_smem; st.shared.b32 [%r8+2], %r2;", "not aligned"),
        ("mov.b32 %r8, global_smem; st.shared.b32 [%r8], %r2;", "different values"),
        ("setp.lt.u32 %p1, %r2, 9; @%p1 shfl.sync.bfly.b32 %r6, %r2, 5, 31, -1;", "whole warps"),
        ("AGAIN: bra AGAIN;", "does not end"),
        ("tanh.approx.f32 %r5, %r2;", "unknown instruction"),
        ("ld.volatile.global.b32 {%r5}, [%rd1];", "unknown"),
    ],
)
def test_faults(body, message):
    given, got = torch.arange(32, dtype=torch.int32), torch.empty(32, dtype=torch.int32)
    with pytest.raises(FaultError, match=message):
        run(body, got, given, shared=64)


def test_a_barrier_of_one_warp():
    """It is the program's where that has no other; of two warps it says nothing."""
    given = torch.arange(64, dtype=torch.int32)
    for threads in (32, 64):
        own = (ADDRESS + OTHER).replace("63", str(threads - 1))
        body = own + f"{LOAD} {WRITE} bar.warp.sync -1; {READ} {STORE}"
        got = torch.empty(threads, dtype=torch.int32)
        if threads == 32:
            run(body, got, given[:32], threads=32, shared=256)
            assert torch.equal(got, given[:32].roll(-1))
            body = body.replace("bar.warp.sync -1;", "")
        with pytest.raises(FaultError, match="race: read"):
            run(body, got, given[:threads], threads=threads, shared=256)
