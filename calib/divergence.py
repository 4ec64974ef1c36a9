"""KL of the softmax of two logits, to six digits whatever their size and however alike they are."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

_LOWEST = torch.finfo(torch.float32).min  # in place of -inf: its share is 0, differences are finite
_LOG2_E = 1 / math.log(2)
# below this, beside the sizes of what is subtracted, rounding in float64 would show
_ALIKE = 1e-8
_SERIES = 0.03  # up to where six terms of a series are exact in float64
# values at a time: copies of a few rows in float64 stay in a processor's cache
_VALUES = {"cpu": 2**18, "other": 2**23}


class Pair(NamedTuple):
    """Rows of two logits, compared; float64."""

    kl: Tensor  # [T] KL(expected || found) in nats; inf where only `found` rules a token out
    agrees: Tensor  # [T] bool, the likeliest token is the same
    log_sum: Tensor  # [T] log of the sum of e^found


class _Softmax(NamedTuple):
    """Rows of logits [T, V] as e^(logit - top) / sum; top [T, 1], sum [T]."""

    top: Tensor
    likeliest: Tensor  # [T, 1]
    weights: Tensor
    sum: Tensor


def rows_at_once(logits: Tensor) -> int:
    """How many rows of `logits` to compare at a time."""
    values = _VALUES.get(logits.device.type, _VALUES["other"])
    return max(1, values // logits.shape[-1])


def divergence(expected: Tensor, found: Tensor) -> Tensor:
    """KL of the softmax of two logits [T, V]: [T] nats in float64, as float32 has no room."""
    step = rows_at_once(expected)
    starts = range(0, len(expected), step)
    pairs = (compare_pair(expected[i : i + step], found[i : i + step]) for i in starts)
    return torch.cat([pair.kl for pair in pairs])


def compare_pair(expected: Tensor, found: Tensor) -> Pair:
    """Compare rows of two logits [T, V], float32 or smaller."""
    expected, found = expected.float(), found.float()
    a, b = (x.double().clamp_(min=_LOWEST) for x in (expected, found))
    p, q = _softmax(a), _softmax(b)
    mean = (b - a).mul_(p.weights).sum(-1) / p.sum
    shift = (q.top - p.top).squeeze(1)
    kl = shift + (q.sum / p.sum).log() - mean
    alike = ~(kl > _ALIKE * (1 + shift.abs() + mean.abs()))
    if alike.any():
        is_same = (a == b).all(-1)
        kl[is_same], alike = 0.0, alike & ~is_same
        kl[alike] = _of_alike(a[alike], b[alike], p.likeliest[alike])
    _mark_impossible(kl, expected, found)
    log_sum = q.top.squeeze(1) + q.sum.log()
    agrees = (p.likeliest == q.likeliest).squeeze(1) & ~kl.isnan()
    return Pair(kl, agrees, log_sum)


def _mark_impossible(kl: Tensor, expected: Tensor, found: Tensor) -> None:
    """Set what follows from -inf: inf where `found` alone has it, NaN where a row has nothing else.

    A masked vocabulary has it in both, and changes nothing.
    """
    if min(expected.amin(), found.amin()) > -math.inf:
        return
    kl[(found.isneginf() & ~expected.isneginf()).any(-1) & ~kl.isnan()] = math.inf
    kl[expected.isneginf().all(-1) | found.isneginf().all(-1)] = math.nan


def _softmax(logits: Tensor) -> _Softmax:
    top, likeliest = logits.max(-1, keepdim=True)
    weights = (logits - top).mul_(_LOG2_E).exp2_()  # in half the time of exp
    return _Softmax(top, likeliest, weights, weights.sum(-1))


def _of_alike(a: Tensor, b: Tensor, likeliest: Tensor) -> Tensor:
    """KL as a sum of terms that are never negative: nothing cancels."""
    p, q = _softmax(a), _softmax(b)
    shares, others = p.weights.div_(p.sum[:, None]), q.weights.div_(q.sum[:, None])
    about = (q.top - b.gather(1, likeliest)) + (q.sum / p.sum).log()[:, None]
    x = _moved(a, b, likeliest)
    x -= _log_ratio(x, shares, others, about)
    is_near = x.abs() < 1
    near = shares * _beyond_linear(x.where(is_near, 0))
    return near.where(is_near, others - shares * (1 + x)).sum(-1)


def _moved(a: Tensor, b: Tensor, likeliest: Tensor) -> Tensor:
    """b - a less the same at the likeliest token; logits may be 1e38 apart and move by 1e-30."""
    d, lost = _difference(b, a)
    at_likeliest, lost_there = d.gather(1, likeliest), lost.gather(1, likeliest)
    moved, more = _difference(d, at_likeliest)
    return moved.add_(more.add_(lost.sub_(lost_there)))


def _difference(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a - b, and what rounding took from it (Knuth's TwoSum)."""
    d = a - b
    taken = d - a
    return d, (a - (d - taken)).sub_(taken.add_(b))


def _log_ratio(x: Tensor, shares: Tensor, others: Tensor, about: Tensor) -> Tensor:
    """The log of the sum of `shares` e^x, which is `about` [T, 1]; from the terms, if it is tiny.

    x is 0 at the likeliest token.
    """
    is_near = x.abs() < 1
    change = (shares * x.where(is_near, 0).expm1()).where(is_near, others - shares)
    rest = others.where(is_near, 0).sum(-1, keepdim=True)
    tiny = (change.sum(-1, keepdim=True) / rest).log1p()
    return tiny.where(about.abs() < _ALIKE, about)


def _beyond_linear(x: Tensor) -> Tensor:
    """e^x - 1 - x."""
    series = 1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7))))
    return torch.where(x.abs() < _SERIES, x * x / 2 * series, x.expm1() - x)
