"""The loop over one sequence's blocks, shared by decode and extend attention.

K's scale is folded into the softmax scale and V's into the output: the loop itself converts FP8 to
float16, multiplies matrices and keeps a running softmax in base 2. Even and odd channels are
multiplied apart: 16-bit pairs of codes reach the matrix instructions without byte-wise access.
Blocks of float16, which FP8 is measured against, are multiplied as they are, lower and upper
channels apart.
"""

import triton
import triton.language as tl

from fp8kv_runtime.kernels.codec import (
    decode,
    decode_pairs,
    decode_unit,
    encode,
    hardware_type,
    unpack_pairs,
)

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# a row's largest weight is 2 ** this, so that float16 holds those down to 2^-38 of it
WEIGHT_EXPONENT: tl.constexpr = tl.constexpr(14.0)


@triton.jit
def prepare_query(
    query_ptr, tokens_at, stride_head, heads, inside, kv_head, k_scale_ptr, q_scale_ptr,
    k_center_ptr, softmax_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, K_SCALES: tl.constexpr, Q_SCALES: tl.constexpr,
    HAS_CENTER: tl.constexpr, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, ENCODES: tl.constexpr,
    Q_FP8: tl.constexpr, MULTIPLIES: tl.constexpr,
):  # fmt: skip
    """Query rows for `attend`, what rounding took from them, factor and shift of their scores.

    `tokens_at`, [BLOCK_M] or one, is where each row's token begins; `heads` and `inside` are
    [BLOCK_M]. The rows are FP8 bits, or float16 brought into range by a power of two per row,
    exactly; K's scale goes into the factor, or into the rows where every channel has its own.
    """
    channels = tl.arange(0, BLOCK_D)
    in_head = channels < HEAD_DIM
    valid = inside[:, None] & in_head[None, :]
    offsets = tokens_at + heads.to(tl.int64) * stride_head  # a stride may have 31 bits
    q = tl.load(query_ptr + offsets[:, None] + channels[None, :], mask=valid, other=0.0)
    q = q.to(tl.float32)
    if Q_FP8:
        q_scale = tl.load(q_scale_ptr + heads * Q_SCALES, mask=inside, other=1.0)
        codes = encode(tl.div_rn(q, tl.broadcast_to(q_scale[:, None], q.shape)), FORMAT, ENCODES)
        # the centre's score is the rounded query's too
        q = decode(codes, FORMAT, HARDWARE).to(tl.float32)
        q *= (q_scale * decode_unit(FORMAT, HARDWARE))[:, None]
    to_base_2 = softmax_scale * LOG2_E
    shift = tl.zeros(inside.shape, tl.float32)
    if HAS_CENTER:
        center = tl.load(k_center_ptr + kv_head * HEAD_DIM + channels, mask=in_head, other=0.0)
        shift = tl.sum(q * center[None, :], 1) * to_base_2

    factor = tl.full(inside.shape, 1.0, tl.float32) * to_base_2
    if K_SCALES == 2:
        scale = tl.load(k_scale_ptr + kv_head * HEAD_DIM + channels, mask=in_head, other=1.0)
        q = q * scale[None, :]
    else:
        factor *= tl.load(k_scale_ptr + kv_head * K_SCALES)

    if Q_FP8:
        unit: tl.constexpr = score_unit(FORMAT, HARDWARE, MULTIPLIES)
        return codes, codes, factor * q_scale * unit, shift
    else:
        exponent = row_exponent(q)
        scaled = q * power_of_two(-exponent)[:, None]
        rows = scaled.to(tl.float16)
        rest = (scaled - rows.to(tl.float32)).to(tl.float16)
        factor *= power_of_two(exponent) * decode_unit(FORMAT, HARDWARE)
        return rows, rest, factor, shift


@triton.jit
def query_rows(
    cu_seqlens_ptr, seq, tile, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """First query and number of queries of a sequence; token and head of each row of a tile."""
    start = tl.load(cu_seqlens_ptr + seq)
    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    length = tl.load(cu_seqlens_ptr + seq + 1) - start
    return start, length, pairs // GROUP, kv_head * GROUP + pairs % GROUP


@triton.jit
def row_exponent(q):
    """Exponent that leaves each row's largest magnitude in [512, 1024)."""
    amax = tl.max(tl.abs(q), 1)
    biased = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) & 0xFF, 20)
    return tl.minimum(biased, 235) - 127 - 9


@triton.jit
def power_of_two(exponent):
    """2 ** exponent, exactly."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_offsets(
    block_table_ptr, start, positions, inside, kv_head, NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Where in the cache each position's row lies, in rows: [TILE] int64."""
    if BLOCK_SIZE % TILE == 0:  # the tile lies in one block
        block_id = tl.load(block_table_ptr + start // BLOCK_SIZE).to(tl.int64)
        first = (block_id * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + start % BLOCK_SIZE
        return first + tl.arange(0, TILE)
    block_ids = tl.load(block_table_ptr + positions // BLOCK_SIZE, mask=inside, other=0)
    rows = (block_ids.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE
    return rows + positions % BLOCK_SIZE


@triton.jit
def load_codes(
    ptr, rows, inside, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """A tile of K or V: [TILE, BLOCK_D / 2] int16, or two such of float16.

    What no one may see is 0, whatever is stored.
    """
    columns = tl.arange(0, BLOCK_D // 2)
    if FORMAT == "float16":
        at = rows[:, None] * HEAD_DIM + columns[None, :]
        valid = inside[:, None] & (columns < HEAD_DIM)[None, :]
        lower = tl.load(ptr + at, mask=valid, other=0.0)
        valid = inside[:, None] & (columns < HEAD_DIM - BLOCK_D // 2)[None, :]
        return lower, tl.load(ptr + at + BLOCK_D // 2, mask=valid, other=0.0)
    else:
        at = rows[:, None] * (HEAD_DIM // 2) + columns[None, :]
        valid = inside[:, None] & (columns < HEAD_DIM // 2)[None, :]
        return tl.load(ptr + at, mask=valid, other=0)


@triton.jit
def decode_tile(
    codes, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Two halves of the channels of what `load_codes` loaded, float16."""
    if FORMAT == "float16":
        return codes
    else:
        return decode_pairs(codes, FORMAT, HARDWARE, PTX)


@triton.jit
def halves(x, FORMAT: tl.constexpr):
    """Split columns in two halves as `decode_tile` does: even and odd, or lower and upper."""
    if FORMAT == "float16":
        return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))
    else:
        return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def joined(first, second, FORMAT: tl.constexpr):
    """What `halves` took apart."""
    if FORMAT == "float16":
        both = tl.permute(tl.join(first, second), [0, 2, 1])
        return tl.reshape(both, [first.shape[0], 2 * first.shape[1]])
    else:
        return tl.interleave(first, second)


@triton.jit
def scores_of(q, q_rest, codes, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, PTX: tl.constexpr,
              Q_FP8: tl.constexpr, Q_REST: tl.constexpr, MULTIPLIES: tl.constexpr):  # fmt: skip
    """Q Kᵀ without scales: [BLOCK_M, TILE] float32. `q` and `q_rest` are `halves`."""
    # `else` throughout: what follows a constant `if` that returns is compiled all the same
    if Q_FP8 and MULTIPLIES:
        even, odd = unpack_pairs(codes, PTX)
        fp8: tl.constexpr = hardware_type(FORMAT)
        even = tl.trans(even.to(fp8, bitcast=True))
        odd = tl.trans(odd.to(fp8, bitcast=True))
        # without the limit Hopper adds up a whole row with 14 bits
        scores = tl.dot(q[0].to(fp8, bitcast=True), even, max_num_imprecise_acc=32)
        return tl.dot(q[1].to(fp8, bitcast=True), odd, scores, max_num_imprecise_acc=32)
    else:
        even, odd = decode_tile(codes, FORMAT, HARDWARE, PTX)
        even = tl.trans(even)
        odd = tl.trans(odd)
        if Q_FP8:
            scores = tl.dot(decode(q[0], FORMAT, HARDWARE), even)
            return tl.dot(decode(q[1], FORMAT, HARDWARE), odd, scores)
        elif Q_REST:
            scores = tl.dot(q_rest[1], odd, tl.dot(q_rest[0], even))
            return tl.dot(q[1], odd, tl.dot(q[0], even, scores))
        else:
            return tl.dot(q[1], odd, tl.dot(q[0], even))


@triton.constexpr_function
def score_unit(FORMAT, HARDWARE, MULTIPLIES):
    """Power of two that decoded Q and K lack, to multiply their product with."""
    return 1.0 if MULTIPLIES else decode_unit(FORMAT, HARDWARE) ** 2


@triton.jit
def start_softmax(sinks_ptr, heads, inside, has_sink, HAS_SINKS: tl.constexpr):
    """Origin of the weights (base 2) and their sum before the first tile."""
    if HAS_SINKS and has_sink:
        sink = tl.load(sinks_ptr + heads, mask=inside, other=0.0).to(tl.float32)
        sink = tl.maximum(sink, -1e30) * LOG2_E  # of -inf, -inf minus -inf would be NaN
        # its weight by definition: the compiler fuses the product with a difference, which of
        # sinks of -1e30 leaves 2^66
        weight = tl.where(tl.abs(sink) < 2.0**24, tl.exp2(WEIGHT_EXPONENT), 1.0)
        return origin_of(sink), weight
    return tl.full(inside.shape, float("-inf"), tl.float32), tl.zeros(inside.shape, tl.float32)


@triton.jit
def origin_of(largest):
    """Base-2 logit of weight 1, given that the largest logit has weight 2 ** WEIGHT_EXPONENT."""
    # beyond, the difference would be rounded, at last to 16, which float16 cannot hold
    return tl.where(tl.abs(largest) < 2.0**24, largest - WEIGHT_EXPONENT, largest)


@triton.jit
def softcapped(scores, softcap):
    """softcap * tanh(scores / softcap), in base 2 before and after."""
    # tanh(x) = 1 - 2 / (e^2x + 1), and e^2x = 2^(scores * 2 / softcap)
    return softcap * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / softcap)) + 1.0))


@triton.jit
def attend(
    q,  # [BLOCK_M, BLOCK_D] float16, or FP8 bits
    q_rest,  # the same, added where Q_REST is set
    factor,  # [BLOCK_M] turns a raw score into a logit in base 2
    shift,  # [BLOCK_M] added to it: the centre's score
    rows_at,  # [BLOCK_M] position of each query row
    origin,  # [BLOCK_M] the logit, in base 2, whose weight is 1; -inf, or as the sink has it
    running_sum,  # [BLOCK_M] of weights; 0, or the sink's
    first,  # positions from `first` ..
    end,  # .. up to `end`, not included
    key_ptr,  # the codes of two channels in each int16; or float16
    value_ptr,
    block_table_ptr,
    kv_head,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,
    HAS_CENTER: tl.constexpr,
    FORMAT: tl.constexpr,
    HARDWARE: tl.constexpr,
    PTX: tl.constexpr,
    Q_FP8: tl.constexpr,
    Q_REST: tl.constexpr,  # the query does not fit float16: fp32, or multiplied by channel scales
    P_REST: tl.constexpr,  # the query is fp32: softmax weights in two parts as well
    MULTIPLIES: tl.constexpr,
):
    """Unnormalised output [BLOCK_M, BLOCK_D] without V's scale, origin and sum of its weights."""
    q = halves(q, FORMAT)
    q_rest = halves(q_rest, FORMAT)
    even_acc = tl.zeros([q[0].shape[0], BLOCK_D // 2], tl.float32)
    odd_acc = tl.zeros([q[0].shape[0], BLOCK_D // 2], tl.float32)
    for start in range(first // TILE * TILE, end, TILE):
        positions = start + tl.arange(0, TILE)
        inside = (positions >= first) & (positions < end)
        rows = row_offsets(block_table_ptr, start, positions, inside, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE)
        key = load_codes(key_ptr, rows, inside, HEAD_DIM, BLOCK_D, FORMAT)
        value = load_codes(value_ptr, rows, inside, HEAD_DIM, BLOCK_D, FORMAT)

        scores = scores_of(q, q_rest, key, FORMAT, HARDWARE, PTX, Q_FP8, Q_REST, MULTIPLIES)
        scores = scores * factor[:, None]
        if HAS_CENTER:
            scores += shift[:, None]
        if SOFTCAP:
            scores = softcapped(scores, softcap)
        visible = inside[None, :] & (positions[None, :] <= rows_at[:, None])
        if WINDOW > 0:
            visible &= positions[None, :] > rows_at[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))

        new_origin = tl.maximum(origin, origin_of(tl.max(scores, 1)))
        finite = tl.where(new_origin == float("-inf"), 0.0, new_origin)  # -inf minus -inf is NaN
        weights = tl.exp2(scores - finite[:, None])
        correction = tl.exp2(origin - finite)
        running_sum = running_sum * correction + tl.sum(weights, 1)
        even, odd = decode_tile(value, FORMAT, HARDWARE, PTX)
        rounded = weights.to(tl.float16)
        even_acc = tl.dot(rounded, even, even_acc * correction[:, None])
        odd_acc = tl.dot(rounded, odd, odd_acc * correction[:, None])
        if P_REST:
            rest = (weights - rounded.to(tl.float32)).to(tl.float16)
            even_acc = tl.dot(rest, even, even_acc)
            odd_acc = tl.dot(rest, odd, odd_acc)
        origin = new_origin
    return joined(even_acc, odd_acc, FORMAT), origin, running_sum
