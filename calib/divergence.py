"""KL of the softmax of two logits, to six digits, also where the logits are huge or nearly equal."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

_LOWEST = torch.finfo(torch.float32).min  # replaces -inf: its probability is 0, differences are finite
_LOG2_E = 1 / math.log(2)
# a smaller KL, relative to the terms that are subtracted, would show the rounding of float64
_CANCELS = 1e-8
_SERIES = 0.03  # up to where six terms of a series are exact in float64
# values at a time: copies of a few rows in float64 stay in a processor's cache
_VALUES = {"cpu": 2**18, "other": 2**23}


class LogitPair(NamedTuple):
    """Rows of two logits, compared; float64."""

    kl: Tensor  # [T] KL(expected || actual) in nats; inf where only `actual` rules a token out
    agrees: Tensor  # [T] bool, the likeliest token is the same
    log_sum: Tensor  # [T] log of the sum of e^actual


class _Softmax(NamedTuple):
    """Rows of logits [T, V] as e^(logit - top) / sum; top [T, 1], sum [T]."""

    top: Tensor
    likeliest: Tensor  # [T, 1]
    weights: Tensor
    sum: Tensor


def rows_at_once(logits: Tensor) -> int:
    """Return the number of rows of `logits` to compare at a time."""
    values = _VALUES.get(logits.device.type, _VALUES["other"])
    return max(1, values // logits.shape[-1])


def divergence(expected: Tensor, actual: Tensor) -> Tensor:
    """Return KL of the softmax of two logits [T, V]: [T] nats in float64."""
    step = rows_at_once(expected)
    starts = range(0, len(expected), step)
    return torch.cat([compare_pair(expected[i : i + step], actual[i : i + step]).kl for i in starts])


def compare_pair(expected: Tensor, actual: Tensor) -> LogitPair:
    """Compare rows of two logits [T, V], float32 or smaller."""
    expected, actual = expected.float(), actual.float()
    a, b = (x.double().clamp_(min=_LOWEST) for x in (expected, actual))
    p, q = _softmax(a), _softmax(b)
    mean = (b - a).mul_(p.weights).sum(-1) / p.sum
    shift = (q.top - p.top).squeeze(1)
    kl = shift + (q.sum / p.sum).log() - mean
    cancels = ~(kl > _CANCELS * (1 + shift.abs() + mean.abs()))
    if cancels.any():
        is_equal = (a == b).all(-1)
        kl[is_equal], cancels = 0.0, cancels & ~is_equal
        kl[cancels] = _kl_without_cancelling(a[cancels], b[cancels], p.likeliest[cancels])
    _mark_impossible(kl, expected, actual)
    agrees = (p.likeliest == q.likeliest).squeeze(1) & ~kl.isnan()
    return LogitPair(kl, agrees, q.top.squeeze(1) + q.sum.log())


def _mark_impossible(kl: Tensor, expected: Tensor, actual: Tensor) -> None:
    """Set inf where only `actual` has -inf, and NaN where a row has nothing but -inf.

    A masked vocabulary has -inf in both, and changes nothing.
    """
    if min(expected.amin(), actual.amin()) > -math.inf:
        return
    kl[(actual.isneginf() & ~expected.isneginf()).any(-1) & ~kl.isnan()] = math.inf
    kl[expected.isneginf().all(-1) | actual.isneginf().all(-1)] = math.nan


def _softmax(logits: Tensor) -> _Softmax:
    top, likeliest = logits.max(-1, keepdim=True)
    weights = (logits - top).mul_(_LOG2_E).exp2_()  # in half the time of exp
    return _Softmax(top, likeliest, weights, weights.sum(-1))


def _kl_without_cancelling(a: Tensor, b: Tensor, likeliest: Tensor) -> Tensor:
    """Return KL as a sum of terms that are never negative, so that nothing cancels."""
    p, q = _softmax(a), _softmax(b)
    p_shares, q_shares = p.weights.div_(p.sum[:, None]), q.weights.div_(q.sum[:, None])
    log_ratio = (q.top - b.gather(1, likeliest)) + (q.sum / p.sum).log()[:, None]
    x = _shift_from_likeliest(a, b, likeliest)
    x -= _exact_log_ratio(x, p_shares, q_shares, log_ratio)
    is_near = x.abs() < 1
    near = p_shares * _exp_beyond_linear(x.where(is_near, 0))
    return near.where(is_near, q_shares - p_shares * (1 + x)).sum(-1)


def _shift_from_likeliest(a: Tensor, b: Tensor, likeliest: Tensor) -> Tensor:
    """Return b - a minus its value at the likeliest token, exact for logits of 1e38 that move by 1e-30."""
    d, error = _difference(b, a)
    d_likeliest, error_likeliest = d.gather(1, likeliest), error.gather(1, likeliest)
    shift, shift_error = _difference(d, d_likeliest)
    return shift.add_(shift_error.add_(error.sub_(error_likeliest)))


def _difference(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a - b and its rounding error (Knuth's TwoSum)."""
    d = a - b
    minus_b = d - a
    return d, (a - (d - minus_b)).sub_(minus_b.add_(b))


def _exact_log_ratio(x: Tensor, p_shares: Tensor, q_shares: Tensor, log_ratio: Tensor) -> Tensor:
    """Return the log of the sum of p e^x: `log_ratio` [T, 1], or from the terms if that is tiny.

    x is 0 at the likeliest token.
    """
    is_near = x.abs() < 1
    change = (p_shares * x.where(is_near, 0).expm1()).where(is_near, q_shares - p_shares)
    near_sum = q_shares.where(is_near, 0).sum(-1, keepdim=True)
    tiny = (change.sum(-1, keepdim=True) / near_sum).log1p()
    return tiny.where(log_ratio.abs() < _CANCELS, log_ratio)


def _exp_beyond_linear(x: Tensor) -> Tensor:
    """Return e^x - 1 - x."""
    series = 1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7))))
    return torch.where(x.abs() < _SERIES, x * x / 2 * series, x.expm1() - x)
