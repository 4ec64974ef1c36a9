"""What a calibration measured, at the finest granularity; scales are derived from it.

Every entry merges by max or by sum, so batches, processes and runs combine in any order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from calib.choices import FP8Name, Strategy, Targets
from calib.errors import CalibrationError, InputError
from calib.scales.observers import Observer, group_amax
from calib.scales.scales import KVScales, LayerScales, SharedAttention
from fp8kv_runtime.fp8 import FP8_DTYPES, scale_from_amax


@dataclass(frozen=True)
class TensorStats:
    """Statistics of one of K, V or Q in one attention module. All tensors live on the CPU."""

    amax: Tensor  # [H, D] float32, NaN or Inf if the data held one
    histogram: Tensor | None = None  # [H, NUM_BINS] int64
    total: Tensor | None = None  # [H, D] float64, sum over tokens: the mean is total / tokens
    low: Tensor | None = None  # [H, D] float32, the smallest signed value; with `total`
    high: Tensor | None = None  # [H, D] float32, the largest

    def merge(self, other: "TensorStats") -> "TensorStats":
        """Combine with statistics of the same tensor from other data."""
        return TensorStats(
            amax=torch.maximum(self.amax, other.amax),
            histogram=_both(torch.add, self.histogram, other.histogram),
            total=_both(torch.add, self.total, other.total),
            low=_both(torch.minimum, self.low, other.low),
            high=_both(torch.maximum, self.high, other.high),
        )


@dataclass(frozen=True)
class LayerStats:
    """Statistics of one attention module."""

    layer_idx: int
    tokens: int
    k: TensorStats  # H = num_kv_heads
    v: TensorStats  # H = num_kv_heads
    q: TensorStats  # H = num_heads

    def merge(self, other: "LayerStats") -> "LayerStats":
        """Combine with statistics of the same module from other data."""
        return LayerStats(
            self.layer_idx,
            self.tokens + other.tokens,
            self.k.merge(other.k),
            self.v.merge(other.v),
            self.q.merge(other.q),
        )


@dataclass(frozen=True)
class KVStats:
    """Statistics of every attention module that caches K and V, keyed by module name."""

    layers: Mapping[str, LayerStats]
    shared: Mapping[str, SharedAttention] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens seen by each layer, padding excluded."""
        return max((layer.tokens for layer in self.layers.values()), default=0)

    def merge(self, other: "KVStats") -> "KVStats":
        """Combine with statistics of the same model from other data.

        Raises:
            InputError: the two hold different modules or shapes.
        """
        if _shapes(self) != _shapes(other):
            raise InputError(
                "these statistics are of different models: modules or head shapes differ; "
                "merge only runs of one model"
            )
        merged = {name: self.layers[name].merge(other.layers[name]) for name in self.layers}
        return KVStats(merged, self.shared)

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
            CalibrationError: a layer saw nothing, only zeros, NaN/Inf, or values at float32's ends.
            InputError: keys are to be centred and their means were not collected.
        """

        def scale(tensor: TensorStats, where: str, left: Tensor | None = None) -> Tensor:
            _check(tensor.amax, where)
            amax = _cover_dead(observer.amax(tensor.amax, tensor.histogram, strategy), strategy)
            if left is not None:  # nothing is left of a constant
                rest = observer.amax(left, None, strategy)
                amax = torch.where(rest > 0, rest, amax)
            try:
                return scale_from_amax(amax * headroom, FP8_DTYPES[fp8_dtype])
            except ValueError as error:
                raise CalibrationError(f"{where}: {error}; check the weights") from None

        def layer(name: str, seen: LayerStats) -> LayerScales:
            center, left = centered(seen) if center_keys else (None, None)
            return LayerScales(
                seen.layer_idx,
                k=scale(seen.k, f"{name} K", left),
                v=scale(seen.v, f"{name} V"),
                q=scale(seen.q, f"{name} Q") if targets == "qkv" else None,
                k_center=center,
            )

        layers = {name: layer(name, seen) for name, seen in self.layers.items()}
        return KVScales(strategy, fp8_dtype, layers, self.shared)


def centered(layer: LayerStats) -> tuple[Tensor, Tensor]:
    """K's mean per channel and the largest magnitude of what is left without it, [K, D] each.

    Softmax does not see what is subtracted from every key. What is left has to be exact: the first
    token's key, far from the mean, is often that extreme, is seen by every query, and at exactly
    the largest magnitude FP8 rounds it to itself.

    Raises:
        InputError: means were not collected.
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


def _both(
    combine: Callable[[Tensor, Tensor], Tensor], mine: Tensor | None, other: Tensor | None
) -> Tensor | None:
    return None if mine is None or other is None else combine(mine, other)


def _shapes(stats: KVStats) -> dict[str, tuple[torch.Size, ...]]:
    return {
        name: (layer.k.amax.shape, layer.v.amax.shape, layer.q.amax.shape)
        for name, layer in stats.layers.items()
    }
