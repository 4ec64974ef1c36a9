"""Instructions of one thread, from operands to a result, and numbers that numpy lacks."""

from functools import partial, reduce

import numpy as np
import torch

from virtual_gpu.program import FaultError

_NUMPYS = {"b": "uint", "u": "uint", "s": "int"}
TYPES = {f"{x}{bits}": np.dtype(f"{_NUMPYS[x]}{bits}").type for x in "bus" for bits in (8, 16, 32, 64)}
TYPES |= {"f16": np.float16, "f32": np.float32, "f64": np.float64, "pred": np.bool_, "bf16": np.uint16}
TYPES |= dict.fromkeys(("f16x2", "bf16x2"), np.uint32) | dict.fromkeys(("e4m3x2", "e5m2x2"), np.uint16)
FP8 = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}


def decode_fp8(codes, kind):
    return torch.from_numpy(np.ascontiguousarray(codes)).view(FP8[kind]).half().numpy()


def _encode_fp8(x, kind):
    """Nearest code, ties to even, of float32: `cvt.rn.satfinite`, whose NaN is 0x7F."""
    limit = torch.finfo(FP8[kind]).max
    rounded = torch.from_numpy(np.ascontiguousarray(x)).clamp(-limit, limit).to(FP8[kind])
    return np.where(np.isnan(x), 0x7F, rounded.view(torch.uint8).numpy()).astype(np.uint8)


def _bf16_to_f32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_16(x, kind):
    if "bf16" not in kind:
        return x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32)
    return np.where(np.isnan(x), 0x7FFF, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _multiply_add(a, b, c):
    """Rounded once: a product exact in float64, whose sum is rounded to odd (Boldo and Melquiond 2008)."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits % 2 == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + step, bits).view(np.float64).astype(np.float32)


def _permute_bytes(a, b, selector):
    """`prmt.b32`: each of the selector's four digits picks a byte, 8 or more its sign."""
    digits = (selector[:, None] >> np.arange(0, 16, 4, np.uint32)) & np.uint32(15)
    picked = np.take_along_axis(np.stack([a, b], 1).view(np.uint8), (digits & 7).astype(np.int64), 1)
    sign = np.where(picked > 127, 255, 0)
    return np.where(digits > 7, sign, picked).astype(np.uint8).view(np.uint32)[:, 0]


def _divide(a, b):
    """Towards zero; the quotient by zero is not specified: all ones."""
    divisor = np.where(b == 0, 1, b)
    quotient = a // divisor
    if np.issubdtype(a.dtype, np.signedinteger):
        quotient = np.abs(a.astype(np.int64)) // np.abs(divisor.astype(np.int64))
        quotient = np.where((a < 0) != (b < 0), -quotient, quotient)
    return np.where(b == 0, -1, quotient)


def _shift(a, count, left):
    """Counts beyond the width give 0, or the sign."""
    bits = 8 * a.dtype.itemsize
    inside = np.minimum(count, bits - 1).astype(a.dtype)
    if left:
        return np.where(count < bits, a << inside, 0)
    return np.where((count < bits) | np.issubdtype(a.dtype, np.signedinteger), a >> inside, 0)


def _extract(a, start, length):
    """`bfe`, of which fields inside the register are known."""
    start, length = (x.astype(np.int64) & 255 for x in (start, length))
    if (start + length > 8 * a.dtype.itemsize).any():
        raise FaultError("bfe beyond the register")
    field = (a.astype(np.int64) >> start) & ((1 << length) - 1)
    if not np.issubdtype(a.dtype, np.signedinteger):
        return field
    top = np.where(length > 0, 1 << (length - 1).clip(0), 0)
    return (field ^ top) - top


def _lookup(a, b, c, table):
    """`lop3`: bit i of the table is the result where the bits of a, b and c are those of i."""
    result = np.zeros_like(a)
    for i in range(8):
        chosen = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        result |= np.where((table >> np.uint32(i)) & np.uint32(1), chosen, np.uint32(0))
    return result


def _special_extreme(base, modifiers, *operands):
    """With NaN passed on, magnitudes compared and signs multiplied, or 0 at least."""
    signs = reduce(np.bitwise_xor, map(np.signbit, operands))
    if "abs" in modifiers:
        operands = tuple(map(np.abs, operands))
    functions = {"min": np.fmin, "max": np.fmax}
    if "NaN" in modifiers:
        functions = {"min": np.minimum, "max": np.maximum}
    result = reduce(functions[base], operands)
    if "relu" in modifiers:
        result = functions["max"](result, result.dtype.type(0))
    return np.copysign(result, np.where(signs, -1, 1)) if "xorsign" in modifiers else result


def _flush(x):
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


PLAIN = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": lambda a, b, c: a * b + c, "div": _divide,
    "min": lambda *two_or_three: reduce(np.fmin, two_or_three),
    "max": lambda *two_or_three: reduce(np.fmax, two_or_three),
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "neg": np.negative, "abs": np.abs, "mov": lambda a: a,
    "shl": partial(_shift, left=True), "shr": partial(_shift, left=False),
    "bfe": _extract, "popc": np.bitwise_count, "ex2": lambda x: _flush(np.exp2(_flush(x))),
    "fma": _multiply_add, "lop3": _lookup, "prmt": _permute_bytes,
}  # fmt: skip
COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip
# a modifier that changes nothing here: rounding to nearest is what numpy does
IGNORED = {"rn", "approx", "full", "wide", "lo", "hi", "ftz"}


def find(parts):
    """Types of an opcode's operands, type of its result, and a function on arrays."""
    base, *modifiers, kind = parts
    if base == "cvt":
        return (kind,) * 4, parts[-2], partial(_convert, parts)
    if base == "setp" and len(modifiers) == 1:
        return (kind,) * 2, "pred", _comparison(modifiers[0], kind)
    if base == "selp":
        bits = kind if kind == "pred" else "b" + kind[1:]
        return (bits, bits, "pred"), bits, lambda a, b, p: np.where(p, a, b)
    if kind == "f32x2":
        return ("b64",) * 3, "b64", partial(_pairwise, PLAIN[base])
    special = {"NaN", "relu", "xorsign", "abs"} if base in ("min", "max") else set()
    if base not in PLAIN or set(modifiers) - IGNORED - special:
        raise FaultError(f"unknown instruction {'.'.join(parts)}")
    if special and modifiers:
        return (kind,) * 3, kind, partial(_special_extreme, base, modifiers)
    if base in ("mad", "mul") and "wide" in modifiers:
        wide = kind[0] + str(2 * int(kind[1:]))
        dtype = TYPES[wide]
        return (kind, kind, wide), wide, lambda a, b, c=0: a.astype(dtype) * b.astype(dtype) + c
    if "hi" in modifiers:
        if base != "mul" or kind[1:] != "32":
            raise FaultError("mul.hi of other than 32 bits")
        wide = TYPES[f"{kind[0]}64"]
        return (kind, kind), kind, lambda a, b: (a.astype(wide) * b.astype(wide)) >> wide(32)
    function = np.divide if base == "div" and kind[0] == "f" else PLAIN[base]
    return (kind, *(("u32",) * 2 if base in ("shl", "shr", "bfe") else (kind,) * 3)), kind, function


def _comparison(name, kind):
    """`gtu` and the like are true of NaN as well; of integers `lo` and the like are not used."""
    compare, floats = COMPARE.get(name[:2]), "f" in kind
    if compare is None or name[2:] not in ("", "u" if floats else ""):
        raise FaultError(f"unknown comparison {name}.{kind}")

    def of_floats(a, b):
        a, b = map(_bf16_to_f32, (a, b)) if kind == "bf16" else (a, b)
        nan = np.isnan(a) | np.isnan(b)
        return compare(a, b) | nan if name[2:] else compare(a, b) & ~nan

    return of_floats if floats else compare


def _pairwise(function, *operands):
    return function(*(x.view(np.float32) for x in operands)).view(np.uint64)


def _convert(parts, a, b=None):
    """Every conversion; of two operands the first goes to the upper half."""
    to, source, modifiers = parts[-2], parts[-1], parts[1:-2]
    known = to[0] in "sub" or source[0] in "sube" or "rn" in modifiers or (to, source) == ("f32", "f16")
    to_integer = source[0] == "f" and to[0] in "su"
    if not known or to_integer or (to in FP8 and "satfinite" not in modifiers):
        raise FaultError(f"unknown conversion {'.'.join(parts)}")
    if source in FP8:
        return decode_fp8(np.ascontiguousarray(a).view(np.uint8), source[:4] + "x2").view(np.uint32)
    if to in FP8:
        return np.stack([_encode_fp8(x, to) for x in (b, a)], 1).view(np.uint16)[:, 0]
    if to in ("f16x2", "bf16x2"):
        return np.stack([_to_16(x, to) for x in (b, a)], 1).view(np.uint32)[:, 0]
    if source == "bf16":
        return _bf16_to_f32(a)
    return _to_16(a, to) if to in ("f16", "bf16") else a.astype(TYPES[to])
