"""Norms of Q and K that multiply by 1 + weight: the powers of two that their weights hold.

(1 + w) * f - 1 often has no exact value in the weights' dtype. Attention scores depend on the product of both
norms' multipliers. A channel holds a factor if rounding its weights changes this product by no more than one
rounding to the narrowest dtype that holds the source's weights: a rounding of the product itself, or of the
root mean square of all channels' products if that is larger. If the norms' inputs are about equally large in
all channels, scores then change no more, in root mean square, than by rounding both Q and K to that dtype. If
inputs are largest in channels with small multipliers, scores may change more: `bake` reports the KL.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from calib.rescale.weight_changes import WeightChange

Norms = Sequence[tuple[WeightChange, Tensor]]  # the change of a weight, and the weight

_POWERS = torch.arange(-16, 17)  # exponents of the factors that are tried


def is_held(norms: Norms) -> Tensor:
    """Return whether each channel holds the factors of the `norms` of one module."""
    holds = torch.ones((), dtype=torch.bool)
    # a norm of queries and one of keys are judged together, unless they are of different sizes
    for shape in dict.fromkeys(weight.shape for _, weight in norms):
        group = [(change, weight) for change, weight in norms if weight.shape == shape]
        size, error = torch.ones(()).double(), torch.zeros(()).double()
        for change, weight in group:
            size = size * change.multiplier(weight).double().abs()
            error = error + _relative_error(change, weight)
        allowed = size.maximum(size.square().mean().sqrt()) * max(_roundoff(weight) for _, weight in group)
        holds = holds & (torch.where(error > 0, error * size, 0.0) <= allowed)
    return holds


def try_powers(norms: Norms) -> Tensor:
    """Return whether each channel holds each of the powers of its factors [powers, D]."""

    def try_power(power: Tensor) -> Tensor:
        pairs = zip(norms, [(change.factor.log2() * power).exp2() for change, _ in norms], strict=True)
        return is_held([(replace(change, factor=factor), weight) for (change, weight), factor in pairs])

    return torch.stack([try_power(power) for power in _POWERS])


def nearest_powers(table: Tensor, powers: Tensor) -> tuple[float, Tensor]:
    """Return the distance (inf: none) to the nearest of `powers` [D] in `table` [powers, D], and these."""
    least, index = (_POWERS[:, None] - powers).abs().double().masked_fill(~table, torch.inf).min(0)
    return least.sum().item(), _POWERS[index]


def stay_below_largest(amax: Tensor, powers: Tensor) -> Tensor:
    """Return the table [powers, D] of powers that keep `amax` [D] within its largest times `powers` [D]."""
    largest = (amax.double() * powers.double().exp2()).amax()
    products = amax.double() * _POWERS.double().exp2()[:, None]
    return (_POWERS[:, None] <= powers) | (products <= largest)


def _relative_error(change: WeightChange, weight: Tensor) -> Tensor:
    exact = change.multiplier(weight).double() * change.factor
    error = (change.multiplier(change.product(weight)).double() - exact).abs()
    return torch.where(error > 0, error / exact.abs(), 0.0).nan_to_num(nan=torch.inf)


def _roundoff(weight: Tensor) -> float:
    """Return half of the step after 1 of the narrowest dtype that holds the weights."""
    dtypes = (torch.bfloat16, torch.float16, weight.dtype)
    exact = (dtype for dtype in dtypes if torch.equal(weight.to(dtype).to(weight.dtype), weight))
    return torch.finfo(next(exact, weight.dtype)).eps / 2
