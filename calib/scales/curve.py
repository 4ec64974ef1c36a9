"""Buckets of tokens, by powers of two: how an amax grows with the tokens, and where in a sample.

Counted from 0, token `i` is in bucket floor(log2(i + 1)): bucket b holds the tokens 2**b - 1 to
2**(b + 1) - 2, as many as all before it and one more.
"""

import torch
from torch import Tensor

BUCKETS = 48  # of the tokens of a run, in the order of reading
POSITION_BUCKETS = 24  # of positions in a sample; bucket 0 is the first token of each


def bucket_of(index: int) -> int:
    """The bucket of the token `index`."""
    return min((index + 1).bit_length(), BUCKETS) - 1


def first_of(bucket: int) -> int:
    """The first token of a bucket, which is also the number of tokens before it."""
    return 2**bucket - 1


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
