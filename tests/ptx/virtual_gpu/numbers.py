"""Number formats that numpy lacks, by torch, and a multiply-add with one rounding."""

import numpy as np
import torch

TYPES = {
    "f32": np.float32, "f16": np.float16, "f64": np.float64, "pred": np.bool_, "b8": np.uint8,
    "u8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "u16": np.uint16,
    "u32": np.uint32, "u64": np.uint64, "s16": np.int16, "s32": np.int32, "s64": np.int64,
    "s8": np.int8, "bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32,
    "e4m3x2": np.uint16, "e5m2x2": np.uint16, "f32x2": np.uint64,
}  # fmt: skip


FP8 = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}


def decode_fp8(codes: np.ndarray, kind: str) -> np.ndarray:
    """Value of each uint8 as float16, which holds all of them."""
    return torch.from_numpy(np.ascontiguousarray(codes)).view(FP8[kind]).half().numpy()


def encode_fp8(x: np.ndarray, kind: str) -> np.ndarray:
    """Nearest code, ties to even, of float32: `cvt.rn.satfinite`, whose NaN is 0x7F."""
    limit = torch.finfo(FP8[kind]).max
    rounded = torch.from_numpy(np.ascontiguousarray(x)).clamp(-limit, limit).to(FP8[kind])
    return np.where(np.isnan(x), 0x7F, rounded.view(torch.uint8).numpy()).astype(np.uint8)


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """Float32 of uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Nearest bfloat16, ties to even, as uint16."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float32, rounded once.

    The product is exact in float64; the sum is rounded to odd there, so that rounding it again
    rounds as if once (Boldo and Melquiond 2008).
    """
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits % 2 == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + step, bits).view(np.float64).astype(np.float32)


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal float32 as zeros of their sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def permute_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """`prmt.b32` of uint32: each of the selector's four digits picks a byte, 8 or more its sign."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(both.shape, np.uint64)
    for i in range(4):
        digit = (selector.astype(np.uint64) >> np.uint64(4 * i)) & np.uint64(15)
        byte = (both >> (np.uint64(8) * (digit & np.uint64(7)))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result |= np.where(digit & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return result.astype(np.uint32)
