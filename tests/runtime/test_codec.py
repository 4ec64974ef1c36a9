"""The number format against its definition; Triton's integer codec and append's division against theirs."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from paged import FORMATS, NAN_CODE
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from fp8kv_runtime.fp8 import FP8_DTYPES, dequantize, fp8_max, quantize, scale_from_amax
from fp8kv_runtime.kernels.append_kv import divide_by_one
from fp8kv_runtime.kernels.codec import decode, decode_unit, encode
from fp8kv_runtime.kernels.launch import current_target

ON_GPU = torch.cuda.is_available()
# the interpreter is fastest with few programs, a GPU with small ones
BLOCK, ONE = 1024 if ON_GPU else 2**20, torch.ones(1)
# NaN and Inf are among the inputs
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
MAXIMA = {"e4m3fn": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0}
OF_EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)
WAYS = pytest.mark.parametrize("hardware", [False, pytest.param(True, marks=pytest.mark.gpu)])


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


def assert_same(got, want):
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


@WAYS
@OF_EVERY_FORMAT
def test_encode_is_quantize(format, hardware, device):
    if hardware and not (ON_GPU and format in current_target().encoded):
        pytest.skip("no such instruction here")
    x = inputs(format)
    want = quantize(x, ONE, FP8_DTYPES[format]).view(torch.uint8)
    assert want.unique().numel() >= 250  # all finite codes, and NaN
    got = torch.zeros(len(x), dtype=torch.uint8, device=device)
    encode_kernel[(triton.cdiv(len(x), BLOCK),)](x.to(device), got, len(x), format, hardware, BLOCK)
    # NaN has any sign, which a GPU forgets where it widens float16
    signs = want.view(FP8_DTYPES[format]).float().isnan() * 0x80
    assert torch.equal(got.cpu() | signs, want | signs)


@WAYS
@OF_EVERY_FORMAT
def test_decode_is_exact_of_every_code(format, hardware, device):
    out = torch.zeros(256, device=device)
    if hardware and not (ON_GPU and format in current_target().decoded):
        pytest.skip("no such instruction here")
    decode_kernel[(1,)](all_codes(format).view(torch.uint8).to(device), out, format, hardware)
    assert_same(out, all_codes(format).float())
    assert out[NAN_CODE[format]].isnan()


N, LIMIT = 2**14, 2.0**17


def fused(self, x, y, z):
    """One rounding: a product of two float32 is exact in 64 bits, and their sum nearly always."""
    exact = x.data.astype(np.longdouble) * y.data + z.data
    return TensorHandle(exact.astype(np.float32), z.dtype.scalar)


@pytest.mark.parametrize("scale", [1.0, 0.0123, 3.7e-5, 1 / 448, 977.3, 2.0**-60, 1.3 * 2.0**59])
def test_a_quotient_is_rounded_once_and_saturates_and_zeros_keep_their_sign(scale, device, monkeypatch):
    """Division by one scale as append does it on a GPU: its code, with a fused multiply-add."""
    if device == "cpu":
        monkeypatch.setattr(InterpreterBuilder, "create_fma", fused)
    random, scale = torch.Generator().manual_seed(0), torch.tensor([scale])
    values = torch.randn(N, generator=random) * 2.0 ** torch.randint(-20, 18, (N,), generator=random)
    values[:7] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3e38, -3e38])
    for dtype in (torch.float16, torch.float32):
        x = values.to(dtype).float() * (1.0 if 1e-9 < scale < 1e9 else scale)
        out = torch.empty_like(x, device=device)
        divide_kernel[(1,)](x.to(device), scale.to(device), out, N)
        assert_same(out, (x / scale).clamp(-LIMIT, LIMIT))
        assert out[3:5].signbit().tolist() == [False, True]


@OF_EVERY_FORMAT
def test_rounding_is_to_the_nearest_value_with_ties_to_even_and_saturates(format):
    dtype, largest, values = FP8_DTYPES[format], MAXIMA[format], all_codes(format).double()
    values = values[values.isfinite()].unique()
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, middles * (1 - 1e-6), middles, middles * (1 + 1e-6)]).float()
    distance = (quantize(x, ONE, dtype).double() - x.double()).abs()
    assert torch.equal(distance, (values[None] - x.double()[:, None]).abs().amin(1))
    exact = middles.float()[middles == middles.float().double()]
    assert (quantize(exact, ONE, dtype).view(torch.uint8) % 2 == 0).all()
    assert fp8_max(dtype) == values[-1] == largest
    beyond = torch.tensor([1e9, -1e9, float("inf"), -float("inf"), largest * 1.01])
    assert quantize(beyond, ONE, dtype).float().tolist() == [largest, -largest, largest, -largest, largest]
    assert quantize(torch.tensor([float("nan")]), ONE, dtype).float().isnan().all()


def test_scale_restores():
    amax, x = torch.tensor([[2.0], [900.0]]), torch.tensor([[2.0, -1.0], [900.0, 0.0]])
    scale = scale_from_amax(amax)
    assert torch.equal(scale * 448, amax)
    assert torch.equal(quantize(x, scale).float(), torch.tensor([[448.0, -224.0], [448.0, 0.0]]))
    for amax in (0.0, -1.0, float("nan"), float("inf"), 1e-44):
        with pytest.raises(ValueError, match=r"^amax must be finite and large enough to scale, got \[1.0, "):
            scale_from_amax(torch.tensor([1.0, amax]))


@OF_EVERY_FORMAT
def test_dequantize_is_value_times_scale(format):
    codes = torch.arange(256, dtype=torch.uint8).view(FP8_DTYPES[format])
    finite = torch.where(codes.float().isfinite(), codes.view(torch.uint8), 0).view(codes.dtype)
    # with 24 bits in use, that the product is rounded once shows in the last of them
    for scale in (torch.tensor([0.1]), torch.rand(4, 1) + 0.1, torch.rand(3, 1, 1) + 0.1):
        # four ways: with NaN and without, few and many
        for each in (x.view(4, 64).repeat(1, times) for x in (codes, finite) for times in (1, 65)):
            assert_same(dequantize(each, scale), each.float() * scale)
    view = finite[:124].repeat(65).view(4, -1).T[1:]
    assert not view.is_contiguous()
    assert torch.equal(dequantize(view, ONE), view.float())
    assert torch.equal(dequantize(view[0, 0], torch.tensor(2.0)), view[0, 0].float() * 2)
    assert dequantize(view[:0], ONE).shape == (0, 4)
