"""KV cache types: bytes per token, and which engine serves them where, from types.yaml."""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ConfigDict

from calib.errors import InputError

Engine = Literal["vllm", "sglang", "lmdeploy"]
Gpu = Literal["a100", "l40s", "h100", "h200", "b200", "mi300x"]
# what a layer caches: K and V of heads, or one latent for all heads (MLA), of which a sparse
# layer's indexer chooses the tokens to attend to (DSA)
Attention = Literal["heads", "latents", "sparse latents"]
ENGINES: tuple[str, ...] = get_args(Engine)
GPUS: tuple[str, ...] = get_args(Gpu)

# of K and V of heads; all but static FP8, which `fp8` describes and the evaluation knows by its
# granularity
CACHES = (
    "fp8_per_token_head",
    "int8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
    "nvfp4_4over6",
    "fp8_k_nvfp4_v",
    "lmdeploy_int8",
    "lmdeploy_int4",
)
LATENT_CACHES = ("fp8_ds_mla", "nvfp4_ds_mla")
ALL_CACHES = ("fp8", *CACHES, *LATENT_CACHES)


class Shape(NamedTuple):
    """What one layer caches of a token: K and V, or a latent in K's place and k_pe in V's."""

    heads: int  # KV heads; a latent is one
    k: int  # values of each head
    v: int
    attention: Attention = "heads"

    @property
    def k_size(self) -> str:
        """What its number of values in K is called."""
        return "head size" if self.attention == "heads" else "latent size"

    @property
    def values(self) -> int:
        """Values of a token."""
        return self.heads * (self.k + self.v)


Layer = tuple[int, int, int] | Shape


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Layout(_Strict):
    """How one head's K or V of one token lies in memory, or a latent or k_pe."""

    bits: int  # of a value
    head_bytes: int = 0  # scale and zero point of the whole vector
    block: int = 0  # values that share a scale; 0: none do
    scale_bytes: int = 1  # of a block's scale
    is_ragged: bool = False  # the last block may be shorter

    def size(self, head_dim: int, what: str = "head size") -> int:
        """Bytes of `head_dim` values; an InputError where they do not fill bytes or blocks.

        `what` is what the message calls the number.
        """
        multiple = 1 if self.is_ragged else self.block or max(1, 8 // self.bits)
        if head_dim < 1 or head_dim % multiple:
            raise InputError(f"{what} {head_dim} is not a multiple of {multiple}")
        blocks = -(-head_dim // self.block) if self.block else 0
        return head_dim * self.bits // 8 + self.head_bytes + blocks * self.scale_bytes


class Serving(_Strict):
    """An engine that serves a cache type."""

    engine: Engine
    version: str
    flag: str
    gpus: tuple[Gpu, ...]
    of: tuple[Attention, ...] = ("heads",)
    head_dims: tuple[int, ...] | None = None  # none: all
    latents: tuple[tuple[int, int], ...] | None = None  # sizes of latent and k_pe; none: all
    models: tuple[str, ...] | None = None  # model types; none: all
    note: str = ""

    def takes(self, shapes: Iterable[Shape]) -> bool:
        """Whether its kernels have these sizes."""
        return not any(self._lacks(shape) for shape in shapes)

    def _lacks(self, shape: Shape) -> bool:
        if shape.attention != "heads":
            return self.latents is not None and shape[1:3] not in self.latents
        return self.head_dims is not None and not {*shape[1:3]} <= {*self.head_dims}


class CacheType(_Strict):
    """A type of KV cache."""

    name: str
    what: str
    simulated: str  # how we know what it computes
    of: tuple[Literal["heads", "latents"], ...] = ("heads",)
    integers: bool = False  # codes of even steps, so that `bake --for int8` can matter
    k: Layout
    v: Layout
    servings: tuple[Serving, ...] = ()

    def bytes_per_token(self, layers: Iterable[Layer]) -> int:
        """Bytes of one token with all scales, as the engine allocates them.

        Raises an InputError for a head size, or a kind of attention, that the type is not for.
        """
        shapes = [Shape(*layer) for layer in layers]
        if not all(self.holds(shape) for shape in shapes):
            raise InputError(f"{self.name} holds {self._what_it_holds()}")
        try:
            return sum(
                shape.heads * (self.k.size(shape.k, shape.k_size) + self.v.size(shape.v)) for shape in shapes
            )
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from None

    def holds(self, shape: Shape) -> bool:
        """Whether it is for a layer of that attention."""
        return ("heads" if shape.attention == "heads" else "latents") in self.of

    def _what_it_holds(self) -> str:
        if "heads" in self.of:
            return "K and V of heads, and this model caches latents (MLA)"
        return "latents (MLA), and this model caches K and V of heads"

    def serving(
        self,
        engine: str | None,
        gpu: str | None,
        layers: Iterable[Layer],
        model_type: str | None = None,
    ) -> list[Serving] | str:
        """What the first engine that serves it there has for it, or one line why none does."""
        _known("engine", engine, ENGINES)
        _known("GPU", gpu, GPUS)
        shapes = [Shape(*layer) for layer in layers]
        if not self.servings:
            return f"no engine serves {self.name} yet"
        asked = [s for s in self.servings if engine in (None, s.engine)]
        if not asked:
            return f"{engine} does not have {self.name}, which is in {_engines(self.servings)}"
        kinds = {shape.attention for shape in shapes}
        holding = [s for s in asked if kinds <= {*s.of}]
        if not holding:
            has = _listed(sorted({kind for s in asked for kind in s.of}))
            wanted = " and ".join(sorted(kinds))
            return f"{self.name} is served for {has} ({_engines(asked)}), not for {wanted}"
        known = [s for s in holding if s.models is None or model_type in (None, *s.models)]
        if not known:
            return f"{_engines(holding)}: not known to cache latents of {model_type} models"
        there = [s for s in known if gpu is None or gpu in s.gpus]
        if not there:
            gpus = _listed(name for s in known for name in s.gpus)
            return f"{self.name} is served on {gpus} ({_engines(known)}), not on {gpu}"
        fitting = [s for s in there if s.takes(shapes)]
        if not fitting:
            return self._other_sizes(there, shapes, gpu)
        return [each for each in fitting if each.engine == fitting[0].engine]

    def _other_sizes(self, there: Sequence[Serving], shapes: Sequence[Shape], gpu: str | None) -> str:
        """Why none of `there` takes `shapes`."""
        has: set[tuple[int, ...]]
        given: set[tuple[int, ...]]
        if all(shape.attention == "heads" for shape in shapes):
            what, has = "heads", {(d,) for s in there for d in s.head_dims or ()}
            given = {(d,) for shape in shapes for d in (shape.k, shape.v)}
        else:
            what, has = "latents", {pair for s in there for pair in s.latents or ()}
            given = {(shape.k, shape.v) for shape in shapes}
        sizes = [" + ".join(map(str, each)) for each in sorted(has)]
        missing = [" + ".join(map(str, each)) for each in sorted(given - has or given)]
        where = f"{f'on {gpu} ' if gpu else ''}with {what} of {_listed(sizes)}"
        return f"{self.name} is served {where} ({_engines(there)}), not of {' and '.join(missing)}"


def cache_type(name: str) -> CacheType:
    """The cache type called `name`: `fp8` (static), or one of CACHES or LATENT_CACHES."""
    types = _types()
    if name not in types:
        raise InputError(f"cache '{name[:40]}' is not one of {', '.join(types)}")
    return types[name]


@cache
def _types() -> dict[str, CacheType]:
    facts = yaml.safe_load(Path(__file__).with_name("types.yaml").read_text())
    return {name: CacheType(name=name, **fact) for name, fact in facts.items()}


def _known(what: str, name: str | None, names: Sequence[str]) -> None:
    if name is not None and name not in names:
        raise InputError(f"{what} '{name[:40]}' is not one of {', '.join(names)}")


def _engines(servings: Iterable[Serving]) -> str:
    return _listed(s.engine for s in servings)


def _listed(names: object) -> str:
    return ", ".join(dict.fromkeys(names))  # type: ignore[call-overload]
