"""The instructions of the interpreter against torch; what a kernel may not do is noticed, and no more."""

import random
from fractions import Fraction
from math import frexp

import pytest
import torch
from small_kernels import elementwise, run
from virtual_gpu.program import FaultError

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ALL_16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16)


def floats(count=2**18):
    """All bfloat16 values and their halfway points to the next, and random bits."""
    all_bits = torch.arange(2**16, dtype=torch.int64) << 16
    random_bits = torch.randint(0, 2**32, (count,), generator=torch.Generator().manual_seed(0))
    bits = torch.cat([all_bits, all_bits | 0x8000, all_bits | 0x8001, random_bits])
    return bits.to(torch.int32).view(torch.float32)


def same(got, want):
    """Equal, bit for bit but for those of NaN."""
    as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[want.element_size()]
    nan = want.isnan()
    assert got.isnan()[nan].all()
    assert torch.equal(got.view(as_bits)[~nan], want.view(as_bits)[~nan])


@pytest.mark.parametrize("kind", FP8)
def test_fp8_is_decoded_and_encoded_as_torch_casts_what_fits(kind):
    decoded = elementwise(f"cvt.rn.f16x2.{kind}x2 %d, %a;", torch.int32, ALL_16)
    same(decoded.view(torch.float16), ALL_16.view(FP8[kind]).to(torch.float16))
    x = floats()  # the middles of two codes are bfloat16 values
    body = f"mov.b64 {{%r5, %r6}}, %a; cvt.rn.satfinite.{kind}x2.f32 %d, %r6, %r5;"
    encoded = elementwise(body, torch.int16, x.view(torch.int64)).view(FP8[kind])
    limit = torch.finfo(FP8[kind]).max
    same(encoded.float(), x.clamp(-limit, limit).to(FP8[kind]).float())


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_sixteen_bits_to_float_and_back(kind, dtype):
    same(elementwise(f"cvt.f32.{kind} %d, %a;", torch.float32, ALL_16), ALL_16.view(dtype).float())
    x = floats()
    body = f"mov.b64 {{%r5, %r6}}, %a; cvt.rn.{kind}x2.f32 %d, %r6, %r5;"
    same(elementwise(body, torch.int32, x.view(torch.int64)).view(dtype), x.to(dtype))


def rounded(value):
    """The Fraction as the nearest float32, ties to even; normal values only."""
    step = Fraction(2) ** (frexp(value)[1] - 24)
    return float(round(value / step) * step)


def test_multiply_add_rounds_once():
    rng, rows = random.Random(0), []
    for _ in range(2048):
        if rng.random() < 0.5:  # 25 bits, of which the last decides: by c alone
            a, b = 2**12 + 1 + 2 * rng.randrange(2**11), 2**11 + 1 + 2 * rng.randrange(2**10)
            c = rng.choice([1, -1]) * 2.0 ** rng.choice([-40, -20, -2, 1])
        else:
            a, b = (1 + rng.randrange(2**23) / 2**23 for _ in "ab")
            c = rng.choice([1, -1]) * 2.0 ** rng.choice([-60, -47, -25, 0, 24])
        rows.append((a, b, c))
    a, b, c = (x.contiguous() for x in torch.tensor(rows, dtype=torch.float64).float().T)
    got = elementwise("fma.rn.f32 %d, %a, %b, %c;", torch.float32, a, b, c)
    numbers = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    assert got.tolist() == [rounded(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in numbers]
    assert (got != (a.double() * b.double() + c.double()).float()).any()  # some cases need it


def test_lop3_of_every_table():
    words = (0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA)  # each byte of the result is the table
    a, b, c = (torch.full((256,), w - 2**32, dtype=torch.int32) for w in words)
    for table in range(256):
        got = elementwise(f"lop3.b32 %d, %a, %b, %c, {table:#x};", torch.int32, a, b, c)
        assert (got.view(torch.uint8) == table).all(), table


def test_prmt_of_every_selector():
    selectors = torch.arange(2**16, dtype=torch.int32)
    body = "mov.b32 %r6, 0x83020100; mov.b32 %r7, 0x07F60504; prmt.b32 %d, %r6, %r7, %a;"
    got = elementwise(body, torch.int32, selectors).view(torch.uint8).view(-1, 4)
    both, signs = (0x00, 0x01, 0x02, 0x83, 0x04, 0x05, 0xF6, 0x07), (0, 0, 0, 255, 0, 0, 255, 0)
    table = torch.tensor([*both, *signs], dtype=torch.uint8)
    assert torch.equal(got, table[(selectors[:, None] >> torch.arange(0, 16, 4)) & 15])


@pytest.mark.parametrize(("k", "kind"), [(16, "f16"), (32, "e4m3"), (32, "e5m2")])
def test_matrices_of_a_warp(k, kind):
    """Fragments as the PTX ISA draws them: of lane / 4 and lane % 4, then of a register's values."""
    e, dtype = k // 8, FP8.get(kind, torch.float16)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((16, k), (k, 8)))
    c = torch.randn(16, 8, generator=generator)
    fragments_a = a.view(2, 8, 2, 4, e).permute(1, 3, 2, 0, 4).reshape(32, 4 * e)
    fragments_b = b.view(2, 4, e, 8).permute(3, 1, 0, 2).reshape(32, 2 * e)
    got = torch.empty(32, 4)
    body = f"""ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd1]; ld.global.b64 {{%rd9}}, [%rd2];
        mov.b64 {{%r8, %r9}}, %rd9; ld.global.v4.b32 {{%r12, %r13, %r14, %r15}}, [%rd3];
        mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{%r12, %r13, %r14, %r15}},
        {{%r4, %r5, %r6, %r7}}, {{%r8, %r9}}, {{%r12, %r13, %r14, %r15}};
        st.global.v4.b32 [%rd0], {{%r12, %r13, %r14, %r15}};"""
    want = (a.double() @ b.double() + c.double()).float()
    c, want = (x.view(2, 8, 4, 2).permute(1, 2, 0, 3).reshape(32, 4) for x in (c, want))
    run(body, got, fragments_a, fragments_b, c)
    assert torch.equal(got, want)


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
