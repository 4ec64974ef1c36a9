"""The numbers of small floating-point formats, written out, and rounding to them."""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# eight steps to an octave, subnormals below 2^-6, nothing above 448
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)]
)


def nearest(x, numbers):
    """The nearest of `numbers` with the sign of `x`; of two as near the one with the even index."""
    away = np.abs(np.abs(x)[..., None] - numbers)
    away = away + (np.arange(len(numbers)) % 2) * 1e-12 * numbers[1]
    return np.copysign(numbers[away.argmin(-1)], x)
