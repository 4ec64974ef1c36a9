"""Bootstrap intervals over documents: tokens of one document are not independent, documents are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

_RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


def estimate(
    documents: Sequence[Values], statistic: Callable[[Values], float] = np.mean, *, seed: int = 0
) -> Estimate:
    """`statistic` of all values of all documents, resampled by document."""
    rng = np.random.default_rng(seed)
    value = float(statistic(np.concatenate(documents)))
    draws = [
        float(statistic(np.concatenate([documents[i] for i in chosen])))
        for chosen in rng.integers(len(documents), size=(_resamples(documents), len(documents)))
    ]
    low, high = np.quantile(draws, [0.025, 0.975])
    return Estimate(value, float(low), float(high))


def ratio(numerators: Values, denominators: Values, *, seed: int = 0) -> Estimate:
    """Sum of `numerators` [documents] over that of `denominators`, resampled by document."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(len(numerators), size=(_RESAMPLES, len(numerators)))
    draws = numerators[chosen].sum(1) / denominators[chosen].sum(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return Estimate(float(numerators.sum() / denominators.sum()), float(low), float(high))


def as_json(figure: Estimate) -> dict[str, float]:
    """`{value, low, high}`."""
    return {"value": figure.value, "low": figure.low, "high": figure.high}


def quantile(q: float) -> Callable[[Values], float]:
    """The statistic that is the `q` quantile."""
    return lambda values: float(np.quantile(values, q))


def _resamples(documents: Sequence[Values]) -> int:
    # a quantile sorts: a million values are enough work for one figure
    return int(min(_RESAMPLES, max(200, 2e7 // max(1, sum(map(len, documents))))))
