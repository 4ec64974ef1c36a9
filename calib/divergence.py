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
    """Rows of logits [T, V] as e^(logit - top) / sum."""

    top: Tensor  # [T, 1]
    likeliest: Tensor  # [T, 1]
    weights: Tensor  # [T, V]
    sum: Tensor  # [T]
    mean: Tensor  # [T] of logit - top


class ReferenceLogits:
    """Rows of logits [T, V] that others are compared with; their softmax is computed once.

    It is kept in float64: twice the memory of the logits in float32.
    """

    def __init__(self, logits: Tensor) -> None:
        logits = logits.float()
        step = _rows_at_once(logits)
        self._blocks = logits.split(step)
        self._is_masked = bool(logits.isneginf().any())
        self._softmax = [_softmax(block, self._is_masked) for block in self._blocks]

    def compare(self, actual: Tensor) -> LogitPair:
        """Compare with `actual` [T, V], float32 or smaller."""
        blocks = actual.split(len(self._blocks[0]))
        pairs = map(self._compare_block, self._blocks, self._softmax, blocks)
        return LogitPair(*map(torch.cat, zip(*pairs, strict=True)))

    def _compare_block(self, expected: Tensor, p: _Softmax, actual: Tensor) -> LogitPair:
        actual = actual.float()
        top, likeliest, below = _subtract_top(actual, self._is_masked)
        mean = torch.linalg.vecdot(below, p.weights) / p.sum
        total = below.mul_(_LOG2_E).exp2_().sum(-1)
        kl = (total / p.sum).log() - (mean - p.mean)
        if self._is_masked:
            kl[_rules_out(actual, expected)] = math.inf
        cancels = ~(kl > _CANCELS * (1 + mean.abs() + p.mean.abs())) | kl.isinf()
        if cancels.any():
            kl[cancels] = _compare_exactly(expected[cancels], actual[cancels])
        agrees = (p.likeliest == likeliest).squeeze(1) & ~kl.isnan()
        return LogitPair(kl, agrees, top.squeeze(1) + total.log())


def divergence(expected: Tensor, actual: Tensor) -> Tensor:
    """Return KL of the softmax of two logits [T, V]: [T] nats in float64."""
    step = _rows_at_once(expected)
    pairs = zip(expected.split(step), actual.split(step), strict=True)
    return torch.cat([ReferenceLogits(first).compare(second).kl for first, second in pairs])


def _rows_at_once(logits: Tensor) -> int:
    values = _VALUES.get(logits.device.type, _VALUES["other"])
    return max(1, values // logits.shape[-1])


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


def _compare_exactly(expected: Tensor, actual: Tensor) -> Tensor:
    """Return KL [T] where float64 would cancel, of equal rows, and of any that are not finite."""
    kl = expected.new_zeros(len(expected), dtype=torch.float64)
    differs = (expected != actual).any(-1)
    kl[differs] = _kl_without_cancelling(expected[differs], actual[differs])
    kl[_rules_out(actual, expected) & ~kl.isnan()] = math.inf
    kl[expected.isneginf().all(-1) | actual.isneginf().all(-1)] = math.nan
    return kl


def _kl_without_cancelling(expected: Tensor, actual: Tensor) -> Tensor:
    """Return KL as a sum of terms that are never negative, so that nothing cancels."""
    a, b = (x.double().clamp_(min=_LOWEST) for x in (expected, actual))
    p, q = _softmax(expected, True), _softmax(actual, True)
    p_shares, q_shares = p.weights.div_(p.sum[:, None]), q.weights.div_(q.sum[:, None])
    log_ratio = (q.top - b.gather(1, p.likeliest)) + (q.sum / p.sum).log()[:, None]
    x = _shift_from_likeliest(a, b, p.likeliest)
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
