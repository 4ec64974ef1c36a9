"""Types of KV cache: what each makes of K and V, and its bytes per token. Engines say which they have."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import yaml

from calib.errors import InputError, did_you_mean

# a layer caches K and V of heads, or one latent for all heads (MLA), of which a sparse layer's indexer
# chooses the tokens to attend to (DSA)
Attention = Literal["heads", "latents", "sparse latents"]
# what our simulation of a type rests on: the engine's own writer, its source; nothing is simulated
Evidence = Literal["run", "read", "none"]


class Shape(NamedTuple):
    """The values of a token that one layer caches: K and V, or a latent in K's place and k_pe in V's."""

    heads: int  # KV heads; a latent is one
    k: int  # values of each head
    v: int
    attention: Attention = "heads"

    @property
    def k_size(self) -> str:
        """The name of its number of values in K."""
        return "head size" if self.attention == "heads" else "latent size"

    @property
    def values(self) -> int:
        """Values of a token."""
        return self.heads * (self.k + self.v)


Layer = tuple[int, int, int] | Shape


class Layers(NamedTuple):
    """The layers of a model that have a cache."""

    shapes: Mapping[int, Shape]  # by layer index
    total: int  # number of all layers
    is_hybrid: bool = False  # some, or parts of some, keep a state of fixed size

    @property
    def values(self) -> int:
        """Values of a token, in all of them."""
        return sum(shape.values for shape in self.shapes.values())


@dataclass(frozen=True)
class Layout:
    """The memory of one head's K or V of one token, or of a latent or k_pe."""

    bits: int  # of a value
    head_bytes: int = 0  # scale and zero point of the whole vector
    block: int = 0  # values that share a scale; 0: none do
    scale_bytes: int = 1  # of a block's scale
    is_ragged: bool = False  # the last block may be shorter
    is_rotated: bool = False  # by a Hadamard matrix of the whole vector
    only: int | None = None  # the number of values that it is for; none: any

    def size(self, count: int, name: str = "head size") -> int:
        """Return the bytes of `count` values; an InputError where they do not fill bytes or blocks."""
        multiple = 1 if self.is_ragged else self.block or 8 // math.gcd(8, self.bits)
        if count < 1 or count % multiple:
            raise InputError(f"{name} {count} is not a multiple of {multiple}")
        if self.is_rotated and count & (count - 1):
            raise InputError(f"{name} {count} is not a power of two")
        if self.only not in (None, count):
            raise InputError(f"{name} {count} is not {self.only}")
        blocks = -(-count // self.block) if self.block else 0
        return count * self.bits // 8 + self.head_bytes + blocks * self.scale_bytes


@dataclass(frozen=True)
class CacheType:
    """A type of KV cache: a row of types.yaml."""

    name: str
    description: str
    simulated: str  # the evidence for what it computes
    k: Layout
    v: Layout
    evidence: Evidence = "run"
    attention: tuple[Literal["heads", "latents"], ...] = ("heads",)
    is_static: bool = False  # its scales are 1.0, unless a checkpoint has some
    integers: bool = False  # codes of even steps, so that `bake --for int8` can matter
    edge_layers: int = 0  # so many at either end of a model stay in 16 bits, but none of a hybrid

    def bytes_per_token(self, layers: Iterable[Layer]) -> int:
        """Return the bytes of one token with all scales, as the engine allocates them.

        Raises an InputError for a head size, or a kind of attention, that the type is not for.
        """
        shapes = [Shape(*layer) for layer in layers]
        for shape in shapes:
            self.check_attention(is_latent=shape.attention != "heads")
        try:
            sizes = ((shape, self.k.size(shape.k, shape.k_size), self.v.size(shape.v)) for shape in shapes)
            return sum(shape.heads * (k + v) for shape, k, v in sizes)
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from None

    def model_bytes(self, layers: Layers) -> int:
        """Return the bytes of one token in a model; an InputError as of `bytes_per_token` and `edges`."""
        edges, size = self.edges(layers), self.bytes_per_token(layers.shapes.values())
        shapes = [layers.shapes[index] for index in edges]
        return size - self.bytes_per_token(shapes) + sum(2 * shape.values for shape in shapes)

    def edges(self, layers: Layers) -> set[int]:
        """Return the layers that stay in 16 bits, as vLLM's `get_boundary_skip_layers` chooses them.

        InputError where layers share a cache: it counts those too, and nobody ran it. InputError for a
        hybrid whose every layer attends, which vLLM refuses.
        """
        if not self.edge_layers:
            return set()
        indices = range(layers.total)
        is_complete = layers.shapes.keys() == {*indices}
        if layers.is_hybrid:
            if is_complete:
                raise InputError(f"{self.name} is for hybrids where some layers only attend, in vLLM")
            return set()
        if not is_complete:
            raise InputError(f"{self.name} is not known for a model where layers share a cache")
        count = min(self.edge_layers, len(indices) // 2)
        return {*indices[:count], *indices[len(indices) - count :]}

    def check_attention(self, *, is_latent: bool) -> None:
        """Refuse a model that caches latents, or K and V of heads, where this type is for the other alone."""
        if ("latents" if is_latent else "heads") not in self.attention:
            kinds = ("K and V of heads", "latents (MLA)")
            own, model = kinds if is_latent else reversed(kinds)
            raise InputError(f"{self.name} holds {own}, and this model caches {model}")


def cache_type(name: str) -> CacheType:
    """Return the cache type called `name`, of ALL_CACHES or UNSIMULATED; refuse other names."""
    if name not in _TYPES:
        hint = did_you_mean(name[:40], ALL_CACHES)
        raise InputError(f"cache '{name[:40]}' is not one of {', '.join(ALL_CACHES)}{hint}")
    return _TYPES[name]


def _read_types() -> dict[str, CacheType]:
    text = Path(__file__).with_name("types.yaml").read_text("utf-8")
    rows = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # every --help waits for it
    for row in rows.values():
        row |= {part: Layout(**row[part]) for part in "kv"}
        row["attention"] = tuple(row.get("attention", ["heads"]))
    return {name: CacheType(name, **row) for name, row in rows.items()}


_TYPES = _read_types()
UNSIMULATED = tuple(name for name, kind in _TYPES.items() if kind.evidence == "none")
ALL_CACHES = tuple(name for name in _TYPES if name not in UNSIMULATED)
# those of K and V of heads, but static FP8, which the evaluation knows by its granularity
CACHES = tuple(name for name in ALL_CACHES if _TYPES[name].attention == ("heads",))
LATENT_CACHES = tuple(name for name in ALL_CACHES if _TYPES[name].attention == ("latents",))
_CHOICES = ("all", *ALL_CACHES)
if TYPE_CHECKING:
    CacheName = str
else:
    CacheName = Literal[_CHOICES]
