"""Triton's integer codec and torch's fast one on a CPU, bit for bit against the definition."""

import pytest
import torch
import triton
import triton.language as tl
from paged import FORMATS, NAN_CODE

from fp8kv_runtime.fp8 import FP8_DTYPES, dequantize, quantize
from fp8kv_runtime.kernels.codec import decode, decode_pairs, decode_unit, encode
from fp8kv_runtime.kernels.targets import INTERPRETER, current_target

ON_GPU = torch.cuda.is_available()
# the interpreter is fastest with few programs, a GPU with small ones
BLOCK = 1024 if ON_GPU else 2**20
RANDOM_INPUTS = 10_000_000
ONE = torch.ones(1)

# NaN and Inf are among the inputs
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


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


def inputs(kind):
    if kind == "fp32":
        random = torch.Generator().manual_seed(0)
        bits = torch.randint(-(2**31), 2**31, (RANDOM_INPUTS,), generator=random)
        return bits.to(torch.int32).view(torch.float32)
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    return bits.view({"bf16": torch.bfloat16, "fp16": torch.float16}[kind])


def encoded(x, format, device, hardware=False):
    out = torch.zeros(len(x), dtype=torch.uint8, device=device)
    grid = (triton.cdiv(len(x), BLOCK),)
    encode_kernel[grid](x.to(device), out, len(x), format, hardware, BLOCK)
    return out.cpu()


def same_codes(got, want, format):
    """Equal bits; NaN has any sign, which a GPU forgets where it widens float16."""
    is_nan = want.view(FP8_DTYPES[format]).float().isnan()
    return torch.equal(got | is_nan * 0x80, want | is_nan * 0x80)


def same_values(got, want):
    return (torch.equal(got.isnan(), want.isnan())) and torch.equal(
        got.nan_to_num(nan=0.0, posinf=1e9, neginf=-1e9),
        want.nan_to_num(nan=0.0, posinf=1e9, neginf=-1e9),
    )


def all_codes(format):
    return torch.arange(256, dtype=torch.uint8).view(FP8_DTYPES[format])


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("format", FORMATS)
def test_encode_is_quantize(format, kind, device):
    x = inputs(kind)
    want = quantize(x, ONE, FP8_DTYPES[format]).view(torch.uint8)
    assert want.unique().numel() >= 250  # all finite codes, and NaN
    assert same_codes(encoded(x, format, device), want, format)


@pytest.mark.parametrize("format", FORMATS)
def test_decode_is_exact(format, device):
    out = torch.zeros(256, device=device)
    decode_kernel[(1,)](all_codes(format).view(torch.uint8).to(device), out, format, False)
    want = all_codes(format).float()
    assert same_values(out.cpu(), want)
    assert out[NAN_CODE[format]].isnan()


@pytest.mark.parametrize("format", FORMATS)
def test_decode_of_every_pair_of_codes(format, device):
    pairs = torch.arange(2**16, dtype=torch.int32).to(torch.int16).to(device)
    low, high = (torch.zeros(2**16, device=device) for _ in range(2))
    ptx = current_target().backend == "cuda"
    decode_pairs_kernel[(64,)](pairs, low, high, format, False, ptx, 1024)
    values = all_codes(format).float()
    assert same_values(low.cpu(), values.repeat(256))
    assert same_values(high.cpu(), values.repeat_interleave(256))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no GPU")
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("format", FORMATS)
def test_hardware_encodes_as_quantize(format, kind, device):
    if format not in current_target().encoded:
        pytest.skip(f"{current_target().name} does not encode {format}")
    x = inputs(kind)
    want = quantize(x, ONE, FP8_DTYPES[format]).view(torch.uint8)
    assert same_codes(encoded(x, format, device, hardware=True), want, format)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no GPU")
@pytest.mark.parametrize("format", FORMATS)
def test_hardware_decodes_exactly(format, device):
    if format not in current_target().decoded:
        pytest.skip(f"{current_target().name} does not decode {format}")
    out = torch.zeros(256, device=device)
    decode_kernel[(1,)](all_codes(format).view(torch.uint8).to(device), out, format, True)
    assert same_values(out.cpu(), all_codes(format).float())


@pytest.mark.parametrize("format", FORMATS)
def test_the_interpreter_has_no_fp8_hardware(format):
    assert format not in INTERPRETER.encoded
    assert format not in INTERPRETER.decoded
    assert format not in INTERPRETER.multiplied


# a scale with 24 bits in use: that the product is rounded once shows in the last of them
SCALES = {
    "no dimension": torch.tensor(0.1),
    "one": torch.tensor([0.1]),
    "per row": torch.rand(4, 1) + 0.1,
    "per column": torch.rand(64) + 0.1,
    "each": torch.rand(4, 64) + 0.1,
    "more dimensions": torch.rand(3, 1, 1) + 0.1,
}


@pytest.mark.parametrize("shape", SCALES)
@pytest.mark.parametrize("with_nan", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_dequantize_is_value_times_scale(format, with_nan, shape):
    codes = all_codes(format)
    if not with_nan:
        codes = torch.where(codes.float().isfinite(), codes.view(torch.uint8), 0).view(codes.dtype)
    codes = codes.view(4, 64)
    got, want = dequantize(codes, SCALES[shape]), codes.float() * SCALES[shape]
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    assert same_values(got, want)


@pytest.mark.parametrize("format", FORMATS)
def test_dequantize_takes_views_and_nothing(format):
    codes = all_codes(format)[:124].view(4, 31).T[1:]
    assert not codes.is_contiguous()
    assert torch.equal(dequantize(codes, ONE), codes.float())
    assert torch.equal(dequantize(codes[0, 0], torch.tensor(2.0)), codes[0, 0].float() * 2)
    assert dequantize(codes[:0], ONE).shape == (0, 4)
