"""Magnitude histogram per head: one pass over the data, then any clipping threshold can be judged.

A bin is a bfloat16 magnitude: 48 exponents of 128 steps each. So for a bfloat16 model the histogram
loses nothing inside its range; other dtypes are rounded to bfloat16 first.
"""

import torch
from torch import Tensor

MANTISSA_BITS = 7
NUM_BINS = 48 << MANTISSA_BITS

# smaller than 2**-24 underflows in FP8 at every scale worth considering; 127 is the exponent bias
_FIRST_CODE = (127 - 24) << MANTISSA_BITS


def magnitude_histogram(x: Tensor) -> Tensor:
    """Count the magnitudes of `x` [N, H, D] per head: [H, NUM_BINS] int64."""
    counts = []
    # head by head: bincount wants int64, and eight times the input would leave the CPU's cache
    for head in x.unbind(1):
        codes = head.to(torch.bfloat16).contiguous().view(torch.int16) & 0x7FFF
        bins = codes.sub_(_FIRST_CODE).clamp_(0, NUM_BINS - 1)
        counts.append(torch.bincount(bins.long().flatten(), minlength=NUM_BINS))
    return torch.stack(counts)


def bin_values() -> Tensor:
    """The magnitude each bin stands for: [NUM_BINS] float32."""
    codes = torch.arange(NUM_BINS, dtype=torch.int16) + _FIRST_CODE
    return codes.view(torch.bfloat16).float()
