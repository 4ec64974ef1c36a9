"""Engines' rounding beside the same walk over the keys written as a loop, in float64."""

import math

import pytest
import torch

from fp8kv_runtime.engine_attention import fa3_attention, vllm_triton_attention
from fp8kv_runtime.options import AttentionOptions

# fp32 sums of a few hundred terms beside float64
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def e4m3(x):
    return x.float().to(torch.float8_e4m3fn).double()


def e4m3_weight(p):
    return e4m3(256 * p) / 256


def bf16(x):
    return x.bfloat16().double()


def walk(query, key, value, visible, options, tiles, weight, *, from_sink):
    """One row after the other, [T, H, D]; `tiles`: parts, each a list of slices of the keys.

    `weight` rounds exp(score - largest so far); every part has a largest of its own.
    """
    tokens, heads, dim = query.shape
    out = torch.zeros(tokens, heads, dim, dtype=torch.float64)
    scale = dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    for t in range(tokens):
        for h in range(heads):
            head = h // (heads // key.shape[1])
            sink = -math.inf if options.sinks is None else float(options.sinks[h])
            parts = []
            for number, part in enumerate(tiles):
                largest, total, acc = -math.inf, 0.0, torch.zeros(dim, dtype=torch.float64)
                if from_sink and number == 0 and sink > -math.inf:
                    largest, total = sink, 1.0
                for tile in part:
                    scores = scale * (key[tile, head] @ query[t, h])
                    if options.softcap is not None:
                        scores = options.softcap * torch.tanh(scores / options.softcap)
                    scores = scores[visible[t, tile]]
                    if not len(scores):
                        continue
                    before, largest = largest, max(largest, float(scores.max()))
                    again = math.exp(before - largest)
                    p = (scores - largest).exp()
                    total = total * again + float(p.sum())
                    acc = acc * again + weight(p) @ value[tile, head][visible[t, tile]]
                parts.append((largest, total, acc))
            most = max(largest for largest, *_ in parts)
            if most == -math.inf:
                continue
            shares = [math.exp(largest - most) for largest, *_ in parts]
            total = sum(s * part[1] for s, part in zip(shares, parts, strict=True))
            if not from_sink and sink > -math.inf:
                total += math.exp(sink - most)
            acc = sum(s * part[2] for s, part in zip(shares, parts, strict=True))
            out[t, h] = acc / total
    return out


def slices(length, size):
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def inputs(tokens, length, heads, kv_heads, dim, window=None):
    """Query and restored K and V, tokens first, in float64; and what each token sees.

    Scales are powers of two, so that fp32 has the scores as float64 has them, nearly.
    """
    generator = torch.Generator().manual_seed(tokens + length + dim)
    query = 2 * torch.randn(tokens, heads, dim, generator=generator)
    key, value = (
        e4m3(100 * torch.randn(length, kv_heads, dim, generator=generator)) * scale
        for scale in (2.0**-6, 2.0**-5)
    )
    rows, columns = torch.arange(length - tokens, length)[:, None], torch.arange(length)
    visible = columns <= rows
    if window is not None:
        visible &= columns > rows - window
    return query.double(), key, value, visible


def dense(attention, query, key, value, visible, options, **kwargs):
    """Call with batch and heads first, in float32."""
    batched = (x.float().transpose(0, 1)[None] for x in (query, key, value))
    return attention(*batched, visible[None, None], options, **kwargs)[0].transpose(0, 1).double()


OPTIONS = {
    "plain": AttentionOptions(),
    "scale": AttentionOptions(0.05),
    "softcap": AttentionOptions(softcap=3.0),
    "sinks": AttentionOptions(sinks=torch.linspace(-2, 4, 4)),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("tokens", "length", "dim", "tile"),
    [(40, 300, 64, 128), (3, 300, 64, 128), (40, 400, 128, 192), (1, 300, 128, 96),
     (40, 250, 80, 128), (33, 200, 192, 96), (33, 300, 256, 128)],
)  # fmt: skip
def test_flash_attention_3_walks_back_from_the_last_tile(tokens, length, dim, tile, options):
    query, key, value, visible = inputs(tokens, length, 4, 2, dim)
    back = [slices(length, tile)[::-1]]
    want = walk(e4m3(query), key, value, visible, options, back, e4m3_weight, from_sink=False)
    made = dense(fa3_attention, query, key, value, visible, options)
    _nearly_all_close(made, want)


def _nearly_all_close(made, want):
    """A weight in the middle of two codes may go the other way in float64: in few rows of many."""
    rows = ((made - want).abs() > CLOSE["atol"] + CLOSE["rtol"] * want.abs()).any(-1)
    assert rows.double().mean() <= 0.03


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("fp8", [None, torch.float8_e4m3fn, torch.float8_e4m3fnuz])
@pytest.mark.parametrize(("tokens", "window"), [(20, None), (20, 30), (1, None)])
def test_vllms_kernel_walks_forward_in_tiles_of_32(tokens, window, fp8, options):
    length = 600
    query, key, value, visible = inputs(tokens, length, 4, 2, 64, window)
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
        rounded, weight = tuple(map(bf16, (query, key, value))), bf16
    want = walk(*rounded, visible, options, tiles, weight, from_sink=True)
    how = {"dtype": torch.bfloat16} if fp8 is None else {"dtype": None, "fp8": fp8}
    made = dense(vllm_triton_attention, query, key, value, visible, options, **how)
    _nearly_all_close(made, want)


def test_a_token_that_sees_nothing_gets_zeros():
    query, key, value, visible = inputs(4, 6, 4, 2, 64)
    visible[0] = False
    for attention, how in (
        (fa3_attention, {}),
        (vllm_triton_attention, {}),
        (vllm_triton_attention, {"dtype": None}),
    ):
        made = dense(attention, query, key, value, visible, AttentionOptions(), **how)
        assert (made[0] == 0).all()
        assert made[1:].isfinite().all()
        assert (made[1:] != 0).any()


def test_weights_far_below_the_largest_leave_the_numerator_and_not_the_sum():
    """The offset of 8 keeps 2^-17 of the largest weight: 2^-9, E4M3's smallest number."""
    query, value = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 2, 64)
    key, value[0, 0, 1], query[..., 0] = torch.zeros(1, 1, 2, 64), 1.0, 1.0
    visible = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    for below, left in ((16, 2.0**-16), (17, 2.0**-17), (18, 0.0)):
        key[0, 0, 1, 0] = -below * math.log(2)
        made = fa3_attention(query, key, value, visible, AttentionOptions(1.0))
        want = torch.full_like(made, left / (1 + 2.0**-below))
        torch.testing.assert_close(made, want, rtol=1e-6, atol=0)


def test_queries_have_scale_1_unless_one_is_given():
    query, key, value, visible = inputs(8, 8, 4, 2, 64)

    def attend(query, key, q_scale=None):
        return dense(fa3_attention, query, key, value, visible, AttentionOptions(q_scale=q_scale))

    small, large = query / 2**14, 2**14 * key  # at scale 1.0 all of the small ones are 0
    assert torch.equal(attend(small, large), attend(torch.zeros_like(small), key))
    made = attend(small, large, torch.full((4,), 2.0**-14))
    torch.testing.assert_close(made, attend(query, key), **CLOSE)
    # query heads that share keys have the largest of their scales
    apart, shared = torch.tensor([[0.01, 0.03, 0.02, 0.001], [0.03, 0.03, 0.02, 0.02]])
    assert torch.equal(attend(query, key, apart), attend(query, key, shared))
