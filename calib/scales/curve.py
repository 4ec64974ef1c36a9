"""Buckets of tokens (see `calib.scales.places`) of many tokens at once, and of joined runs."""

import torch
from torch import Tensor

from calib.scales.places import bucket_of, first_of


def buckets_of(indices: Tensor) -> Tensor:
    """`bucket_of` of each of `indices` [N]: [N] int64."""
    # frexp is exact, a rounded logarithm is not
    return torch.frexp((indices + 1).double()).exponent.long() - 1


def moved(curve: Tensor, offset: int, count: int) -> Tensor:
    """The `curve` [H, BUCKETS] of `count` tokens, as if `offset` others had been read before.

    Of a bucket nobody knows which of its tokens was the largest: it goes to where its last one
    lies. So an amax is never said to be reached before it was seen, at times later.
    """
    found = torch.zeros_like(curve)
    for bucket in range(bucket_of(count - 1) + 1):
        last = min(first_of(bucket + 1), count) - 1
        place = bucket_of(offset + last)
        found[:, place] = torch.maximum(found[:, place], curve[:, bucket])
    return found
