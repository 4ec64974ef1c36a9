"""The loop over one sequence's blocks, shared by decode and extend attention.

K's scale is folded into the softmax scale and V's into the output: the loop itself converts FP8 to
float16, multiplies matrices and keeps a running softmax in base 2 (arXiv 1805.02867). Even and odd
channels are multiplied apart: 16-bit pairs of codes reach the matrix instructions without byte-wise access.
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
    query_ptr: tl.tensor, tokens_at: tl.tensor, stride_head: tl.tensor, heads: tl.tensor, inside: tl.tensor,
    kv_head: tl.tensor, k_scale_ptr: tl.tensor, q_scale_ptr: tl.tensor, k_center_ptr: tl.tensor,
    softmax_scale: tl.tensor, LAYER: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Load query rows for `attend`; return them, what rounding took, factor and shift of their scores.

    `tokens_at`, [BLOCK_M] or one, is where each row's token begins; `heads` and `inside` are
    [BLOCK_M]. The rows and what rounding took are [BLOCK_M, block_d]: FP8 bits, or float16 brought into
    range by a power of two per row, exactly; factor and shift are [BLOCK_M] float32. K's scale goes into
    the factor, or into the rows where every channel has its own.
    """
    channels = tl.arange(0, LAYER.block_d)
    in_head = channels < LAYER.head_dim
    valid = inside[:, None] & in_head[None, :]
    offsets = tokens_at + heads.to(tl.int64) * stride_head  # a stride may have 31 bits
    q = tl.load(query_ptr + offsets[:, None] + channels[None, :], mask=valid, other=0.0)
    q = q.to(tl.float32)
    if LAYER.q_fp8:
        q_scale = tl.load(q_scale_ptr + heads * LAYER.q_scales, mask=inside, other=1.0)
        codes = encode(tl.div_rn(q, tl.broadcast_to(q_scale[:, None], q.shape)), LAYER.format, LAYER.encodes)
        # the centre's score is the rounded query's too
        q = decode(codes, LAYER.format, LAYER.hardware).to(tl.float32)
        q *= (q_scale * decode_unit(LAYER.format, LAYER.hardware))[:, None]
    to_base_2 = softmax_scale * LOG2_E
    shift = tl.zeros(inside.shape, tl.float32)
    if LAYER.has_center:
        center = tl.load(k_center_ptr + kv_head * LAYER.head_dim + channels, mask=in_head, other=0.0)
        shift = tl.sum(q * center[None, :], 1) * to_base_2

    factor = tl.full(inside.shape, 1.0, tl.float32) * to_base_2
    if LAYER.k_scales == 2:
        scale = tl.load(k_scale_ptr + kv_head * LAYER.head_dim + channels, mask=in_head, other=1.0)
        q = q * scale[None, :]
    else:
        factor *= tl.load(k_scale_ptr + kv_head * LAYER.k_scales)

    if LAYER.q_fp8:
        unit: tl.constexpr = score_unit(LAYER.format, LAYER.hardware, LAYER.multiplies)
        return codes, codes, factor * q_scale * unit, shift
    else:
        exponent = row_exponent(q)
        scaled = q * power_of_two(-exponent)[:, None]
        rows = scaled.to(tl.float16)
        low = (scaled - rows.to(tl.float32)).to(tl.float16)
        factor *= power_of_two(exponent) * decode_unit(LAYER.format, LAYER.hardware)
        return rows, low, factor, shift


@triton.jit
def query_rows(
    cu_seqlens_ptr: tl.tensor, seq: tl.tensor, tile: tl.tensor, kv_head: tl.tensor, LAYER: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Return a sequence's first query and number of queries; token and head of a tile's rows, [BLOCK_M]."""
    start = tl.load(cu_seqlens_ptr + seq)
    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    length = tl.load(cu_seqlens_ptr + seq + 1) - start
    return start, length, pairs // LAYER.group, kv_head * LAYER.group + pairs % LAYER.group


@triton.jit
def row_exponent(q: tl.tensor) -> tl.tensor:
    """Return exponents [BLOCK_M] that leave the largest |q| of rows [BLOCK_M, block_d] in [512, 1024)."""
    amax = tl.max(tl.abs(q), 1)
    biased = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) & 0xFF, 20)
    return tl.minimum(biased, 235) - 127 - 9


@triton.jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """Return 2 ** exponent [BLOCK_M] float32, exactly."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_offsets(
    block_table_ptr: tl.tensor, start: tl.tensor, positions: tl.tensor, inside: tl.tensor, kv_head: tl.tensor,
    LAYER: tl.constexpr, TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the place of each position's row in the cache, in rows: [TILE] int64."""
    if LAYER.block_size % TILE == 0:  # the tile lies in one block
        block_id = tl.load(block_table_ptr + start // LAYER.block_size).to(tl.int64)
        first = (block_id * LAYER.num_kv_heads + kv_head) * LAYER.block_size + start % LAYER.block_size
        return first + tl.arange(0, TILE)
    block_ids = tl.load(block_table_ptr + positions // LAYER.block_size, mask=inside, other=0)
    rows = (block_ids.to(tl.int64) * LAYER.num_kv_heads + kv_head) * LAYER.block_size
    return rows + positions % LAYER.block_size


@triton.jit
def load_codes(
    ptr: tl.tensor, rows: tl.tensor, inside: tl.tensor, LAYER: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Load a tile of K or V: [TILE, block_d / 2] int16, or two such of float16.

    Positions that are not `inside` are 0, whatever is stored.
    """
    columns = tl.arange(0, LAYER.block_d // 2)
    if LAYER.format == "float16":
        at = rows[:, None] * LAYER.head_dim + columns[None, :]
        valid = inside[:, None] & (columns < LAYER.head_dim)[None, :]
        lower = tl.load(ptr + at, mask=valid, other=0.0)
        valid = inside[:, None] & (columns < LAYER.head_dim - LAYER.block_d // 2)[None, :]
        return lower, tl.load(ptr + at + LAYER.block_d // 2, mask=valid, other=0.0)
    else:
        at = rows[:, None] * (LAYER.head_dim // 2) + columns[None, :]
        valid = inside[:, None] & (columns < LAYER.head_dim // 2)[None, :]
        return tl.load(ptr + at, mask=valid, other=0)


@triton.jit
def decode_tile(codes: tl.tensor, LAYER: tl.constexpr) -> tl.tensor:
    """Decode what `load_codes` loaded: two halves of the channels, [TILE, block_d / 2] float16 each."""
    if LAYER.format == "float16":
        return codes
    else:
        return decode_pairs(codes, LAYER.format, LAYER.hardware, LAYER.ptx)


@triton.jit
def halves(x: tl.tensor, LAYER: tl.constexpr) -> tl.tensor:
    """Split [BLOCK_M, block_d] in two halves [BLOCK_M, block_d / 2] as `decode_tile` does.

    They are even and odd columns, or lower and upper.
    """
    if LAYER.format == "float16":
        return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))
    else:
        return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def join_halves(first: tl.tensor, second: tl.tensor, LAYER: tl.constexpr) -> tl.tensor:
    """Put together again, to [BLOCK_M, block_d], what `halves` took apart."""
    if LAYER.format == "float16":
        both = tl.permute(tl.join(first, second), [0, 2, 1])
        return tl.reshape(both, [first.shape[0], 2 * first.shape[1]])
    else:
        return tl.interleave(first, second)


@triton.jit
def multiply_scores(q: tl.tensor, q_low: tl.tensor, codes: tl.tensor, LAYER: tl.constexpr) -> tl.tensor:
    """Multiply Q Kᵀ without scales: [BLOCK_M, TILE] float32.

    `q` and `q_low` are `halves` [BLOCK_M, block_d / 2], `codes` are those of `load_codes`.
    """
    # `else` throughout: what follows a constant `if` that returns is compiled all the same
    if LAYER.q_fp8 and LAYER.multiplies:
        even, odd = unpack_pairs(codes, LAYER.ptx)
        fp8: tl.constexpr = hardware_type(LAYER.format)
        even = tl.trans(even.to(fp8, bitcast=True))
        odd = tl.trans(odd.to(fp8, bitcast=True))
        # without the limit Hopper adds up a whole row with 14 bits
        scores = tl.dot(q[0].to(fp8, bitcast=True), even, max_num_imprecise_acc=32)
        return tl.dot(q[1].to(fp8, bitcast=True), odd, scores, max_num_imprecise_acc=32)
    else:
        even, odd = decode_tile(codes, LAYER)
        even = tl.trans(even)
        odd = tl.trans(odd)
        if LAYER.q_fp8:
            scores = tl.dot(decode(q[0], LAYER.format, LAYER.hardware), even)
            return tl.dot(decode(q[1], LAYER.format, LAYER.hardware), odd, scores)
        elif LAYER.splits_query:
            scores = tl.dot(q_low[1], odd, tl.dot(q_low[0], even))
            return tl.dot(q[1], odd, tl.dot(q[0], even, scores))
        else:
            return tl.dot(q[1], odd, tl.dot(q[0], even))


@triton.constexpr_function
def score_unit(FORMAT: str, HARDWARE: bool, MULTIPLIES: bool) -> float:
    """Return the power of two that decoded Q and K lack, to multiply their product with."""
    return 1.0 if MULTIPLIES else decode_unit(FORMAT, HARDWARE) ** 2


@triton.jit
def start_softmax(
    sinks_ptr: tl.tensor, heads: tl.tensor, inside: tl.tensor, has_sink: tl.tensor, LAYER: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return the origin of the weights (base 2) and their sum before the first tile, two [BLOCK_M]."""
    if LAYER.has_sinks and has_sink:
        sink = tl.load(sinks_ptr + heads, mask=inside, other=0.0).to(tl.float32)
        sink = tl.maximum(sink, -1e30) * LOG2_E  # of -inf, -inf minus -inf would be NaN
        # its weight by definition: the compiler fuses the product with a difference, which of
        # sinks of -1e30 leaves 2^66
        weight = tl.where(tl.abs(sink) < 2.0**24, tl.exp2(WEIGHT_EXPONENT), 1.0)
        return origin_of(sink), weight
    return tl.full(inside.shape, float("-inf"), tl.float32), tl.zeros(inside.shape, tl.float32)


@triton.jit
def origin_of(largest: tl.tensor) -> tl.tensor:
    """Return the base-2 logit of weight 1 [BLOCK_M], if the `largest` has weight 2 ** WEIGHT_EXPONENT."""
    # beyond, the difference would be rounded, at last to 16, which float16 cannot hold
    return tl.where(tl.abs(largest) < 2.0**24, largest - WEIGHT_EXPONENT, largest)


@triton.jit
def apply_softcap(scores: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """Return softcap * tanh(scores / softcap) [BLOCK_M, TILE], in base 2 before and after."""
    # tanh(x) = 1 - 2 / (e^2x + 1), and e^2x = 2^(scores * 2 / softcap)
    return softcap * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / softcap)) + 1.0))


@triton.jit
def attend(
    q: tl.tensor,  # [BLOCK_M, block_d] float16, or FP8 bits
    q_low: tl.tensor,  # [BLOCK_M, block_d] the rest, added where the query does not fit float16
    factor: tl.tensor,  # [BLOCK_M] turns a raw score into a logit in base 2
    shift: tl.tensor,  # [BLOCK_M] added to it: the centre's score
    rows_at: tl.tensor,  # [BLOCK_M] position of each query row
    origin: tl.tensor,  # [BLOCK_M] the logit, in base 2, whose weight is 1; -inf, or as the sink has it
    running_sum: tl.tensor,  # [BLOCK_M] of weights; 0, or the sink's
    first: tl.tensor,  # positions from `first` ..
    end: tl.tensor,  # .. up to `end`, not included
    key_ptr: tl.tensor,  # the codes of two channels in each int16; or float16
    value_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    kv_head: tl.tensor,
    softcap: tl.tensor,
    LAYER: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the output [BLOCK_M, block_d] and the origin and sum of its weights.

    The output is neither divided by that sum nor multiplied by V's scale.
    """
    q = halves(q, LAYER)
    q_low = halves(q_low, LAYER)
    even_acc = tl.zeros([q[0].shape[0], LAYER.block_d // 2], tl.float32)
    odd_acc = tl.zeros([q[0].shape[0], LAYER.block_d // 2], tl.float32)
    for start in range(first // TILE * TILE, end, TILE):
        positions = start + tl.arange(0, TILE)
        inside = (positions >= first) & (positions < end)
        rows = row_offsets(block_table_ptr, start, positions, inside, kv_head, LAYER, TILE)
        key = load_codes(key_ptr, rows, inside, LAYER)
        value = load_codes(value_ptr, rows, inside, LAYER)

        scores = multiply_scores(q, q_low, key, LAYER)
        scores = scores * factor[:, None]
        if LAYER.has_center:
            scores += shift[:, None]
        if LAYER.softcap:
            scores = apply_softcap(scores, softcap)
        visible = inside[None, :] & (positions[None, :] <= rows_at[:, None])
        if LAYER.window > 0:
            visible &= positions[None, :] > rows_at[:, None] - LAYER.window
        scores = tl.where(visible, scores, float("-inf"))

        new_origin = tl.maximum(origin, origin_of(tl.max(scores, 1)))
        finite = tl.where(new_origin == float("-inf"), 0.0, new_origin)  # -inf minus -inf is NaN
        weights = tl.exp2(scores - finite[:, None])
        correction = tl.exp2(origin - finite)
        running_sum = running_sum * correction + tl.sum(weights, 1)
        even, odd = decode_tile(value, LAYER)
        rounded = weights.to(tl.float16)
        even_acc = tl.dot(rounded, even, even_acc * correction[:, None])
        odd_acc = tl.dot(rounded, odd, odd_acc * correction[:, None])
        if LAYER.splits_weights:
            low = (weights - rounded.to(tl.float32)).to(tl.float16)
            even_acc = tl.dot(low, even, even_acc)
            odd_acc = tl.dot(low, odd, odd_acc)
        origin = new_origin
    return join_halves(even_acc, odd_acc, LAYER), origin, running_sum
