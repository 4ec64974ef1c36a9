"""Instructions of one thread: from operands to a result, and nothing else.

`find(parts)` gives the types of an opcode's operands, of its result, and a function on arrays.
"""

from functools import partial, reduce

import numpy as np

from virtual_gpu import numbers
from virtual_gpu.numbers import TYPES
from virtual_gpu.program import FaultError


def _divide(a, b):
    """Towards zero; the quotient by zero is not specified: all ones."""
    if not np.issubdtype(a.dtype, np.signedinteger):
        return np.where(b == 0, -1, a // np.where(b == 0, 1, b))
    divisor = np.where(b == 0, 1, b).astype(np.int64)
    quotient = np.abs(a.astype(np.int64)) // np.abs(divisor)
    return np.where(b == 0, -1, np.where((a < 0) != (b < 0), -quotient, quotient))


def _shift(a, count, left):
    """Counts beyond the width give 0, or the sign."""
    bits = 8 * a.dtype.itemsize
    inside = np.minimum(count, bits - 1).astype(a.dtype)
    if left:
        return np.where(count < bits, a << inside, 0)
    signed = np.issubdtype(a.dtype, np.signedinteger)
    return np.where((count < bits) | signed, a >> inside, 0)


def _extract(a, start, length):
    """`bfe`, of which fields inside the register are known."""
    bits, wide = 8 * a.dtype.itemsize, a.astype(np.int64)
    start, length = start & 255, length & 255
    if (start + length > bits).any():
        raise FaultError("bfe beyond the register")
    field = (wide >> start.astype(np.int64)) & ((1 << length.astype(np.int64)) - 1)
    if not np.issubdtype(a.dtype, np.signedinteger):
        return field
    top = np.where(length > 0, 1 << (length.astype(np.int64) - 1).clip(0), 0)
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


def _exp2(x):
    return numbers.flush(np.exp2(numbers.flush(x)))


PLAIN = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply,
    "min": lambda *two_or_three: reduce(np.fmin, two_or_three),
    "max": lambda *two_or_three: reduce(np.fmax, two_or_three),
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "neg": np.negative, "abs": np.abs, "mov": lambda a: a,
    "shl": partial(_shift, left=True), "shr": partial(_shift, left=False),
    "bfe": _extract, "popc": np.bitwise_count,
    "ex2": _exp2, "fma": numbers.fma, "lop3": _lookup, "prmt": numbers.permute_bytes,
}  # fmt: skip
COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip
# a modifier that changes nothing here: rounding to nearest is what numpy does
IGNORED = {"rn", "approx", "full", "wide", "lo", "hi", "ftz", "NaN", "relu", "xorsign", "abs"}
COUNTS = {"shl": (None, "u32"), "shr": (None, "u32"), "bfe": (None, "u32", "u32")}


def find(parts: list[str]) -> tuple[tuple[str, ...] | None, str, object]:
    """Types of the operands (None: the result's), type of the result, and what to do."""
    base, kind = parts[0], parts[-1]
    if base == "cvt":
        return (parts[-1],) * 4, parts[-2], partial(_convert, parts)
    if base == "setp":
        if len(parts) != 3:
            raise FaultError(f"unknown comparison {'.'.join(parts)}")
        compare = _comparison(parts[1], kind)
        if kind == "bf16":
            return (kind,) * 2, "pred", lambda a, b: compare(*map(numbers.bf16_to_f32, (a, b)))
        return (kind,) * 2, "pred", compare
    if base == "selp":
        return (_bits(kind),) * 2 + ("pred",), _bits(kind), lambda a, b, p: np.where(p, a, b)
    if kind == "f32x2":
        return ("b64",) * 3, "b64", partial(_pairwise, PLAIN[base])
    unknown = set(parts[1:-1]) - IGNORED
    if base not in ("min", "max"):
        unknown |= {*parts[1:-1]} & {"NaN", "relu", "xorsign", "abs"}
    if unknown or (base not in PLAIN and base not in ("div", "mad")):
        raise FaultError(f"unknown instruction {'.'.join(parts)}")
    if base in ("mad", "mul") and "wide" in parts:
        return _widened(base, kind)
    if base in ("min", "max") and len(parts) > 2:
        return (kind,) * 3, kind, partial(_special_extreme, base, frozenset(parts[1:-1]))
    if "hi" in parts:
        return (kind, kind), kind, partial(_upper_half, TYPES[kind])
    if base in ("mad", "div"):
        function = (lambda a, b, c: a * b + c) if base == "mad" else _division(kind)
    else:
        function = PLAIN[base]
    kinds = tuple(count or kind for count in COUNTS.get(base, ())) or (kind,) * 4
    return kinds, kind, function


def _bits(kind):
    return kind if kind == "pred" else "b" + kind[1:]


def _division(kind):
    return np.divide if kind[0] == "f" else _divide


def _widened(base, kind):
    wide = kind[0] + str(2 * int(kind[1:]))
    dtype = TYPES[wide]
    if base == "mul":
        return (kind, kind), wide, lambda a, b: a.astype(dtype) * b.astype(dtype)
    return (kind, kind, wide), wide, lambda a, b, c: a.astype(dtype) * b.astype(dtype) + c


def _upper_half(dtype, a, b):
    wide = np.int64 if np.issubdtype(dtype, np.signedinteger) else np.uint64
    if np.dtype(dtype).itemsize != 4:
        raise FaultError("mul.hi of other than 32 bits")
    return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(dtype)


def _comparison(name, kind):
    """`gtu` and the like are true of NaN as well; of integers `lo` and the like are not used."""
    kind = kind.removeprefix("b") if kind == "bf16" else kind
    if name in COMPARE:
        if name == "ne" and kind[0] == "f":
            return lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)
        return COMPARE[name]
    if kind[0] == "f" and name[-1] == "u" and name[:-1] in COMPARE:
        ordered = COMPARE[name[:-1]]
        return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)
    raise FaultError(f"unknown comparison {name}.{kind}")


def _pairwise(function, *operands):
    """A function of float32 on both halves of 64 bits."""
    return function(*(x.view(np.float32) for x in operands)).view(np.uint64)


def _convert(parts, a, b=None):
    """Every conversion; of two operands the first goes to the upper half."""
    to, source, modifiers = parts[-2], parts[-1], set(parts[1:-2])
    known = to.startswith(("s", "u", "b")) or source[0] in "sube" or "rn" in modifiers
    if not known and (to, source) not in (("f32", "f16"), ("f32", "bf16")):
        raise FaultError(f"unknown conversion {'.'.join(parts)}")
    if source in numbers.FP8:
        halves = numbers.decode_fp8(np.ascontiguousarray(a).view(np.uint8), source[:4] + "x2")
        return halves.view(np.uint32)
    if to in numbers.FP8:
        if "satfinite" not in modifiers:
            raise FaultError(f"unknown conversion {'.'.join(parts)}")
        pair = np.stack([numbers.encode_fp8(x, to) for x in (b, a)], 1)
        return pair.view(np.uint16)[:, 0]
    if to in ("f16x2", "bf16x2"):
        pair = np.stack([_to_16(x, to) for x in (b, a)], 1)
        return pair.view(np.uint32)[:, 0]
    if source == "bf16":
        return numbers.bf16_to_f32(a)
    if to in ("f16", "bf16"):
        return _to_16(a, to)
    if source[0] == "f" and to[0] != "f":
        raise FaultError(f"unknown conversion {'.'.join(parts)}")
    return a.astype(TYPES[to])


def _to_16(x, kind):
    """Bits of float32 as a 16-bit type."""
    return numbers.f32_to_bf16(x) if "bf16" in kind else x.astype(np.float16).view(np.uint16)
