"""What lies beyond the largest value seen: how likely a new token is to be clipped, and how far.

Of every head the `TAIL` largest tokens are kept, a token by its largest |x|. Above the smallest of
them excesses fall off about exponentially, by their mean (peaks over threshold; Pickands 1975). A
second estimate knows nothing but the count: of `m` tokens each is as likely as a new one to be the
largest, so one in `m` is above. The chance is the geometric mean of both, which errs less than
either (make bench-cover), divided by the root of the number of tokens that tie at the top: where
the same token returns, the largest value is an end, and no sample of a slope. Chances beyond it are
taken to fall more slowly than exponentially: of texts that were measured one layer of thirty has
such a tail, and would break the promise for all. What is expected of more text is exponential.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.errors import InputError

TAIL = 128
# so that the threshold is exceeded by one token in eight at most
MIN_TOKENS = 8 * TAIL
MOST_HEADROOM = 16.0

_SHAPE = 0.2  # of the generalised Pareto distribution beyond the largest value
_ABOVE = TAIL - 1  # tokens above the threshold
_TIE = 1 - 2.0**-8  # closer to the largest than bfloat16 can tell
ROUNDING = 1 + 2.0**-20  # a scale is a rounded float32: so little beyond it is nothing clipped


def largest(held: Tensor, new: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The `TAIL` largest of two [H, n], descending: [H, TAIL], filled up with zeros."""
    both = torch.cat([held, new], dim=-1)
    both = torch.nn.functional.pad(both, (0, max(0, TAIL - both.shape[-1])))
    found = both.topk(TAIL, dim=-1).values
    return found if out is None else out.copy_(found)


def check_enough(tokens: int) -> None:
    """Refuse to tell a tail from fewer tokens than have one."""
    if tokens < MIN_TOKENS:
        raise InputError(
            f"{tokens:,} tokens are too few to tell what others may hold: calibrate on "
            f"{MIN_TOKENS:,} or more, or leave --headroom auto and --until away"
        )


@dataclass(frozen=True)
class Tail:
    """The upper end of what was seen, of each group [G] of values that share a scale."""

    top: Tensor  # [G, TAIL] float64, descending
    tokens: int

    @classmethod
    def of(cls, top: Tensor, tokens: int, *, per_head: bool) -> "Tail":
        """Of the largest `top` [H, TAIL] of each head, as one group or as H; an InputError where
        there are too few tokens."""
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
        return (self.top[:, :_ABOVE] - self.top[:, _ABOVE:]).mean(-1)

    @property
    def chance(self) -> Tensor:
        """That a new token is above the largest seen, [G]."""
        ties = (self.top >= self.largest[:, None] * _TIE).sum(-1)
        return (self._on_slope(self.largest) / self.tokens / ties).sqrt()

    def chance_above(self, level: Tensor) -> Tensor:
        """That a new token is above `level` [G], at least the threshold: [G]."""
        level = level.double() * ROUNDING
        beyond = self.chance * _falls(level - self.largest, self.decay, shape=_SHAPE)
        seen = (self.top > level[:, None]).sum(-1) / self.tokens
        return torch.where(level >= self.largest, beyond, seen)

    def reached_in(self, tokens: int) -> Tensor:
        """What the largest of `tokens` new ones is expected to be, if not less than was seen."""
        return self.largest + self.decay * (self.chance * tokens).log().clamp(min=0)

    def _on_slope(self, level: Tensor) -> Tensor:
        return _ABOVE / self.tokens * _falls(level - self.top[:, -1], self.decay)


def _falls(distance: Tensor, decay: Tensor, *, shape: float = 0) -> Tensor:
    """The share of tokens that is left after `distance`; where all tie, none."""
    steps = distance / decay.clamp(min=torch.finfo(torch.float64).tiny)
    share = (1 + shape * steps) ** (-1 / shape) if shape else torch.exp(-steps)
    return torch.where(distance == 0, 1.0, share)


def headroom_for(tails: Sequence[Tail], chance: float) -> float:
    """The smallest factor >= 1 on all amax of a layer by which a token is clipped with `chance`.

    `tails` are K's and V's. An InputError where none up to 16 is enough.
    """

    def clipped(factor: float) -> float:
        chances = (tail.chance_above(tail.largest * factor) for tail in tails)
        # a head of zeros is given the largest scale of its layer
        alive = zip(chances, tails, strict=True)
        return sum(float(each[tail.largest > 0].sum()) for each, tail in alive)

    low, high = 1.0, MOST_HEADROOM
    if clipped(low) <= chance:
        return low
    if clipped(high) > chance:
        raise InputError(
            f"a layer would need headroom over {MOST_HEADROOM:g} to clip a token with a chance of "
            f"{chance:g}: calibrate on more text, give --headroom a number, or a larger "
            "--clip-chance"
        )
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if clipped(middle) > chance else (low, middle)
    return high
