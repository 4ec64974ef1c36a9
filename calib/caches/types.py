"""KV cache types: bytes per token, and which engine serves them where, from types.yaml."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict

from calib.errors import InputError

Engine = Literal["vllm", "sglang", "lmdeploy"]
Gpu = Literal["a100", "l40s", "h100", "h200", "b200", "mi300x"]
ENGINES: tuple[str, ...] = get_args(Engine)
GPUS: tuple[str, ...] = get_args(Gpu)

# all but static FP8, which `fp8` describes and the evaluation knows by its granularity
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


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Layout(_Strict):
    """How one head's K or V of one token lies in memory."""

    bits: int  # of a value
    head_bytes: int = 0  # scale and zero point of the whole vector
    block: int = 0  # values that share a scale of one byte; 0: none do

    def size(self, head_dim: int) -> int:
        """Bytes of `head_dim` values; an InputError where they do not fill bytes or blocks."""
        multiple = self.block or 8 // self.bits
        if head_dim < 1 or head_dim % multiple:
            raise InputError(f"head size {head_dim} is not a multiple of {multiple}")
        blocks = head_dim // self.block if self.block else 0
        return head_dim * self.bits // 8 + self.head_bytes + blocks


class Serving(_Strict):
    """An engine that serves a cache type."""

    engine: Engine
    version: str
    flag: str
    gpus: tuple[Gpu, ...]
    head_dims: tuple[int, ...] | None = None  # none: all
    note: str = ""


class CacheType(_Strict):
    """A type of KV cache."""

    name: str
    what: str
    simulated: str  # how we know what it computes
    integers: bool = False  # codes of even steps, so that `bake --for int8` can matter
    k: Layout
    v: Layout
    servings: tuple[Serving, ...] = ()

    def bytes_per_token(self, layers: Sequence[tuple[int, int, int]]) -> int:
        """Bytes of one token with all scales, as the engine allocates them.

        `layers` holds KV heads, K's head size and V's of each. Raises an InputError for a head
        size that the type does not allow.
        """
        try:
            return sum(heads * (self.k.size(k) + self.v.size(v)) for heads, k, v in layers)
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from None

    def serving(self, engine: str | None, gpu: str | None, head_dim: int) -> Serving | str:
        """The first engine that serves the type there, or one line that says why none does."""
        _known("engine", engine, ENGINES)
        _known("GPU", gpu, GPUS)
        if not self.servings:
            return f"no engine serves {self.name} yet"
        asked = [s for s in self.servings if engine in (None, s.engine)]
        if not asked:
            names = _listed(s.engine for s in self.servings)
            return f"{engine} does not have {self.name}, which is in {names}"
        there = [s for s in asked if gpu is None or gpu in s.gpus]
        if not there:
            names = _listed(name for s in asked for name in s.gpus)
            engines = _listed(s.engine for s in asked)
            return f"{self.name} is served on {names} ({engines}), not on {gpu}"
        fitting = [s for s in there if s.head_dims is None or head_dim in s.head_dims]
        if not fitting:
            sizes = _listed(map(str, sorted({d for s in there for d in s.head_dims or ()})))
            where = f"{f'on {gpu} ' if gpu else ''}with heads of {sizes}"
            engines = _listed(s.engine for s in there)
            return f"{self.name} is served {where} ({engines}), not of {head_dim}"
        return fitting[0]


def cache_type(name: str) -> CacheType:
    """The cache type called `name`: `fp8` (static), or one of CACHES."""
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


def _listed(names: object) -> str:
    return ", ".join(dict.fromkeys(names))  # type: ignore[call-overload]
