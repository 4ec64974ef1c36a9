"""How large K and V are, per layer: what the scales have to hold."""

from dataclasses import dataclass

import torch
from torch import Tensor

# half-octave bins of |x|: bin i holds [2**((i + FIRST_BIN) / 2), 2**((i + FIRST_BIN + 1) / 2))
FIRST_BIN = 2 * -149  # the smallest float32
NUM_BINS = 2 * 128 - FIRST_BIN


@dataclass
class LayerValues:
    """K and V of one layer as the reference holds them."""

    layer_idx: int
    amax: Tensor  # [2, K] of K and V, float32
    histogram: Tensor  # [2, NUM_BINS] int64, zeros left out
    zeros: Tensor  # [2] int64

    def merge(self, other: "LayerValues") -> "LayerValues":
        """Combine with the same layer on other text."""
        return LayerValues(
            self.layer_idx,
            torch.maximum(self.amax, other.amax),
            self.histogram + other.histogram,
            self.zeros + other.zeros,
        )


def layer_values(layer_idx: int, key: Tensor, value: Tensor) -> LayerValues:
    """Look at `key` and `value` [B, K, T, D]."""
    amax = [x.abs().amax((0, 2, 3)).float() for x in (key, value)]
    zeros = [(x == 0).sum() for x in (key, value)]
    histogram = [_histogram(x) for x in (key, value)]
    return LayerValues(layer_idx, *(torch.stack(pair).cpu() for pair in (amax, histogram, zeros)))


def _histogram(x: Tensor) -> Tensor:
    # exact at powers of two, where a rounded logarithm may fall on either side
    mantissa, exponent = x[x != 0].abs().float().frexp()  # mantissa in [0.5, 1)
    bins = 2 * (exponent.long() - 1) + (mantissa >= 0.5**0.5)
    return torch.bincount(bins - FIRST_BIN, minlength=NUM_BINS)
