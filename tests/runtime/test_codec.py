"""Triton's integer codec and append's division, bit for bit against their definitions."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from paged import FORMATS, NAN_CODE
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from fp8kv_runtime.fp8 import FP8_DTYPES, quantize
from fp8kv_runtime.kernels.append_kv import divide_by_one
from fp8kv_runtime.kernels.codec import decode, decode_pairs, decode_unit, encode
from fp8kv_runtime.kernels.targets import current_target

ON_GPU = torch.cuda.is_available()
# the interpreter is fastest with few programs, a GPU with small ones
BLOCK = 1024 if ON_GPU else 2**20
ONE = torch.ones(1)

# NaN and Inf are among the inputs
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
OF_EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)


@triton.jit
def encode_kernel(x_ptr, out_ptr, n, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, encode(x, FORMAT, HARDWARE), mask=at < n)


@triton.jit
def decode_kernel(codes_ptr, out_ptr, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    at = tl.arange(0, 256)
    value = decode(tl.load(codes_ptr + at), FORMAT, HARDWARE).to(tl.float32)
    tl.store(out_ptr + at, value * decode_unit(FORMAT, HARDWARE))


@triton.jit
def decode_pairs_kernel(
    pairs_ptr, low_ptr, high_ptr, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, PTX: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * B + tl.arange(0, B)
    low, high = decode_pairs(tl.load(pairs_ptr + at), FORMAT, HARDWARE, PTX)
    tl.store(low_ptr + at, low.to(tl.float32) * decode_unit(FORMAT, HARDWARE))
    tl.store(high_ptr + at, high.to(tl.float32) * decode_unit(FORMAT, HARDWARE))


@triton.jit
def divide_kernel(x_ptr, scale_ptr, out_ptr, B: tl.constexpr):
    at = tl.arange(0, B)
    tl.store(out_ptr + at, divide_by_one(tl.load(x_ptr + at), tl.load(scale_ptr)))


def all_codes(format):
    return torch.arange(256, dtype=torch.uint8).view(FP8_DTYPES[format])


def inputs(format):
    """All of both 16-bit types, random bits, and what lies at and just beside every tie."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    random = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(0))
    values = all_codes(format).float()
    values = values[values.isfinite()].unique()
    ties = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(x, torch.tensor(to)) for x in (ties, values) for to in (-torch.inf, torch.inf)]
    parts = (bits.view(torch.bfloat16), bits.view(torch.float16), random.int().view(torch.float32))
    return torch.cat([*(part.float() for part in parts), ties, values, *beside])


def check_encoded(format, device, hardware):
    x = inputs(format)
    want = quantize(x, ONE, FP8_DTYPES[format]).view(torch.uint8)
    assert want.unique().numel() >= 250  # all finite codes, and NaN
    got = torch.zeros(len(x), dtype=torch.uint8, device=device)
    encode_kernel[(triton.cdiv(len(x), BLOCK),)](x.to(device), got, len(x), format, hardware, BLOCK)
    # NaN has any sign, which a GPU forgets where it widens float16
    signs = want.view(FP8_DTYPES[format]).float().isnan() * 0x80
    assert torch.equal(got.cpu() | signs, want | signs)


def assert_same(got, want):
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


def check_decoded(format, device, hardware):
    out = torch.zeros(256, device=device)
    decode_kernel[(1,)](all_codes(format).view(torch.uint8).to(device), out, format, hardware)
    assert_same(out, all_codes(format).float())
    assert out[NAN_CODE[format]].isnan()


@OF_EVERY_FORMAT
def test_encode_is_quantize(format, device):
    check_encoded(format, device, hardware=False)


@OF_EVERY_FORMAT
def test_decode_is_exact_of_every_code_and_every_pair(format, device):
    check_decoded(format, device, hardware=False)
    pairs = torch.arange(2**16, dtype=torch.int32).to(torch.int16).to(device)
    low, high = (torch.zeros(2**16, device=device) for _ in range(2))
    ptx = current_target().backend == "cuda"
    decode_pairs_kernel[(64,)](pairs, low, high, format, False, ptx, 1024)
    values = all_codes(format).float()
    assert_same(low, values.repeat(256))
    assert_same(high, values.repeat_interleave(256))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no GPU")
@OF_EVERY_FORMAT
def test_hardware_encodes_and_decodes_the_same(format, device):
    if format in current_target().encoded:
        check_encoded(format, device, hardware=True)
    if format in current_target().decoded:
        check_decoded(format, device, hardware=True)


N = 2**14
LIMIT = 2.0**17


def fused(self, x, y, z):
    """One rounding: a product of two float32 is exact in 64 bits, and their sum nearly always."""
    exact = x.data.astype(np.longdouble) * y.data + z.data
    return TensorHandle(exact.astype(np.float32), z.dtype.scalar)


@pytest.fixture
def divide(monkeypatch, device):
    """Division by one scale as append does it on a GPU: its code, with a fused multiply-add."""
    if device == "cpu":
        monkeypatch.setattr(InterpreterBuilder, "create_fma", fused)

    def divided(x, scale):
        out = torch.empty_like(x, device=device)
        divide_kernel[(1,)](x.to(device), torch.tensor([scale], device=device), out, N)
        return out.cpu()

    return divided


@pytest.mark.parametrize("scale", [1.0, 0.0123, 3.7e-5, 1 / 448, 977.3, 2.0**-60, 1.3 * 2.0**59])
def test_a_quotient_is_rounded_once(divide, scale):
    random, scale = torch.Generator().manual_seed(0), float(np.float32(scale))
    exponents = torch.randint(-20, 18, (N,), generator=random)
    values = torch.randn(N, generator=random) * 2.0**exponents
    for dtype in (torch.float16, torch.float32):
        x = values.to(dtype).float()
        if not 1e-9 < scale < 1e9:
            x = x * scale
        want = x / torch.tensor(scale)
        assert torch.equal(divide(x, scale), want.clamp(-LIMIT, LIMIT)), dtype


def test_infinite_quotients_saturate_and_zeros_keep_their_sign(divide):
    x = torch.zeros(N)
    x[:7] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3e38, -3e38])
    out = divide(x, 0.0123)
    assert out[:2].tolist() == [LIMIT, -LIMIT]
    assert out[2].isnan()
    assert out[3:5].signbit().tolist() == [False, True]
    assert out[5:7].tolist() == [LIMIT, -LIMIT]
