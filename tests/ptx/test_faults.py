"""What a kernel may not do is noticed, and what is next to it is not."""

import pytest
import torch
from small_kernels import run
from virtual_gpu.program import FaultError

ADDRESS = "mov.b32 %r8, global_smem; shl.b32 %r9, %r2, 2; add.s32 %r8, %r8, %r9;"
LOAD, STORE = "ld.global.b32 {%r5}, [%rd1];", "st.global.b32 [%rd0], {%r5};"
HALF_A_WARP = "setp.lt.u32 %p1, %r2, 16; @!%p1 bra DONE;"
# the next thread's four bytes, where the last one has the first's
OTHER = """add.s32 %r10, %r2, 1; and.b32 %r10, %r10, 63; shl.b32 %r10, %r10, 2;
    mov.b32 %r11, global_smem; add.s32 %r11, %r11, %r10;"""
GROUP, WAIT, BARRIER = "cp.async.commit_group;", "cp.async.wait_group 0;", "bar.sync 0;"
COPY = f"cp.async.ca.shared.global [%r8], [%rd1], 4; {GROUP}"
WRITE, READ = "st.shared.b32 [%r8], %r5;", "ld.shared.b32 %r5, [%r11];"
EXCHANGED = f"{LOAD} {WRITE} {BARRIER} {READ} {STORE}"
COPIED = f"{COPY} {WAIT} {BARRIER} {READ} {STORE}"
OVERWRITTEN = f"{LOAD} {WRITE} {BARRIER} {READ} {BARRIER} {WRITE} {STORE}"
# what is right, what is wrong without, and what is said
PAIRS = [
    (EXCHANGED, BARRIER, "race: read"),
    (OVERWRITTEN, BARRIER, "race: write to what another thread read"),
    (COPIED, WAIT, "that a copy has not delivered"),
    (COPIED, BARRIER, "race: read"),  # a copy that only its thread waited for
    (COPIED, GROUP, "that a copy has not delivered"),  # of a group that is not closed
    (EXCHANGED, WRITE, "never written"),
]


def without_last(text, removed):
    assert removed in text
    return "".join(text.rpartition(removed)[::2])


@pytest.mark.parametrize(("right", "removed", "message"), PAIRS)
def test_faults_in_shared_memory(right, removed, message):
    numbers, got = torch.arange(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    run(ADDRESS + OTHER + right, got, numbers, threads=64, shared=256)
    with pytest.raises(FaultError, match=message):
        run(ADDRESS + OTHER + without_last(right, removed), got, numbers, threads=64, shared=256)


def test_faults():
    for body, message in (
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
        (f"{HALF_A_WARP} bar.sync 0; DONE: bar.sync 0; bar.sync 0;", "not all threads"),
    ):
        numbers = torch.arange(32, dtype=torch.int32)
        with pytest.raises(FaultError, match=message):
            run(body, torch.empty(32, dtype=torch.int32), numbers, shared=64)


def test_a_warps_barrier_orders_a_program_of_one_warp_alone():
    body = ADDRESS + OTHER + EXCHANGED.replace(BARRIER, "bar.warp.sync -1;")
    numbers, got = torch.arange(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    run(body.replace("63", "31"), got[:32], numbers[:32], threads=32, shared=256)
    assert torch.equal(got[:32], numbers[:32].roll(-1))
    with pytest.raises(FaultError, match="race: read"):
        run(body, got, numbers, threads=64, shared=256)


# two matrices of ones, of 64 rows and of 8, that are one: 16 float16 a row, in pieces of 8 x 8
ONES = """mov.b32 %r8, global_smem; shl.b32 %r9, %r2, 4; add.s32 %r8, %r8, %r9;
    mov.b32 %r10, 0x3C003C00; setp.ne.s32 %p2, %r2, %r2;
    st.shared.v4.b32 [%r8], {%r10, %r10, %r10, %r10}; fence.proxy.async.shared::cta; bar.sync 0;"""
PIECES = 1024 >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32
AGAIN = "st.shared.b32 [%r8], %r10;"
WARP_GROUP = f"""{ONES} mov.b64 %rd9, {PIECES};
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16
        {{%r20, %r21, %r22, %r23}}, {{%r10, %r10, %r10, %r10}}, %rd9, %p2, 1, 1, 0;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    bar.sync 0; {AGAIN} st.global.b32 [%rd0], {{%r20}};"""
LANES = "and.b32 %r12, %r2, 96; shl.b32 %r12, %r12, 16;"
TENSOR_MEMORY = f"""{LANES} mov.b32 %r5, 0x41800000;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r12], {{%r5}}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r6}}, [%r12]; tcgen05.wait::ld.sync.aligned;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r12], {{%r2}}; st.global.b32 [%rd0], {{%r6}};"""
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r13];"
TRY = "mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r13], 0; @!%p3 bra WAIT;"
MBARRIER = f"""{ONES} {LANES} mov.b64 %rd9, {PIECES | 1 << 46};
    mov.b32 %r13, global_smem; add.s32 %r13, %r13, 2048; mov.b32 %r14, 0;
    mov.b32 %r15, {1 << 4 | 8 // 8 << 17 | 64 // 16 << 24}; setp.eq.s32 %p1, %r2, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r13], 1; barrier.sync 0;
    @%p1 tcgen05.mma.cta_group::1.kind::f16 [%r14], %rd9, %rd9, %r15, %p2; @%p1 {COMMIT}
    WAIT: {TRY} tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {{%r6}}, [%r12], 4; {AGAIN}
    bar.sync 0; @%p1 mbarrier.inval.shared::cta.b64 [%r13]; st.global.b32 [%rd0], {{%r6}};"""
GROUP_WAIT = "wgmma.wait_group.sync.aligned 0;"
TENSOR_STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r12], {%r5};"
# what is right, what is wrong without, and what is said; where only registers would be wrong, they are NaN
MATRIX_UNITS = [
    (WARP_GROUP.replace(AGAIN, ""), GROUP_WAIT, None),
    (WARP_GROUP, GROUP_WAIT, "what a matrix unit may still read"),
    (WARP_GROUP, "bar.sync 0;", "another thread read"),
    (WARP_GROUP, "fence.proxy.async.shared::cta;", "before a proxy fence"),
    (TENSOR_MEMORY, TENSOR_STORE, "never written"),
    (TENSOR_MEMORY, "tcgen05.wait::st.sync.aligned;", "still stored to"),
    (TENSOR_MEMORY, "tcgen05.wait::ld.sync.aligned;", "still loaded from"),
    (MBARRIER, "barrier.sync 0;", "race: read"),  # it began for one thread
    (MBARRIER, "bar.sync 0;", "another thread read"),  # it ends while others wait
    (MBARRIER.replace(AGAIN, ""), TRY, "will arrive there|matrix instruction writes"),
    (MBARRIER, f"@%p1 {COMMIT}", "nothing completes"),
]


@pytest.mark.parametrize(("right", "removed", "message"), MATRIX_UNITS)
def test_faults_of_matrix_units(right, removed, message):
    got = torch.empty(128)
    run(right, got, threads=128, shared=2056)
    assert (got == 16).all()  # sums of 16 ones
    wrong = without_last(right, removed)
    if message is None:
        run(wrong, got, threads=128, shared=2056)
        assert got.isnan().all()
        return
    with pytest.raises(FaultError, match=message):
        run(wrong, got, threads=128, shared=2056)
