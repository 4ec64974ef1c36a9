"""The values beyond the largest seen: how likely a new token is to have one, and how large it is.

Of every head the `TAIL` largest tokens are kept, a token by its largest |x|. Above the smallest of
them excesses fall off about exponentially, by their mean (peaks over threshold; Pickands 1975). A
second estimate knows nothing but the count: of `m` tokens each is as likely as a new one to be the
largest, so one in `m` is above. The chance is the geometric mean of both, which errs less than
either (make bench-cover), divided by the root of the number of tokens that tie at the top: where
the same token returns, the largest value is an end, and no sample of a slope. Chances beyond it are
taken to fall more slowly than exponentially: of texts that were measured one layer of thirty has
such a tail, and would break the promise for all. What is expected of more text is exponential.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.errors import InputError

TAIL = 128
MIN_TOKENS = 8 * TAIL  # so that one token in eight at most exceeds the threshold
MOST_HEADROOM = 16.0
CLIP_CHANCE = 1e-6  # of a new token in a layer, at most, with headroom auto
ROUNDING = 1 + 2.0**-20  # a scale is a rounded float32: a value this little beyond it is not clipped

_ONE_SIDE = 0.025  # on each side of a 95 % interval
_HALVINGS = 60  # of an interval, which is then below the last bit of its ends
_SHAPE = 0.2  # of the generalised Pareto distribution beyond the largest value
_TIE = 1 - 2.0**-8  # closer to the largest than bfloat16 can tell


def largest(values: Tensor, new: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the `TAIL` largest of two [H, n], descending, then zeros: [H, TAIL], in `out` if given."""
    both = torch.cat([values, new], dim=-1)
    both = torch.nn.functional.pad(both, (0, max(0, TAIL - both.shape[-1])))
    top = both.topk(TAIL, dim=-1).values
    return top if out is None else out.copy_(top)


def count_ties(heads: Tensor) -> Tensor:
    """Count the tokens of `heads` [H, N], not negative, that tie for the largest: [H, 2] int64.

    The columns are the largest in bfloat16, rounded down, as an integer of its bits, and the count.
    """
    levels = _levels(heads)
    level = levels.amax(1, keepdim=True)
    return torch.cat([level, (levels == level).sum(1, keepdim=True)], dim=1)


def add_ties(ties: Tensor, new: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the ties [H, 2] for the largest of two sets of tokens, in `out` if given."""
    level = torch.maximum(ties[:, :1], new[:, :1])
    count = (ties[:, :1] == level) * ties[:, 1:] + (new[:, :1] == level) * new[:, 1:]
    both = torch.cat([level, count], dim=1)
    return both if out is None else out.copy_(both)


def are_ties(ties: Tensor, largest: Tensor, tokens: int) -> bool:
    """Return whether `ties` [H, 2] can be those of `tokens` tokens, the largest of which are `largest` [H].

    Of NaN and infinity they can be any.
    """
    level, count = ties.unbind(1)
    is_right = (level == _levels(largest)) & (count >= 1) & (count <= tokens)
    return bool((is_right | ~largest.isfinite()).all())


def _levels(x: Tensor) -> Tensor:
    """Return the upper half of the bits of `x` in float32, which order it as its values do."""
    return x.float().view(torch.int32).long() >> 16


def check_enough(tokens: int) -> None:
    """Refuse to tell a tail from fewer tokens than have one."""
    if tokens < MIN_TOKENS:
        raise InputError(
            f"{tokens:,} tokens, without repeated text, are too few to tell what others may hold: "
            f"calibrate on {MIN_TOKENS:,} or more, or leave --headroom auto and --until away"
        )


@dataclass(frozen=True)
class Tail:
    """The largest tokens of each group of values that share a scale; G groups."""

    top: Tensor  # [G, TAIL] float64, descending
    tokens: int  # among which they are the largest

    @classmethod
    def of(cls, top: Tensor, tokens: int, *, per_head: bool) -> "Tail":
        """Make one group, or one per head, of `top` [H, TAIL]; an InputError for too few tokens."""
        check_enough(tokens)
        top = top.double()
        if not per_head:
            # a token that is large in two heads counts twice: a little more is expected than is so
            top = largest(top.flatten()[None], top.new_empty(1, 0))
        return cls(top, tokens)

    @property
    def largest(self) -> Tensor:
        """The largest value seen, [G]."""
        return self.top[:, 0]

    @property
    def threshold(self) -> Tensor:
        """The smallest value kept, [G]: of what is below nothing is known."""
        return self.top[:, -1]

    @property
    def decay(self) -> Tensor:
        """The mean excess over the threshold, [G]: so much further, e times fewer tokens."""
        return (self.top[:, :-1] - self.top[:, -1:]).mean(-1)

    @property
    def chance(self) -> Tensor:
        """The chance that a new token is above the largest seen, [G]."""
        slope = (TAIL - 1) / self.tokens * _share_beyond(self.largest - self.threshold, self.decay)
        return (slope / self.tokens / (self.top >= self.largest[:, None] * _TIE).sum(-1)).sqrt()

    def chance_above(self, level: Tensor) -> Tensor:
        """Return the chance [G] that a new token is above `level` [G], at least the threshold."""
        level = level.double() * ROUNDING
        extrapolated = self.chance * _share_beyond(level - self.largest, self.decay, shape=_SHAPE)
        counted = (self.top > level[:, None]).sum(-1) / self.tokens
        return torch.where(level >= self.largest, extrapolated, counted)

    def reached_in(self, tokens: int) -> Tensor:
        """Return the expected largest [G] of `tokens` new ones, at least the largest seen."""
        return self.largest + self.decay * (self.chance * tokens).log().clamp(min=0)


def _share_beyond(distance: Tensor, decay: Tensor, *, shape: float = 0) -> Tensor:
    """Return the share of tokens beyond a `distance`; 1 at none, even where all tokens tie."""
    steps = distance / decay.clamp(min=torch.finfo(torch.float64).tiny)
    share = (1 + shape * steps) ** (-1 / shape) if shape else torch.exp(-steps)
    return torch.where(distance == 0, 1.0, share)


def headroom_for(tails: Sequence[Tail], chance: float = CLIP_CHANCE) -> float:
    """Return the smallest factor >= 1 on all amax of a layer that clips a token with `chance`.

    `tails` are K's and V's. An InputError where no factor up to 16 is enough.
    """

    def chance_with(factor: float) -> float:
        # a head of zeros is given the largest scale of its layer
        return sum(float(x.chance_above(x.largest * factor)[x.largest > 0].sum()) for x in tails)

    low, high = 1.0, MOST_HEADROOM
    if chance_with(low) <= chance:
        return low
    if chance_with(high) > chance:
        raise InputError(
            f"a layer would need headroom over {MOST_HEADROOM:g} to clip a token with a chance of "
            f"{chance:g}: calibrate on more text, or give --headroom a number"
        )
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if chance_with(middle) > chance else (low, middle)
    return high


def poisson_interval(events: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a Poisson mean of which `events` were seen.

    Garwood, Fiducial limits for the Poisson distribution, Biometrika 28 (1936): half a quantile of
    chi-square with 2n degrees of freedom, and with 2n + 2, which are those of a gamma distribution.
    """
    low = _gamma_quantile(events, _ONE_SIDE) if events else 0.0
    return low, _gamma_quantile(events + 1, 1 - _ONE_SIDE)


def _gamma_quantile(shape: int, share: float) -> float:
    """Find by bisection where the gamma distribution of `shape` and scale 1 has `share` below it."""
    # ten standard deviations, and enough where the shape is small
    low, high = 0.0, shape + 10 * math.sqrt(shape) + 10
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = float(torch.special.gammainc(*torch.tensor([shape, middle], dtype=torch.float64)))
        low, high = (middle, high) if below < share else (low, middle)
    return (low + high) / 2
