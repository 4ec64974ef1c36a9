"""Norms of Q and K that multiply by 1 + weight: which powers of two their weights hold.

(1 + w) * f - 1 often is no value of the weights' dtype. Scores see the product of both norms'
multipliers. A channel holds a factor if rounding its weights changes this product by no more than
one rounding, to the dtype of the source's weights, of the product itself or of the usual one, their
root mean square. So all channels together change scores by no more, in root mean square, than
rounding both Q and K to that dtype does, if what norms multiply is about as large in all channels.
Where it is largest in channels with small multipliers, scores may change more: `bake` tells the KL.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from calib.rescale.products import Rescaled

Norms = Sequence[tuple[Rescaled, Tensor]]  # what is done to a weight, and the weight


def is_held(norms: Norms) -> Tensor:
    """Whether each channel holds the factors of the `norms` of one module."""
    found = torch.ones((), dtype=torch.bool)
    for alike in _by_shape(norms):
        product, off = torch.ones(()).double(), torch.zeros(()).double()
        for change, weight in alike:
            was = change.multiplier(weight).double()
            off = off + _relative_error(change, weight)
            product = product * was
        size = product.abs()
        allowed = size.maximum(size.square().mean().sqrt())
        allowed = allowed * max(_roundoff(weight) for _, weight in alike)
        found = found & (torch.where(off > 0, off * size, 0.0) <= allowed)
    return found


def _by_shape(norms: Norms) -> list[Norms]:
    """One norm for queries and one for keys, unless they are of different sizes."""
    shapes = dict.fromkeys(weight.shape for _, weight in norms)
    return [[each for each in norms if each[1].shape == shape] for shape in shapes]


def _relative_error(change: Rescaled, weight: Tensor) -> Tensor:
    """By how much the multiplier misses the wanted one, relative to it."""
    wanted = change.multiplier(weight).double() * change.factor
    off = (change.multiplier(change.product(weight)).double() - wanted).abs()
    return torch.where(off > 0, off / wanted.abs(), 0.0).nan_to_num(nan=torch.inf)


def _roundoff(weight: Tensor) -> float:
    """Of the narrowest dtype that holds the weights: half of the step after 1."""
    dtypes = (torch.bfloat16, torch.float16, weight.dtype)
    exact = (dtype for dtype in dtypes if torch.equal(weight.to(dtype).to(weight.dtype), weight))
    return torch.finfo(next(exact, weight.dtype)).eps / 2
