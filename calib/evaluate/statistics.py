"""From logits to figures: divergence of each token, and intervals over documents."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calib.divergence import ReferenceLogits
from calib.evaluate.report import Figure, PositionBin

Values = NDArray[np.float64]  # [n]: a document's, or one for each document
Statistic = Callable[[Values], float]

_FIRST_BIN = 16  # positions; each bin after it ends at twice the position
_RESAMPLES = 1000
# what is not a number is a figure as well, and is marked where it is shown
_quietly = np.errstate(invalid="ignore", over="ignore")


class Divergence(NamedTuple):
    """A variant beside the reference on one document; a row is of the token at its position."""

    kl: Tensor  # [T] float64, KL(reference || variant) in nats
    agrees: Tensor  # [T] bool, the likeliest token is the same
    nll: Tensor  # [T] or [T - 1] float64, of the tokens that came next under the variant, in nats
    margins: Tensor = torch.empty(0, dtype=torch.float64)  # [questions] float64, of a long document, in nats


def compare(reference: ReferenceLogits, logits: Tensor, following: Tensor) -> Divergence:
    """Compare `logits` [T, V]; `following` [T] or [T - 1] int64 are the tokens that came next."""
    pair = reference.compare(logits)
    tokens = following.to(logits.device)
    chosen = logits[: len(tokens)].gather(1, tokens[:, None]).squeeze(1)
    nll = pair.log_sum[: len(tokens)] - chosen.double()
    return Divergence(pair.kl.cpu(), pair.agrees.cpu(), nll.cpu())


def join(parts: Sequence[Divergence]) -> Divergence:
    """Join consecutive parts of one document."""
    return Divergence(*map(torch.cat, zip(*parts, strict=True)))


def chunks(length: int, size: int) -> Iterator[slice]:
    """Cut `length` into slices of at most `size`."""
    return (slice(i, min(i + size, length)) for i in range(0, length, size))


@_quietly
def estimate(documents: list[Values], statistic: Statistic = np.mean) -> Figure:
    """Estimate `statistic` of all values, resampled by document: tokens of one are not independent."""
    rng = np.random.default_rng(0)
    # a quantile sorts: a million values are enough work for one figure
    resamples = int(min(_RESAMPLES, max(200, 2e7 // max(1, sum(map(len, documents))))))
    draws = [
        float(statistic(np.concatenate([documents[i] for i in chosen])))
        for chosen in rng.integers(len(documents), size=(resamples, len(documents)))
    ]
    return _figure(float(statistic(np.concatenate(documents))), draws)


@_quietly
def ratio(numerators: Values, denominators: Values) -> Figure:
    """Estimate the sum of `numerators` [documents] over that of `denominators`, resampled by document."""
    draws = _draw_ratios(numerators, denominators, np.random.default_rng(0))
    return _figure(float(numerators.sum() / denominators.sum()), draws)


@_quietly
def difference(first: list[Values], second: list[Values]) -> Figure:
    """Estimate the mean of the values `first` less that of `second`, each resampled by its documents."""
    rng = np.random.default_rng(0)
    draws, second_draws = (
        _draw_ratios(np.array([x.sum() for x in documents]), np.array([*map(len, documents)]), rng)
        for documents in (first, second)
    )
    return _figure(float(np.concatenate(first).mean() - np.concatenate(second).mean()), draws - second_draws)


def _draw_ratios(numerators: Values, denominators: NDArray[Any], rng: np.random.Generator) -> Values:
    """Return the ratio of the sums in each resample of the documents."""
    chosen = rng.integers(len(numerators), size=(_RESAMPLES, len(numerators)))
    draws: Values = numerators[chosen].sum(1) / denominators[chosen].sum(1)
    return draws


def _figure(value: float, draws: Sequence[float] | Values) -> Figure:
    is_number = math.isfinite(value)  # else some draws may still be
    low, high = np.quantile(draws, [0.025, 0.975]) if is_number else (math.nan, math.nan)
    return Figure(value=value, low=float(low), high=float(high))


@_quietly
def perplexity(nll: Values) -> float:
    """Return the perplexity of text whose tokens have these `nll` [T], in nats."""
    return float(np.exp(nll.mean()))


def quantile(q: float) -> Statistic:
    """Return the statistic that is the `q` quantile."""
    return lambda values: float(np.quantile(values, q))


@_quietly
def bin_positions(documents: Sequence[Divergence]) -> list[PositionBin]:
    """Average KL and top-1 in bins of the position, to see whether the error grows with the text."""
    length = max(len(document.kl) for document in documents)
    edges = [0, min(_FIRST_BIN, length)]
    while edges[-1] < length:
        edges.append(min(2 * edges[-1], length))
    bins = []
    for start, stop in pairwise(edges):
        parts = [each for each in documents if len(each.kl) > start]
        counts = np.array([float(len(each.kl[start:stop])) for each in parts])
        kl, top1 = (
            ratio(np.array([float(x[start:stop].double().sum()) for x in values]), counts)
            for values in ([each.kl for each in parts], [each.agrees for each in parts])
        )
        bins.append(PositionBin(start=start, to=stop, tokens=int(counts.sum()), **dict(kl), top1=top1))
    return bins


def to_numpy(documents: Iterable[Tensor]) -> list[Values]:
    """Return the values of each document, any shape, in float64."""
    return [document.double().numpy() for document in documents]
