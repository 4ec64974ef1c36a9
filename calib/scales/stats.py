"""Statistics of a calibration at the finest granularity, from which scales are derived.

Every entry merges by max or by sum, so batches, processes and runs combine in any order.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from calib.choices import FP8Name, Strategy, Targets
from calib.errors import CalibrationError, InputError
from calib.scalefiles.reading import is_usable
from calib.scales.observers import Observer, group_amax
from calib.scales.scales import KVScales, LayerScales, SharedAttention
from fp8kv_runtime.fp8 import FP8_DTYPES, fp8_max


class Merge(NamedTuple):
    """How one field of `TensorStats` is stored, and combined with the same field of other data."""

    dtype: torch.dtype
    combine: Callable[..., Tensor]


# for tables and reports
LATENT_NOTE = (
    "this model caches latents (MLA): K stands for the latent, V for k_pe, the rotated part of the "
    "keys that all heads share; one scale is for both"
)

STATISTICS = {
    "amax": Merge(torch.float32, torch.maximum),
    "histogram": Merge(torch.int64, torch.add),
    "total": Merge(torch.float64, torch.add),
    "low": Merge(torch.float32, torch.minimum),
    "high": Merge(torch.float32, torch.maximum),
}


@dataclass(frozen=True)
class TensorStats:
    """Statistics of one of K, V or Q in one attention module. All tensors live on the CPU."""

    amax: Tensor  # [H, D] float32, NaN or Inf if the data held one
    histogram: Tensor | None = None  # [H, NUM_BINS] int64
    total: Tensor | None = None  # [H, D] float64, sum over tokens: the mean is total / tokens
    low: Tensor | None = None  # [H, D] float32, the smallest signed value; with `total`
    high: Tensor | None = None  # [H, D] float32, the largest


@dataclass(frozen=True)
class LayerStats:
    """Statistics of one attention module."""

    layer_idx: int
    tokens: int
    k: TensorStats  # H = num_kv_heads
    v: TensorStats  # H = num_kv_heads
    q: TensorStats  # H = num_heads
    latent: bool = False  # K is the compressed latent, V the rotated k_pe (MLA): H = 1

    def jointly(self) -> TensorStats:
        """K and V as one tensor of one head: of a latent and its k_pe, which share a scale."""
        amax = torch.cat([each.amax.flatten() for each in (self.k, self.v)])[None]
        if self.k.histogram is None or self.v.histogram is None:
            return TensorStats(amax)
        return TensorStats(amax, self.k.histogram + self.v.histogram)


@dataclass(frozen=True)
class KVStats:
    """Statistics of every attention module that caches K and V, keyed by module name."""

    layers: Mapping[str, LayerStats]
    shared: Mapping[str, SharedAttention] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens seen by each layer, padding excluded."""
        return max((layer.tokens for layer in self.layers.values()), default=0)

    @property
    def latent(self) -> bool:
        """Whether a layer caches a latent instead of K and V per head (MLA)."""
        return any(layer.latent for layer in self.layers.values())

    def tensors(self) -> dict[tuple[str, str, str], Tensor]:
        """Every tensor by (module name, "k", "v" or "q", field of `TensorStats`)."""
        return {
            (name, which, field): tensor
            for name, layer in self.layers.items()
            for which in "kvq"
            for field in STATISTICS
            if (tensor := getattr(getattr(layer, which), field)) is not None
        }

    def with_tensors(
        self, tensors: Mapping[tuple[str, str, str], Tensor], tokens: Iterable[int]
    ) -> "KVStats":
        """The same modules with other `tensors` and one count of `tokens` each."""
        layers = {}
        for (name, layer), count in zip(self.layers.items(), tokens, strict=True):
            k, v, q = (
                TensorStats(**{at[2]: x for at, x in tensors.items() if at[:2] == (name, which)})
                for which in "kvq"
            )
            layers[name] = replace(layer, tokens=count, k=k, v=v, q=q)
        return KVStats(layers, self.shared)

    def merge(self, other: "KVStats") -> "KVStats":
        """Combine with statistics of other data; an InputError if they are of another model."""
        mine, others = self.tensors(), other.tensors()
        if {at: x.shape for at, x in mine.items()} != {at: x.shape for at, x in others.items()}:
            raise InputError(
                "these statistics are of different models or observers: modules, head shapes or "
                "what was collected differ; merge only runs of one model with the same options"
            )
        merged = {at: STATISTICS[at[2]].combine(x, others[at]) for at, x in mine.items()}
        tokens = (self.layers[name].tokens + other.layers[name].tokens for name in self.layers)
        return self.with_tensors(merged, tokens)

    def scales(
        self,
        *,
        strategy: Strategy,
        observer: Observer,
        fp8_dtype: FP8Name = "e4m3fn",
        headroom: float = 1.0,
        targets: Targets = "kv",
        center_keys: bool = False,
    ) -> KVScales:
        """Derive scales: `amax * headroom / fp8_max`, float32, finite and > 0.

        With `center_keys` K's are for what is left of K without its mean per channel, `k_center`.

        Raises:
            CalibrationError: a layer saw nothing, only zeros, NaN/Inf, or values at the ends.
            InputError: keys are to be centred and their means were not collected; a layer that
                caches a latent is to have more than its one scale.
        """
        if self.latent:
            check_one_scale(strategy=strategy, targets=targets, center_keys=center_keys)

        how = _Deriving(strategy, observer, headroom, fp8_max(FP8_DTYPES[fp8_dtype]))

        def layer(name: str, seen: LayerStats) -> LayerScales:
            if seen.latent:
                both = how.scale(seen.jointly(), f"{name} latent and k_pe")
                return LayerScales(seen.layer_idx, k=both, v=both, latent=True)
            center, left = centered(seen) if center_keys else (None, None)
            return LayerScales(
                seen.layer_idx,
                k=how.scale(seen.k, f"{name} K", left),
                v=how.scale(seen.v, f"{name} V"),
                q=how.scale(seen.q, f"{name} Q") if targets == "qkv" else None,
                k_center=center,
            )

        layers = {name: layer(name, seen) for name, seen in self.layers.items()}
        return KVScales(strategy, fp8_dtype, layers, self.shared)


@dataclass(frozen=True)
class _Deriving:
    """How scales are made of statistics."""

    strategy: Strategy
    observer: Observer
    headroom: float
    limit: float  # the largest FP8 value

    def scale(self, tensor: TensorStats, where: str, left: Tensor | None = None) -> Tensor:
        """The scale of `tensor`, or of what is `left` [H, D] of it; errors name it by `where`."""
        strategy, observer = self.strategy, self.observer
        _check(tensor.amax, where)
        # before an observer divides by it
        self._checked(_cover_dead(group_amax(tensor.amax, strategy), strategy), where)
        amax = _cover_dead(observer.amax(tensor.amax, tensor.histogram, strategy), strategy)
        if left is not None:  # nothing is left of a constant
            rest = observer.amax(left, None, strategy)
            amax = torch.where(rest > 0, rest, amax)
        return self._checked(amax, where)

    def _checked(self, amax: Tensor, where: str) -> Tensor:
        found = amax.float() * self.headroom / self.limit
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


def centered(layer: LayerStats) -> tuple[Tensor, Tensor]:
    """K's mean per channel, and the amax of K without that mean: [K, D] each.

    Softmax does not see what is subtracted from every key. What is left has to be exact: the first
    token's key, far from the mean, is often that extreme, is seen by every query, and at exactly
    the largest magnitude FP8 rounds it to itself. An InputError if means were not collected.
    """
    k = layer.k
    if k.total is None or k.low is None or k.high is None:
        raise InputError("these statistics hold no means of K; calibrate with --center-keys")
    mean = (k.total / layer.tokens).float()
    return mean, torch.maximum(k.high - mean, mean - k.low)


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


def _cover_dead(amax: Tensor, strategy: Strategy) -> Tensor:
    # a head or channel that is always zero may hold anything tomorrow: it takes the largest scale
    # of its layer, and the summary warns about it
    return torch.where(amax > 0, amax, amax.amax()) if strategy != "tensor" else amax
