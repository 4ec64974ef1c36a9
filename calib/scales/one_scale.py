"""One scale, or one per head or channel, from the statistics of one tensor; and what is refused."""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.choices import ScaleRounding, Strategy, Targets
from calib.errors import CalibrationError, InputError
from calib.files.stored_scales import is_usable
from calib.scales.observers import Observer, group_amax

# for tables and reports
LATENT_NOTE = (
    "this model caches latents (MLA): K stands for the latent, V for k_pe, the rotated part of the "
    "keys that all heads share; one scale is for both"
)


@dataclass(frozen=True)
class Deriving:
    """How scales are made of statistics."""

    strategy: Strategy
    observer: Observer
    headroom: float
    limit: float  # the largest FP8 value
    rounding: ScaleRounding = "none"

    def scale(self, amax: Tensor, histogram: Tensor | None, where: str, left: Tensor | None = None) -> Tensor:
        """The scale of a tensor, or of what is `left` [H, D] of it; errors name it by `where`.

        `amax` [H, D] and `histogram` [H, NUM_BINS] are its statistics.
        """
        strategy, observer = self.strategy, self.observer
        _check(amax, where)
        # before an observer divides by it
        self._checked(_cover_dead(group_amax(amax, strategy), strategy), where)
        amax = _cover_dead(observer.amax(amax, histogram, strategy), strategy)
        if left is not None:  # nothing is left of a constant
            rest = observer.amax(left, None, strategy)
            amax = torch.where(rest > 0, rest, amax)
        return self._checked(amax, where)

    def _checked(self, amax: Tensor, where: str) -> Tensor:
        found = amax.float() * self.headroom / self.limit
        if self.rounding == "pow2":
            found = _up_to_power_of_two(found)
        if not is_usable(found.flatten().tolist()):
            raise CalibrationError(
                f"{where}: a scale would be {float(found.min()):.3g} or "
                f"{float(found.max()):.3g}, which no engine loads; check the weights"
            )
        return found


def check_one_scale(*, strategy: Strategy, targets: Targets, center_keys: bool) -> None:
    """Refuse, for a model that caches latents (MLA), what its one scale per layer cannot be."""
    given = [
        strategy != "tensor" and f"--strategy {strategy}",
        targets != "kv" and f"--targets {targets}",
        center_keys and "--center-keys",
    ]
    if wrong := next(filter(None, given), None):
        raise InputError(
            f"{wrong}: this model caches one latent per token and layer (MLA), of which engines "
            "make K and V of all heads, and they hold one scale for it; use --strategy tensor "
            "--targets kv, without --center-keys"
        )


def centered(
    total: Tensor | None, low: Tensor | None, high: Tensor | None, tokens: int
) -> tuple[Tensor, Tensor]:
    """K's mean per channel over `tokens`, and the amax of K without that mean: [K, D] each.

    Softmax does not see what is subtracted from every key. What is left has to be exact: the first
    token's key, far from the mean, is often that extreme, is seen by every query, and at exactly
    the largest magnitude FP8 rounds it to itself. An InputError if means were not collected.
    """
    if total is None or low is None or high is None:
        raise InputError("these statistics hold no means of K; calibrate with --center-keys")
    mean = (total / tokens).float()
    return mean, torch.maximum(high - mean, mean - low)


def dead_groups(amax: Tensor, strategy: Strategy) -> int:
    """How many heads (attn_head) or channels (channel) of `amax` [H, D] saw only zeros."""
    return int((group_amax(amax, strategy) == 0).sum())


def _check(amax: Tensor, where: str) -> None:
    if not torch.isfinite(amax).all():
        raise CalibrationError(f"{where}: NaN or Inf was seen, so no scale can be derived")
    if not (amax > 0).any():
        raise CalibrationError(
            f"{where}: only zeros were seen, so no scale can be derived; "
            "check the weights, or calibrate on other data"
        )


def _up_to_power_of_two(scale: Tensor) -> Tensor:
    # a rounded logarithm could miss; what has no power of two above it in float32 becomes Inf
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())


def _cover_dead(amax: Tensor, strategy: Strategy) -> Tensor:
    # a head or channel that is always zero may hold anything tomorrow: it takes the largest scale
    # of its layer, and the summary warns about it
    return torch.where(amax > 0, amax, amax.amax()) if strategy != "tensor" else amax
