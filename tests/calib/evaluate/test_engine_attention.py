"""Engines' rounding beside the same walk over the keys written as a loop, in float64."""

import math
from fractions import Fraction
from itertools import product
from operator import mul

import pytest
import torch

from calib.evaluate.engine_attention import HopperAdds, fa3_attention, hopper_product, vllm_triton_attention
from fp8kv_runtime.options import AttentionOptions

# fp32 sums of a few hundred terms, in any order, and their exponentials beside float64
ERROR = 2e-5
CLOSE = {"rtol": ERROR, "atol": 2e-6}


def e4m3(x):
    return x.float().to(torch.float8_e4m3fn).double()


def e4m3_weight(p):
    return e4m3(256 * p) / 256


def in_float64(a, b, start):
    return start + a @ b


def walk(query, key, value, visible, options, parts, weight, *, from_sink, add=in_float64):
    """One row after the other, [T, H, D]; every part, a list of slices of the keys, has a largest of its own.

    `weight` rounds exp(score - largest so far). Returns the output, and how far it moves where weights that
    are nearly in the middle of two codes go the other way: which way is the processor's fp32.
    """
    tokens, heads, dim = query.shape
    out, moved = torch.zeros(2, tokens, heads, dim, dtype=torch.float64)
    scale = dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    for t, h in product(range(tokens), range(heads)):
        head = h // (heads // key.shape[1])
        sink = -math.inf if options.sinks is None else float(options.sinks[h])
        walked = [] if from_sink else [(sink, 1.0, 0.0, 0.0)]
        for number, tiles in enumerate(parts):
            largest, total, (acc, move) = -math.inf, 0.0, torch.zeros(2, 1, dim, dtype=torch.float64)
            if from_sink and number == 0 and sink > -math.inf:
                largest, total = sink, 1.0
            for tile in tiles:
                zeros = torch.zeros(1, len(key[tile]), dtype=torch.float64)
                scores = scale * add(query[t, h][None], key[tile, head].T, zeros)[0]
                if options.softcap is not None:
                    scores = options.softcap * torch.tanh(scores / options.softcap)
                scores = scores[visible[t, tile]]
                if len(scores):
                    before, largest = largest, max(largest, float(scores.max()))
                    # fp32's own, in full vectors: where sums are cut, another last bit is another cut
                    again, p = float(torch.full((16,), before - largest).exp()[0]), (scores - largest).exp()
                    total = total * again + float(p.sum())
                    values = value[tile, head][visible[t, tile]]
                    acc = add(weight(p)[None], values, acc * again)
                    gap = weight(p * (1 + ERROR)) - weight(p * (1 - ERROR))
                    move = move * again + gap @ values.abs()
            walked.append((largest, total, acc, move))
        most = max(largest for largest, *_ in walked)
        if most > -math.inf:
            shares = [math.exp(largest - most) for largest, *_ in walked]
            total, acc, move = (sum(map(mul, shares, parts)) for parts in list(zip(*walked, strict=True))[1:])
            out[t, h], moved[t, h] = acc[0] / total, move[0] / total
    return out, moved


def slices(length, size):
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def inputs(tokens, length, dim, window=None):
    """Query and restored K and V, tokens first, in float64; and what each token sees, the first one nothing.

    Scales are powers of two, so that fp32 has the scores as float64 has them, nearly.
    """
    generator = torch.Generator().manual_seed(tokens + length + dim)
    query = 2 * torch.randn(tokens, 4, dim, generator=generator)
    scales = 2.0**-6, 2.0**-5
    key, value = (e4m3(100 * torch.randn(length, 2, dim, generator=generator)) * scale for scale in scales)
    rows, columns = torch.arange(length - tokens, length)[:, None], torch.arange(length)
    visible = columns <= rows
    if window is not None:
        visible &= columns > rows - window
    visible[: min(1, tokens - 1)] = False
    return query.double(), key, value, visible


def dense(attention, query, key, value, visible, options, **kwargs):
    """Call with batch and heads first, in float32."""
    batched = (x.float().transpose(0, 1)[None] for x in (query, key, value))
    return attention(*batched, visible[None, None], options, **kwargs)[0].transpose(0, 1).double()


def assert_close(made, want, moved):
    """Sums that are cut move by a little more than their weights do."""
    assert (made[(want == 0).all(-1)] == 0).all()
    assert ((made - want).abs() <= CLOSE["atol"] + CLOSE["rtol"] * want.abs() + 2 * moved).all()


OPTIONS = {"plain": AttentionOptions(), "scale": AttentionOptions(0.05)}
OPTIONS |= {"softcap": AttentionOptions(softcap=3.0)}
OPTIONS |= {"sinks": AttentionOptions(sinks=torch.linspace(-2, 4, 4))}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("tokens", "length", "dim", "tile"),
    [(40, 300, 64, 128), (3, 300, 64, 128), (40, 400, 128, 192), (1, 300, 128, 96),
     (40, 250, 80, 128), (33, 200, 192, 96), (33, 300, 256, 128)],
)  # fmt: skip
def test_flash_attention_3_walks_back_from_the_last_tile(tokens, length, dim, tile, options):
    query, key, value, visible = inputs(tokens, length, dim)
    back = [slices(length, tile)[::-1]]
    want = walk(e4m3(query), key, value, visible, options, back, e4m3_weight, from_sink=False)
    assert_close(dense(fa3_attention, query, key, value, visible, options), *want)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("fp8", [None, torch.float8_e4m3fn, torch.float8_e4m3fnuz])
@pytest.mark.parametrize(("tokens", "window"), [(20, None), (20, 30), (1, None)])
def test_vllms_kernel_walks_forward_in_tiles_of_32(tokens, window, fp8, options):
    length = 600
    query, key, value, visible = inputs(tokens, length, 64, window)
    tiles = [slices(length, 32)]
    if tokens == 1:  # 16 parts of whole tiles
        size = 32 if fp8 else 16
        all_tiles, each = slices(length, size), -(-length // (16 * size))
        tiles = [all_tiles[i : i + each] for i in range(0, len(all_tiles), each)]
    if fp8 == torch.float8_e4m3fnuz:  # as MI300X has it: half as large, so half the factor
        query, key = 64 * query, key / 64  # some beyond 224, where vLLM cuts them off
        rounded = (query.clamp(-224, 224).float().to(fp8).double(), key, value)
        weight = lambda p: (128 * p).float().to(fp8).double() / 128  # noqa: E731
    elif fp8:
        rounded, weight = (e4m3(query), key, value), e4m3_weight
    else:
        weight = lambda p: p.bfloat16().double()  # noqa: E731
        rounded = tuple(map(weight, (query, key, value)))
    want = walk(*rounded, visible, options, tiles, weight, from_sink=True)
    how = {"dtype": torch.bfloat16} if fp8 is None else {"dtype": None, "fp8": fp8}
    assert_close(dense(vllm_triton_attention, query, key, value, visible, options, **how), *want)


def test_queries_have_scale_1_unless_one_is_given():
    query, key, value, visible = inputs(8, 8, 64)

    def attend(query, key, q_scale=None):
        return dense(fa3_attention, query, key, value, visible, AttentionOptions(q_scale=q_scale))

    small, large = query / 2**14, 2**14 * key  # at scale 1.0 all of the small ones are 0
    assert torch.equal(attend(small, large), attend(torch.zeros_like(small), key))
    torch.testing.assert_close(attend(small, large, torch.full((4,), 2.0**-14)), attend(query, key), **CLOSE)
    # query heads that share keys have the largest of their scales
    apart, shared = torch.tensor([[0.01, 0.03, 0.02, 0.001], [0.03, 0.03, 0.02, 0.02]])
    assert torch.equal(attend(query, key, apart), attend(query, key, shared))


def added(codes, others, total):
    """One sum as MMA-Sim describes an H100's, in exact fractions, 32 products at a time."""
    for k in range(0, len(codes), 32):
        pairs = [pair for pair in zip(codes[k : k + 32], others[k : k + 32], strict=True) if all(pair)]
        terms = [(Fraction(a) * Fraction(b), max(exponent(a), -6) + max(exponent(b), -6)) for a, b in pairs]
        terms += [(Fraction(total), exponent(total))] if total else []
        step = Fraction(2) ** (max((e for _, e in terms), default=0) - 13)
        total = sum(int(x / step) for x, _ in terms) * step
        step = Fraction(2) ** (exponent(total) - 13) if total else 1
        total = int(total / step) * step
    return float(total)


def exponent(x):
    return math.frexp(float(x))[1] - 1


# in some sums most products are cut off, and in some one factor is below the smallest exponent
@pytest.mark.parametrize(("spread", "largest"), [(0.5, 448), (5.0, 448), (5.0, 2.0**-7)])
def test_hoppers_adds_cut_behind_the_largest(spread, largest):
    generator = torch.Generator().manual_seed(0)
    whole, exponents = torch.randn(2, 2, 2, 5, 70, generator=generator)
    scattered = whole * 2 ** (spread * exponents)
    codes, others = (e4m3(x.clamp(-y, y)).float() for x, y in zip(scattered, (largest, 448), strict=True))
    start = 3 * torch.randn(2, 5, 5, generator=generator)
    for begin in (torch.zeros_like(start), start):
        made = hopper_product(codes, others.mT, begin if begin.any() else None)
        for h, i, j in product(range(2), range(5), range(5)):
            want = added(codes[h, i].tolist(), others[h, j].tolist(), float(begin[h, i, j]))
            assert float(made[h, i, j]) == want
    assert not torch.equal(made, start + codes @ others.mT)


@pytest.mark.parametrize(("every", "share"), [(None, 16384 / 20480), (64, 1.0), (1, 1.0)])
def test_one_accumulator_stalls_where_two_go_on(every, share):
    """Of 20,480 equal products the last 4,096 lie more than 13 bits below their sum."""
    query, key = torch.zeros(1, 2, 1, 16), torch.zeros(1, 1, 20480, 16)
    scales = torch.tensor([0.3])  # what is added are codes: with values of 0.3 it would stall elsewhere
    adds = HopperAdds(scales, scales, every)
    made = fa3_attention(query, key, key + 0.3, torch.ones(1, 1, 1, 20480).bool(), AttentionOptions(), adds)
    torch.testing.assert_close(made, torch.full_like(made, 0.3 * share))


@pytest.mark.parametrize("every", [1, None])
def test_hoppers_attention_walks_back_with_such_sums(every):
    query, key, value, visible = inputs(40, 300, 64)
    adds = HopperAdds(torch.tensor([2.0**-6]), torch.tensor([2.0**-5]), every)

    def add(codes, others, start):
        """Powers of two move no cut; weights are codes of 256 times the weight."""
        sums = hopper_product(
            256 * codes.float(), 64 * others.float(), None if every else 2**14 * start.float()
        )
        return sums.double() / 2**14 + (start if every else 0)

    back, options = [slices(300, 128)[::-1]], AttentionOptions()
    want = walk(e4m3(query), key, value, visible, options, back, e4m3_weight, from_sink=False, add=add)
    assert_close(dense(fa3_attention, query, key, value, visible, options, adds=adds), *want)
