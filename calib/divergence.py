"""KL of the softmax of two logits, to six digits, also where the logits are huge or nearly equal."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_LOWEST = torch.finfo(torch.float32).min  # replaces -inf: its probability is 0, differences are finite
_LOG2_E = 1 / math.log(2)
# a smaller KL, relative to the terms that are subtracted, would show the rounding of float64
_CANCELS = 1e-8
_SERIES = 0.03  # up to where six terms of a series are exact in float64
# values at a time: copies of a few rows in float64 stay in a processor's cache
_CPU_VALUES, _GPU_VALUES = 2**18, 2**23


class LogitPair(NamedTuple):
    """The T rows of two logits, compared."""

    kl: Tensor  # [T] float64, KL(expected || actual) in nats; inf where only `actual` rules a token out
    agrees: Tensor  # [T] bool, the likeliest token is the same
    log_sum: Tensor  # [T] float64, log of the sum of e^actual


class _Softmax(NamedTuple):
    """Rows of logits [T, V] as e^(logit - top) / sum."""

    top: Tensor  # [T, 1] float64
    likeliest: Tensor  # [T, 1] int64
    weights: Tensor  # [T, V] float64
    sum: Tensor  # [T] float64
    mean: Tensor  # [T] float64, mean of logit - top under the reference's probabilities


class ReferenceLogits:
    """Rows of logits [T, V] that others are compared with; their softmax is computed once.

    It is kept in float64: twice the memory of the logits in float32.
    """

    def __init__(self, logits: Tensor) -> None:
        logits = logits.float()
        self._blocks = _split_rows(logits)
        self._is_masked = bool(logits.isneginf().any())
        self._softmax = [_softmax(block, self._is_masked) for block in self._blocks]

    def compare(self, actual: Tensor) -> LogitPair:
        """Compare with `actual` [T, V], of float32, float16 or bfloat16."""
        pairs = map(self._compare_block, self._blocks, self._softmax, _split_rows(actual))
        return LogitPair(*map(torch.cat, zip(*pairs, strict=True)))

    def _compare_block(self, expected: Tensor, p: _Softmax, actual: Tensor) -> LogitPair:
        actual = actual.float()
        top, likeliest, below = _subtract_top(actual, self._is_masked)
        mean = torch.linalg.vecdot(below, p.weights) / p.sum
        weights = below.mul_(_LOG2_E).exp2_()
        q = _Softmax(top, likeliest, weights, weights.sum(-1), mean)
        kl = (q.sum / p.sum).log() - (q.mean - p.mean)
        if self._is_masked:
            kl[_rules_out(actual, expected)] = math.inf
        cancels = ~(kl > _CANCELS * (1 + q.mean.abs() + p.mean.abs())) | kl.isinf()
        if cancels.any():
            is_equal = (expected == actual).all(-1) & ~kl.isnan()
            rows = cancels & ~is_equal
            kl[is_equal] = 0.0
            p_rows, q_rows = (_Softmax(*(part[rows] for part in softmax)) for softmax in (p, q))
            kl[rows] = _kl_without_cancelling(expected[rows], actual[rows], p_rows, q_rows)
        agrees = (p.likeliest == q.likeliest).squeeze(1) & ~kl.isnan()
        return LogitPair(kl, agrees, q.top.squeeze(1) + q.sum.log())


def divergence(expected: Tensor, actual: Tensor) -> Tensor:
    """Return KL(expected || actual) of the softmax of two logits [T, V]: [T] float64, in nats."""
    pairs = zip(_split_rows(expected), _split_rows(actual), strict=True)
    return torch.cat([ReferenceLogits(first).compare(second).kl for first, second in pairs])


def _split_rows(logits: Tensor) -> Sequence[Tensor]:
    values = _CPU_VALUES if logits.device.type == "cpu" else _GPU_VALUES
    return torch.split(logits, max(1, values // logits.shape[-1]))


def _subtract_top(logits: Tensor, is_masked: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit [T, 1], its token [T, 1], and logits less the largest [T, V]; float64."""
    top, likeliest = logits.max(-1, keepdim=True)
    exact = logits.double()
    below = (exact.clamp_(min=_LOWEST) if is_masked else exact).sub_(top)
    return top.double(), likeliest, below


def _softmax(logits: Tensor, is_masked: bool) -> _Softmax:
    top, likeliest, below = _subtract_top(logits, is_masked)
    weights = (below * _LOG2_E).exp2_()  # in half the time of exp
    total = weights.sum(-1)
    return _Softmax(top, likeliest, weights, total, torch.linalg.vecdot(below, weights) / total)


def _rules_out(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the rows [T] where only `actual` has -inf. A masked vocabulary has it in both."""
    return (actual.isneginf() & ~expected.isneginf()).any(-1)


def _kl_without_cancelling(expected: Tensor, actual: Tensor, p: _Softmax, q: _Softmax) -> Tensor:
    """Return KL [T] as a sum of terms that are never negative; also where logits are not finite."""
    a, b = (x.double().clamp_(min=_LOWEST) for x in (expected, actual))
    p_shares, q_shares = p.weights.div_(p.sum[:, None]), q.weights.div_(q.sum[:, None])
    log_ratio = (q.top - b.gather(1, p.likeliest)) + (q.sum / p.sum).log()[:, None]
    x = _shift_from_likeliest(a, b, p.likeliest)
    x -= _exact_log_ratio(x, p_shares, q_shares, log_ratio)
    is_near = x.abs() < 1
    near = _exp_beyond_linear(x.where(is_near, 0)).mul_(p_shares)
    kl = near.where(is_near, q_shares.sub_(x.add_(1).mul_(p_shares))).sum(-1)
    kl[_rules_out(actual, expected) & ~kl.isnan()] = math.inf
    kl[expected.isneginf().all(-1) | actual.isneginf().all(-1)] = math.nan
    return kl


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
    return d, (d - minus_b).neg_().add_(a).sub_(minus_b.add_(b))


def _exact_log_ratio(x: Tensor, p_shares: Tensor, q_shares: Tensor, log_ratio: Tensor) -> Tensor:
    """Return the log of the sum of p e^x: `log_ratio` [T, 1], or from the terms if that is tiny.

    x is 0 at the likeliest token.
    """
    is_near = x.abs() < 1
    near = x.where(is_near, 0)
    change = _exp_beyond_linear(near).add_(near).mul_(p_shares).where(is_near, q_shares - p_shares)
    near_sum = q_shares.where(is_near, 0).sum(-1, keepdim=True)
    tiny = (change.sum(-1, keepdim=True) / near_sum).log1p()
    return tiny.where(log_ratio.abs() < _CANCELS, log_ratio)


def _exp_beyond_linear(x: Tensor) -> Tensor:
    """Return e^x - 1 - x."""
    series = x / 7
    for divisor in (6, 5, 4, 3):
        series.add_(1).mul_(x).div_(divisor)
    series.add_(1).mul_(x).mul_(x).div_(2)
    is_small = x.abs() < _SERIES
    return series if is_small.all() else torch.where(is_small, series, x.expm1() - x)
