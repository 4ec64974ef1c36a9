"""The interpreter's instructions against torch, over all patterns where there are few enough."""

import random
from fractions import Fraction
from math import frexp

import pytest
import torch
from small_kernels import elementwise, run

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
