"""Statistics of a calibration at the finest granularity, from which scales are derived.

Every entry merges by max or by sum, so batches and processes combine in any order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from calib.arguments import check_arguments, check_values
from calib.choices import FP8Name, ScaleRounding, Strategy, Targets
from calib.errors import InputError
from calib.files.calibration import Amax
from calib.scales.curve import moved
from calib.scales.notebook import amax_html
from calib.scales.observers import Observer
from calib.scales.one_scale import Deriving, centered, check_one_scale
from calib.scales.places import LayerPlaces, TensorPlaces
from calib.scales.scales import KVScales, LayerScales, SharedAttention
from calib.scales.tail import Tail, headroom_for, largest
from calib.scales.text_summary import TextSummary
from fp8kv_runtime.fp8 import FP8_DTYPES, fp8_max


class Merge(NamedTuple):
    """How one field of `TensorStats` is stored, and combined with the same field of other data."""

    dtype: torch.dtype
    combine: Callable[..., Tensor]


# module name; "k", "v" or "q"; field of `TensorStats`
Place = tuple[str, str, str]

STATISTICS = {
    "amax": Merge(torch.float32, torch.maximum),
    "histogram": Merge(torch.int64, torch.add),
    "total": Merge(torch.float64, torch.add),
    "low": Merge(torch.float32, torch.minimum),
    "high": Merge(torch.float32, torch.maximum),
    "curve": Merge(torch.float32, torch.maximum),
    "positions": Merge(torch.float32, torch.maximum),
    "tail": Merge(torch.float32, largest),
}
# made of every token's largest; of K and V alone, and not in old files
PER_TOKEN = ("curve", "positions", "tail")


@dataclass(frozen=True)
class TensorStats:
    """Statistics of one of K, V or Q in one attention module. All tensors live on the CPU."""

    amax: Tensor  # [H, D] float32, NaN or Inf if the data held one
    histogram: Tensor | None = None  # [H, NUM_BINS] int64
    total: Tensor | None = None  # [H, D] float64, sum over tokens: the mean is total / tokens
    low: Tensor | None = None  # [H, D] float32, the smallest signed value; with `total`
    high: Tensor | None = None  # [H, D] float32, the largest
    # of K and V: the largest magnitude of each bucket of tokens, see `calib.scales.places`
    curve: Tensor | None = None  # [H, BUCKETS] float32, by index among all tokens of the run
    positions: Tensor | None = None  # [H, POSITION_BUCKETS] float32, by position in the sample
    tail: Tensor | None = None  # [H, TAIL] float32, descending: those of the largest tokens

    def for_scale(self) -> tuple[Tensor, Tensor | None]:
        """What a scale is derived from."""
        return self.amax, self.histogram


@dataclass(frozen=True)
class LayerStats:
    """Statistics of one attention module."""

    layer_idx: int
    tokens: int
    k: TensorStats  # H = num_kv_heads
    v: TensorStats  # H = num_kv_heads
    q: TensorStats  # H = num_heads
    latent: bool = False  # K is the compressed latent, V the rotated k_pe (MLA): H = 1
    read: int | None = None  # tokens, with those that no statistic counts; None: `tokens`

    @property
    def tokens_read(self) -> int:
        """How many tokens of the run the curve's buckets divide."""
        return self.tokens if self.read is None else self.read

    def tails(self, strategy: Strategy) -> list[Tail]:
        """K's and V's, or that of latents; an InputError where there are none, or few tokens."""
        parts = [self.jointly()] if self.latent else [self.k, self.v]
        found = [part.tail for part in parts if part.tail is not None]
        if len(found) < len(parts):
            raise InputError("these statistics are old and hold no tails; calibrate again")
        per_head = strategy == "attn_head"
        return [Tail.of(tail, self.tokens, per_head=per_head) for tail in found]

    def centered_keys(self) -> tuple[Tensor, Tensor]:
        """K's mean per channel, and the amax of what is left of K; see `centered`."""
        return centered(self.k.total, self.k.low, self.k.high, self.tokens)

    def jointly(self) -> TensorStats:
        """K and V as one tensor of one head: of a latent and its k_pe, which share a scale."""
        amax = torch.cat([each.amax.flatten() for each in (self.k, self.v)])[None]
        return TensorStats(
            amax,
            **{
                field: STATISTICS[field].combine(one, other)
                for field in ("histogram", *PER_TOKEN)
                if (one := getattr(self.k, field)) is not None
                and (other := getattr(self.v, field)) is not None
            },
        )


@dataclass(frozen=True)
class KVStats:
    """Statistics of every attention module that caches K and V, keyed by module name."""

    layers: Mapping[str, LayerStats]
    shared: Mapping[str, SharedAttention] = field(default_factory=dict)
    text: TextSummary | None = None  # of what was read; None: not known, as of old files

    def __post_init__(self) -> None:
        check_values(vars(self), KVStats)

    @property
    def tokens(self) -> int:
        """Tokens counted by each layer: without padding and the first ones that are skipped."""
        return max((layer.tokens for layer in self.layers.values()), default=0)

    @property
    def latent(self) -> bool:
        """Whether a layer caches a latent instead of K and V per head (MLA)."""
        return any(layer.latent for layer in self.layers.values())

    def _repr_html_(self) -> str:
        layers = {name: layer.layer_idx for name, layer in self.layers.items()}
        return amax_html(f"Statistics of {self.tokens:,} tokens", layers, self.tensors())

    def amax_by_head(self) -> Amax:
        """Return the absmax of each layer and head; a latent and k_pe have the larger of both."""
        found: Amax = {}
        for layer in self.layers.values():
            parts = (layer.k, layer.v) if not layer.latent else [layer.jointly()] * 2
            for letter, part in zip("kvq", (*parts, layer.q), strict=True):
                found[layer.layer_idx, letter] = tuple(part.amax.amax(1).tolist())
        # its queries are its own and were not measured
        for each in self.shared.values():
            owner = self.layers[each.owner].layer_idx
            found |= {(each.layer_idx, letter): found[owner, letter] for letter in "kv"}
        return found

    def places(self) -> list[LayerPlaces]:
        """Where the largest K and V of each layer were; empty if that is not known."""

        def of(x: TensorStats) -> TensorPlaces:
            return TensorPlaces(*(getattr(x, field).tolist() for field in ("curve", "positions")))

        return [
            LayerPlaces(layer.layer_idx, layer.tokens_read, of(layer.k), of(layer.v))
            for layer in self.layers.values()
            if layer.k.curve is not None and layer.v.curve is not None
        ]

    def tensors(self) -> dict[Place, Tensor]:
        """Every tensor by its place."""
        return {
            (name, which, field): tensor
            for name, layer in self.layers.items()
            for which in "kvq"
            for field in STATISTICS
            if (tensor := getattr(getattr(layer, which), field)) is not None
        }

    def counts(self) -> list[tuple[int, int]]:
        """How many tokens each layer counted, and how many were read."""
        return [(layer.tokens, layer.tokens_read) for layer in self.layers.values()]

    def with_tensors(self, tensors: Mapping[Place, Tensor], counts: Iterable[Sequence[int]]) -> "KVStats":
        """The same modules with other `tensors` and `counts`."""
        layers = {}
        for (name, layer), (tokens, read) in zip(self.layers.items(), counts, strict=True):
            k, v, q = (
                TensorStats(**{at[2]: x for at, x in tensors.items() if at[:2] == (name, which)})
                for which in "kvq"
            )
            layers[name] = replace(layer, tokens=tokens, read=read, k=k, v=v, q=q)
        return KVStats(layers, self.shared, self.text)

    @check_arguments
    def merge(self, other: "KVStats") -> "KVStats":
        """Combine with other tokens of the same run; an InputError if they are of another model.

        Curve and positions are dropped if one of the two has none.
        """
        mine, others = self.tensors(), other.tensors()
        for one, another in ((mine, others), (others, mine)):
            for at in [at for at in one if at[2] in PER_TOKEN and at not in another]:
                del one[at]
        if {at: x.shape for at, x in mine.items()} != {at: x.shape for at, x in others.items()}:
            raise InputError(
                "these statistics are of different models or observers: modules, head shapes or "
                "what was collected differ; merge only runs of one model with the same options"
            )
        merged = {at: STATISTICS[at[2]].combine(x, others[at]) for at, x in mine.items()}
        layers = ((layer, other.layers[name]) for name, layer in self.layers.items())
        counts = [(a.tokens + b.tokens, a.tokens_read + b.tokens_read) for a, b in layers]
        text = self.text.join(other.text) if self.text and other.text else None
        return replace(self.with_tensors(merged, counts), text=text)

    @check_arguments
    def join(self, other: "KVStats") -> "KVStats":
        """Combine with another run, as if its tokens had been read after those of this one.

        All is as `merge` would have it, but the curve. Of the other run it is known by buckets,
        which lie elsewhere now; see `moved`: an amax is never said to be reached too early.
        """
        tensors = other.tensors()
        for at in tensors:
            if at[2] == "curve" and at[0] in self.layers:
                before, count = (stats.layers[at[0]].tokens_read for stats in (self, other))
                tensors[at] = moved(tensors[at], before, count)
        return self.merge(other.with_tensors(tensors, other.counts()))

    @check_arguments
    def scales(
        self,
        *,
        strategy: Strategy,
        observer: Observer,
        fp8_dtype: FP8Name = "e4m3fn",
        headroom: float = 1.0,
        clip_chance: float | None = None,
        rounding: ScaleRounding = "none",
        targets: Targets = "kv",
        center_keys: bool = False,
    ) -> KVScales:
        """Derive scales: `amax * headroom / fp8_max`, float32, finite and > 0.

        With a `clip_chance` the headroom of each layer is the smallest >= 1 by which a new token
        has a value of K or V beyond the scales with that chance; see `calib.scales.tail`.
        With `center_keys` K's are for what is left of K without its mean per channel, `k_center`.

        Raises:
            CalibrationError: a layer saw nothing, only zeros, NaN/Inf, or values at the ends.
            InputError: means were not collected and keys are to be centred; a latent is to have
                more than its one scale; too few tokens, or no tails, for a `clip_chance`.
        """
        if self.latent:
            check_one_scale(strategy=strategy, targets=targets, center_keys=center_keys)

        given = Deriving(strategy, observer, headroom, fp8_max(FP8_DTYPES[fp8_dtype]), rounding)

        def layer(name: str, seen: LayerStats) -> LayerScales:
            how = given
            if clip_chance is not None:
                how = replace(given, headroom=headroom_for(seen.tails(strategy), clip_chance))
            if seen.latent:
                both = how.scale(*seen.jointly().for_scale(), f"{name} latent and k_pe")
                return LayerScales(seen.layer_idx, k=both, v=both, latent=True)
            center, left = seen.centered_keys() if center_keys else (None, None)
            return LayerScales(
                seen.layer_idx,
                k=how.scale(*seen.k.for_scale(), f"{name} K", left),
                v=how.scale(*seen.v.for_scale(), f"{name} V"),
                q=how.scale(*seen.q.for_scale(), f"{name} Q") if targets == "qkv" else None,
                k_center=center,
            )

        layers = {name: layer(name, seen) for name, seen in self.layers.items()}
        return KVScales(strategy, fp8_dtype, layers, self.shared)
