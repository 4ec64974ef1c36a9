"""Statistics of a calibration at the finest granularity, and the scales derived from them.

Each field has a rule to combine two of it, so batches and processes combine in any order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from calib.arguments import check_arguments, check_values
from calib.choices import FP8Name, Strategy, Targets
from calib.errors import InputError
from calib.files.cache_type import FP8_MAX
from calib.files.calibration import Amax
from calib.recipe import Recipe
from calib.scales.observers import NUM_BINS, Observer, ScaleRule, make_observer
from calib.scales.places import BUCKETS, POSITION_BUCKETS, LayerPlaces, TensorPlaces, bucket_of, first_of
from calib.scales.scales import KVScales, LayerScales, SharedAttention, check_one_scale, layers_html
from calib.scales.tail import TAIL, Tail, add_ties, headroom_for, largest
from calib.scales.text_summary import Records, TextSummary


class Statistic(NamedTuple):
    """A field of `TensorStats`: its type, its combination with that of other data, its columns."""

    dtype: torch.dtype
    combine: Callable[..., Tensor]  # of two [H, columns]
    columns: int | None = None  # None: one per channel


MODALITIES = ("text", "pictures", "audio")
# module name; "k", "v" or "q"; field of `TensorStats`
Place = tuple[str, str, str]

STATISTICS = {
    "amax": Statistic(torch.float32, torch.maximum),
    "histogram": Statistic(torch.int64, torch.add, NUM_BINS),
    "total": Statistic(torch.float64, torch.add),
    "low": Statistic(torch.float32, torch.minimum),
    "high": Statistic(torch.float32, torch.maximum),
    "curve": Statistic(torch.float32, torch.maximum, BUCKETS),
    "positions": Statistic(torch.float32, torch.maximum, POSITION_BUCKETS),
    "tail": Statistic(torch.float32, largest, TAIL),
    "ties": Statistic(torch.int64, add_ties, 2),
    "modalities": Statistic(torch.float32, torch.maximum, len(MODALITIES)),
    "least": Statistic(torch.float32, torch.maximum, 1),
}
# made of every token's largest; of K and V alone, and not of an engine's cache
PER_TOKEN = ("curve", "positions", "tail", "ties")


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
    ties: Tensor | None = None  # [H, 2] int64, see `calib.scales.tail.count_ties`
    modalities: Tensor | None = None  # [H, len(MODALITIES)] float32; None: text alone was read
    least: Tensor | None = None  # [H, 1] float32, of an engine's cache: amax, or an FP8 code less


@dataclass(frozen=True)
class LayerStats:
    """Statistics of one attention module."""

    layer_idx: int
    tokens: int
    k: TensorStats  # H = num_kv_heads
    v: TensorStats  # H = num_kv_heads
    q: TensorStats | None = None  # H = num_heads; None: an engine's cache holds none
    latent: bool = False  # K is the compressed latent, V the rotated k_pe (MLA): H = 1
    read: int | None = None  # tokens, with those that no statistic counts; None: `tokens`
    estimated: tuple[str, ...] = ()  # of k and v those whose amax was beyond the cache that it was read from
    unbounded: tuple[str, ...] = ()  # those of them of which amax is the end of that cache's range

    @property
    def tokens_read(self) -> int:
        """The tokens of the run that the curve's buckets divide."""
        return self.tokens if self.read is None else self.read

    def scaled_parts(self) -> dict[str, TensorStats]:
        """Return the tensors that have a scale of their own, by name: K and V, or one of a latent."""
        return {"latent and k_pe": self.join_latent()} if self.latent else {"K": self.k, "V": self.v}

    def join_latent(self) -> TensorStats:
        """Return K and V as one tensor of one head, amax [1, R + P]: a latent and its k_pe share a scale."""
        amax = torch.cat([self.k.amax.flatten(), self.v.amax.flatten()])[None]
        fields = {
            name: STATISTICS[name].combine(k, v)
            for name in ("histogram", *PER_TOKEN)
            if (k := getattr(self.k, name)) is not None and (v := getattr(self.v, name)) is not None
        }
        return TensorStats(amax, **fields)

    def tails(self, strategy: Strategy) -> list[Tail]:
        """Return the tail of each scaled part; an InputError without tails, or for few tokens."""
        tails = []
        for part in self.scaled_parts().values():
            if part.tail is None:
                raise InputError("statistics of an engine's cache hold no tails; calibrate for these")
            tails.append(Tail.of(part.tail, self.tokens, per_head=strategy == "attn_head"))
        return tails

    def centered_keys(self) -> tuple[Tensor, Tensor]:
        """Return K's mean per channel, and the amax of K without that mean: [K, D] each.

        Softmax does not see what is subtracted from every key. The rest has to be exact: the first
        token's key, far from the mean, is often that extreme, is seen by every query, and at exactly
        the largest magnitude FP8 rounds it to itself. Raises an InputError where no means were collected.
        """
        k = self.k
        if k.total is None or k.low is None or k.high is None:
            raise InputError("these statistics hold no means of K; calibrate with --center-keys")
        mean = (k.total / self.tokens).float()
        return mean, torch.maximum(k.high - mean, mean - k.low)


@dataclass(frozen=True)
class KVStats:
    """Statistics of every attention module that caches K and V, keyed by module name."""

    layers: Mapping[str, LayerStats]
    shared: Mapping[str, SharedAttention] = field(default_factory=dict)
    text: TextSummary | None = None  # of what was read; None: not known, as in an engine

    def __post_init__(self) -> None:
        check_values(vars(self), KVStats)

    @property
    def tokens(self) -> int:
        """Tokens counted by each layer: without padding and the first ones that are skipped."""
        return max((layer.tokens for layer in self.layers.values()), default=0)

    @property
    def latent(self) -> bool:
        """Return whether a layer caches a latent instead of K and V per head (MLA)."""
        return any(layer.latent for layer in self.layers.values())

    @property
    def records(self) -> Records:
        """Records of the text that these statistics are of, as far as there are any."""
        return (self.text and self.text.records) or (None,)

    def _repr_html_(self) -> str:
        indices = {name: layer.layer_idx for name, layer in self.layers.items()}
        amax = {
            (name, f"{letter.upper()} amax"): x.amax(-1)
            for (name, letter, field), x in self.tensors().items()
            if field == "amax"
        }
        return layers_html(f"Statistics of {self.tokens:,} tokens", indices, amax)

    def least_by_head(self) -> Amax:
        """Return the absmax that heads had at least, by layer and letter, of an engine's cache."""
        return {
            (layer.layer_idx, letter): tuple(least.flatten().tolist())
            for layer in self.layers.values()
            for letter, part in (("k", layer.k), ("v", layer.v))
            if (least := part.least) is not None
        }

    def amax_by_head(self) -> Amax:
        """Return the absmax of heads, by layer and letter (k, v, q); of a latent and its k_pe the larger."""
        amax: Amax = {}
        for layer in self.layers.values():
            parts = [*layer.scaled_parts().values()]
            for letter, part in zip("kvq", (parts[0], parts[-1], layer.q), strict=True):
                if part:
                    amax[layer.layer_idx, letter] = tuple(part.amax.amax(1).tolist())
        # its queries are its own and were not measured
        for module in self.shared.values():
            owner = self.layers[module.owner].layer_idx
            amax |= {(module.layer_idx, letter): amax[owner, letter] for letter in "kv"}
        return amax

    def places(self) -> list[LayerPlaces]:
        """Return where the largest K and V of each layer were; empty if that is not known."""
        places = []
        for layer in self.layers.values():
            parts = [
                TensorPlaces(part.curve.tolist(), part.positions.tolist())
                for part in (layer.k, layer.v)
                if part.curve is not None and part.positions is not None
            ]
            if len(parts) == 2:
                places.append(LayerPlaces(layer.layer_idx, layer.tokens_read, *parts))
        return places

    def tensors(self) -> dict[Place, Tensor]:
        """Return every tensor, [H, columns] as `STATISTICS` says, by its place."""
        return {
            (name, letter, field): tensor
            for name, layer in self.layers.items()
            for letter in "kvq"
            for field in STATISTICS
            if (tensor := getattr(getattr(layer, letter), field, None)) is not None
        }

    def amax_by_modality(self) -> list[dict[str, Any]]:
        """Return the absmax of each head in text, pictures and audio, by layer and tensor; or nothing."""
        return [
            {"layer": layer.layer_idx, "tensor": letter}
            | {name: amax for name, amax in zip(MODALITIES, x.t().tolist(), strict=True) if any(amax)}
            for layer in self.layers.values()
            for letter, x in (("k", layer.k.modalities), ("v", layer.v.modalities))
            if x is not None
        ]

    def counts(self) -> list[tuple[int, int]]:
        """Return the number of tokens that each layer counted, and that of all it read."""
        return [(layer.tokens, layer.tokens_read) for layer in self.layers.values()]

    def discount_repeats(self, layer: LayerStats) -> LayerStats:
        """Return `layer` with its `tokens` less those that repeat earlier text, which bring no new values."""
        repeats = self.text.tokens - self.text.unrepeated_tokens if self.text else 0
        return replace(layer, tokens=max(0, layer.tokens - repeats))

    def replace_tensors(self, tensors: Mapping[Place, Tensor], counts: Iterable[Sequence[int]]) -> "KVStats":
        """Return statistics of the same modules with other `tensors`, [H, columns] each, and `counts`."""
        layers = {}
        for (name, layer), (tokens, read) in zip(self.layers.items(), counts, strict=True):
            parts: dict[str, Any] = {
                letter: TensorStats(
                    **{place[2]: x for place, x in tensors.items() if place[:2] == (name, letter)}
                )
                for letter in "kvq"
                if (name, letter, "amax") in tensors
            }
            layers[name] = replace(layer, tokens=tokens, read=read, **parts)
        return KVStats(layers, self.shared, self.text)

    @check_arguments
    def merge(self, stats: "KVStats") -> "KVStats":
        """Combine with other tokens of the same run; an InputError if model or options are not the same.

        Curve, positions and tail are dropped if one of the two has none; text is one of the modalities.
        """
        tensors, added = self.tensors(), stats.tensors()
        for parts, partner in ((tensors, added), (added, tensors)):
            for module, letter, _ in [x for x in partner if x[2] == "modalities" and x not in parts]:
                if (module, letter, "curve") in parts:  # those of text alone
                    amax = parts[module, letter, "amax"].amax(1, keepdim=True)
                    parts[module, letter, "modalities"] = pad(amax, (0, len(MODALITIES) - 1))
        for place in tensors.keys() ^ added.keys():
            if place[2] in (*PER_TOKEN, "modalities"):
                (tensors if place in tensors else added).pop(place)
        if {place: x.shape for place, x in tensors.items()} != {place: x.shape for place, x in added.items()}:
            raise InputError(
                "these statistics are of different models or observers: modules, head shapes or "
                "what was collected differ; merge only runs of one model with the same options"
            )
        merged = {place: STATISTICS[place[2]].combine(x, added[place]) for place, x in tensors.items()}
        pairs = ((layer, stats.layers[name]) for name, layer in self.layers.items())
        counts = [(a.tokens + b.tokens, a.tokens_read + b.tokens_read) for a, b in pairs]
        text = self.text.join(stats.text) if self.text and stats.text else None
        result = self.replace_tensors(merged, counts)
        layers = {}
        for name, layer in result.layers.items():
            second = stats.layers[name]
            marks = (layer.estimated, second.estimated), (layer.unbounded, second.unbounded)
            estimated, unbounded = (tuple(sorted({*a, *b})) for a, b in marks)
            layers[name] = replace(layer, estimated=estimated, unbounded=unbounded)
        return replace(result, layers=layers, text=text)

    @check_arguments
    def join(self, later: "KVStats") -> "KVStats":
        """Combine with another run, as if its tokens had been read after those of this one.

        This is `merge`, but the curve of the `later` run moves behind this run's tokens. An InputError
        also if both surely read the same text.
        """
        tensors = later.tensors()
        for place, x in tensors.items():
            if place[2] == "curve" and place[0] in self.layers:
                offset, count = (stats.layers[place[0]].tokens_read for stats in (self, later))
                tensors[place] = shift_curve(x, offset, count)
        joined = self.merge(later.replace_tensors(tensors, later.counts()))
        has_media = any(place[2] == "modalities" for place in tensors)  # beside one text pictures may differ
        records = {*filter(None, self.records)} & {*filter(None, later.records)}
        if (records and not has_media) or are_equal(self, later):
            raise InputError("these statistics are of one text, which counts once; join those of other text")
        return joined

    @check_arguments
    def scales(
        self,
        *,
        strategy: Strategy,
        observer: Observer,
        fp8_dtype: FP8Name = "e4m3fn",
        headroom: float | Literal["auto"] = 1.0,
        targets: Targets = "kv",
        center_keys: bool = False,
    ) -> KVScales:
        """Derive scales: `amax * headroom / fp8_max`, float32, finite and > 0.

        With headroom `auto` that of each layer is the smallest >= 1 by which a new token has a value
        of K or V beyond the scales with a chance of one in a million; see `calib.scales.tail`.
        With `center_keys` K's are for what is left of K without its mean per channel, `k_center`.

        Raises:
            CalibrationError: a layer saw nothing, only zeros, or NaN or Inf; or its values are so small or
                so large that no engine would load the scale.
            InputError: the statistics, or the observer, do not allow these options:

                - `strategy`, `targets`, `center_keys`: a latent (MLA) has one scale, for K and V.
                - `observer`: it needs a histogram that is not there, or returned no amax for each scale.
                - `targets="qkv"`: the statistics are of a cache, which holds no queries.
                - `center_keys`: the statistics hold no means of K.
                - `headroom="auto"`: they hold no tails or too few tokens, or a layer needs more than 16.
        """
        if self.latent:
            check_one_scale(strategy=strategy, targets=targets, center_keys=center_keys)
        layers = {}
        for name, layer in self.layers.items():
            if headroom == "auto":
                room = headroom_for(self.discount_repeats(layer).tails(strategy))
            else:
                room = headroom
            rule = ScaleRule(strategy, observer, room, FP8_MAX[fp8_dtype])
            center, centered = layer.centered_keys() if center_keys else (None, None)
            scales = [
                rule.scale(part.amax, part.histogram, f"{name} {label}", centered if label == "K" else None)
                for label, part in layer.scaled_parts().items()
            ]
            q = None
            if targets == "qkv":
                if layer.q is None:
                    raise InputError(
                        "these statistics are of a cache, which holds no queries; calibrate for Q"
                    )
                q = rule.scale(layer.q.amax, layer.q.histogram, f"{name} Q")
            layers[name] = LayerScales(layer.layer_idx, scales[0], scales[-1], q, center, layer.latent)
        return KVScales(strategy, fp8_dtype, layers, self.shared)


@check_arguments
def derive_scales(stats: KVStats, recipe: Recipe) -> KVScales:
    """Derive the scales that `recipe` has written; raises as `KVStats.scales` does."""
    is_reduced = recipe.export.reduce == "max"
    # the headroom of heads that clip apart would be too large for one scale that clips in few of them
    is_one = is_reduced and recipe.headroom == "auto"
    scales = stats.scales(
        strategy="tensor" if is_one else recipe.strategy,
        observer=make_observer(recipe.observer, recipe.fp8_dtype),
        fp8_dtype=recipe.fp8_dtype,
        headroom=recipe.headroom,
        targets=recipe.targets,
        center_keys=recipe.center_keys,
    )
    return scales.reduce_max() if is_reduced else scales


def are_equal(one: KVStats, two: KVStats) -> bool:
    """Return whether two statistics have the same counts and the same tensors, bit for bit."""
    own, added = one.tensors(), two.tensors()
    is_equal = own.keys() == added.keys() and one.counts() == two.counts()
    return is_equal and all(torch.equal(x, added[place]) for place, x in own.items())


def bucket_indices(tokens: Tensor) -> Tensor:
    """Return the bucket (see `calib.scales.places`) of each of `tokens`, indices [N]: [N] int64."""
    # frexp is exact, a rounded logarithm is not
    return torch.frexp((tokens + 1).double()).exponent.long() - 1


def shift_curve(curve: Tensor, offset: int, count: int) -> Tensor:
    """Return the `curve` [H, BUCKETS] of `count` tokens as if it began after `offset` tokens.

    A bucket does not tell which of its tokens was the largest, so it goes to where its last one
    lies. An amax is never said to be reached before it was seen, at times later.
    """
    shifted = torch.zeros_like(curve)
    for bucket in range(bucket_of(count - 1) + 1):
        column = bucket_of(offset + min(first_of(bucket + 1), count) - 1)
        shifted[:, column] = torch.maximum(shifted[:, column], curve[:, bucket])
    return shifted
