"""FP8 in Triton: integer arithmetic that is exact on every target, and the hardware's conversion.

Written with integers because sm_80 has no E4M3 type and the interpreter's own casts round wrongly.
The format "float16" is not FP8 but what FP8 is measured against.
"""

import triton
import triton.language as tl


@triton.jit
def encode(x: tl.tensor, FORMAT: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """Round float32 `x` [...] to FP8 bits (uint8) [...]: nearest, ties to even, saturating; NaN stays NaN."""
    if FORMAT == "float16":
        x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        return x.to(tl.float16)
    elif HARDWARE:
        return _encode_hardware(x, FORMAT)
    elif FORMAT == "e4m3fn":
        return _encode_integer(x, 3, 7, 0x7E, largest(FORMAT), False)
    elif FORMAT == "e4m3fnuz":
        return _encode_integer(x, 3, 8, 0x7F, largest(FORMAT), True)
    else:
        tl.static_assert(FORMAT == "e5m2")
        return _encode_integer(x, 2, 15, 0x7B, largest(FORMAT), False)


@triton.jit
def decode(codes: tl.tensor, FORMAT: tl.constexpr, HARDWARE: tl.constexpr) -> tl.tensor:
    """Decode FP8 bits [...] (uint8) to float16: exactly the value over `decode_unit(FORMAT, HARDWARE)`."""
    if HARDWARE:
        return codes.to(hardware_type(FORMAT), bitcast=True).to(tl.float16)
    wide = codes.to(tl.int16)
    if FORMAT == "e5m2":
        return (wide << 8).to(tl.float16, bitcast=True)
    magnitude = wide & 0x7F
    bits = ((wide & 0x80) << 8) | (magnitude << 7)
    if FORMAT == "e4m3fn":
        # 0x7F is NaN: its carry sets the top exponent bit, which is clear in all other codes
        bits |= ((magnitude + 1) & 0x80) << 7
    else:
        bits = tl.where(wide == 0x80, 0x7E00, bits)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def decode_pairs(
    pairs: tl.tensor, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, PTX: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Decode the low and the high byte of each int16 [...]: two float16 [...], see `decode`."""
    if PTX and not HARDWARE and FORMAT == "e4m3fn":
        # as in `decode`, on two codes at a time, which the compiler does not find
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, code, sign, carry;
            and.b32 code, $2, 0x7f007f00;
            and.b32 sign, $2, 0x80008000;
            add.u32 carry, code, 0x01000100;
            lop3.b32 code, code, carry, 0x80008000, 0xf8;
            shr.u32 code, code, 1;
            or.b32 $1, code, sign;
            shl.b32 low, $2, 8;
            and.b32 code, low, 0x7f007f00;
            and.b32 sign, low, 0x80008000;
            add.u32 carry, code, 0x01000100;
            lop3.b32 code, code, carry, 0x80008000, 0xf8;
            shr.u32 code, code, 1;
            or.b32 $0, code, sign;
            }""",
            "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = unpack_pairs(pairs, PTX)
        return decode(low, FORMAT, HARDWARE), decode(high, FORMAT, HARDWARE)


@triton.jit
def unpack_pairs(pairs: tl.tensor, PTX: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Split each int16 [...] into its low and its high byte: two uint8 [...]."""
    if PTX:  # one instruction for four bytes, which the compiler does not find
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=&r,=&r,r,r", [pairs],
            dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return (pairs & 0xFF).to(tl.uint8), ((pairs >> 8) & 0xFF).to(tl.uint8)


@triton.constexpr_function
def decode_unit(FORMAT: str, HARDWARE: bool) -> float:
    """Return the power of two that `decode` leaves out, to be folded into the scale."""
    return 1.0 if HARDWARE else {"e4m3fn": 2.0**8, "e4m3fnuz": 2.0**7}.get(FORMAT, 1.0)


@triton.jit
def _encode_integer(
    x: tl.tensor, M: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr, MAX: tl.constexpr,
    FNUZ: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    a = tl.minimum(magnitude.to(tl.float32, bitcast=True), MAX)
    a = tl.where(is_nan, 0.0, a)
    a_bits = a.to(tl.int32, bitcast=True)

    SHIFT: tl.constexpr = 23 - M
    rounded = a_bits + ((1 << (SHIFT - 1)) - 1) + ((a_bits >> SHIFT) & 1)
    normal = (rounded >> SHIFT) - ((127 - BIAS) << M)
    # adding 2 ** (24 - BIAS - M) leaves the subnormal's code in the lowest bits, rounded by the add
    MAGIC: tl.constexpr = (127 + 24 - BIAS - M) << 23
    magic = tl.full(a.shape, MAGIC, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (a + magic).to(tl.int32, bitcast=True) - MAGIC

    code = tl.minimum(tl.where(a < 2.0 ** (1 - BIAS), subnormal, normal), MAX_CODE)
    if FNUZ:  # no negative zero: its bits are NaN
        code = tl.where(is_nan, 0x80, tl.where(code == 0, 0, code | sign))
    else:
        code = tl.where(is_nan, 0x7F, code) | sign
    return code.to(tl.uint8)


@triton.jit
def _encode_hardware(x: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    # the instruction saturates, infinities too, and makes any NaN a positive one
    codes = x.to(hardware_type(FORMAT)).to(tl.uint8, bitcast=True)
    return codes | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80).to(tl.uint8)


@triton.constexpr_function
def hardware_type(FORMAT: str) -> tl.dtype:
    """Return Triton's name of the format."""
    return {"e4m3fn": tl.float8e4nv, "e4m3fnuz": tl.float8e4b8, "e5m2": tl.float8e5}[FORMAT]


@triton.constexpr_function
def largest(FORMAT: str) -> float:
    """Return the format's largest finite value."""
    # as `fp8_max`, which compiled code cannot call
    return {"e4m3fn": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0, "float16": 65504.0}[FORMAT]


@triton.constexpr_function
def half_smallest(FORMAT: str) -> float:
    """Return half of the format's smallest value: values up to it become 0."""
    halves = {"e4m3fn": 2.0**-10, "e4m3fnuz": 2.0**-11, "e5m2": 2.0**-17, "float16": 2.0**-25}
    return halves[FORMAT]
