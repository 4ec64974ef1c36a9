"""Ways to predict the amax of tokens to come from those seen, for `cover.py` to compare."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from calib.scales.tail import Tail, largest


def tail_of(seen: Tensor) -> Tail:
    """Return the tail of `seen` [groups, tokens]."""
    return Tail.of(largest(seen, seen[:, :0]), seen.shape[-1], per_head=True)


def _unchanged(seen: Tensor, ahead: int) -> Tensor:
    return seen.amax(-1)


def _by_tail(seen: Tensor, ahead: int) -> Tensor:
    return tail_of(seen).reached_in(ahead)


def _by_growth(seen: Tensor, ahead: int) -> Tensor:
    """As much more for every doubling as before: a line through the amax at powers of two."""
    ends = 2 ** np.arange(6, int(np.log2(seen.shape[-1])) + 1)
    reached = seen.cummax(-1).values[:, ends - 1]
    slope, _ = _line(torch.arange(len(ends)).double(), reached)
    return seen.amax(-1) + slope * float(np.log2(1 + ahead / seen.shape[-1]))


def _by_gumbel(seen: Tensor, ahead: int) -> Tensor:
    """Fit a Gumbel distribution through the maxima of the power-of-two buckets."""
    ends = 2 ** np.arange(5, int(np.log2(seen.shape[-1])) + 1) - 1
    pairs = list(pairwise(ends))
    maxima = torch.stack([seen[:, a:b].amax(-1) for a, b in pairs], dim=-1)
    sizes = torch.tensor([float(b - a) for a, b in pairs]).double()
    slope, start = _line(sizes.log() + np.euler_gamma, maxima)
    expected = start + slope * float(np.log(ahead) + np.euler_gamma)
    return torch.maximum(expected, seen.amax(-1))


def _line(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and intercept of least squares through `y` [groups, n]."""
    y, off = y.double(), x - x.mean()
    slope = (off * y).sum(-1) / off.square().sum()
    return slope, y.mean(-1) - slope * x.mean()


PREDICTORS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "tail": _by_tail,
    "growth of the curve": _by_growth,
    "Gumbel through buckets": _by_gumbel,
    "no growth": _unchanged,
}
