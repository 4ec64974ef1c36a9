"""How engines serve a cache: the first that has its type for a model, with its flag, or why none does."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from calib.caches.types import ALL_CACHES, Layer, Shape, cache_type
from calib.choices import FormatName, Strategy
from calib.engines.catalogue import GPUS, CacheSupport, Engine, choose_engines
from calib.errors import Fp8kvError, InputError


class NotServed(Fp8kvError):
    """No engine serves a cache there; says why."""


class Support(NamedTuple):
    """An engine, and one of its ways to serve a cache type."""

    engine: Engine
    way: CacheSupport


@dataclass(frozen=True)
class Offer:
    """A way to serve a cache."""

    engine: str
    version: str  # whose flags and kernels are known; empty: any
    gpus: tuple[str, ...]
    notes: tuple[str, ...] = ()
    flag: str = ""
    commands: tuple[str, ...] = ()  # in their order; the last one serves


@functools.cache
def serving_engines() -> dict[str, Engine]:
    """Return the newest version of each engine that has cache types; those that were run come first."""
    engines = [engine for engine in choose_engines(None, None) if engine.caches.types]
    engines.sort(key=lambda engine: (engine.caches.evidence != "run", engine.evidence != "run"))
    return {engine.name: engine for engine in engines}


def find_support(cache: str) -> list[Support]:
    """Find all that engines have for a cache type."""
    return [Support(e, way) for e in serving_engines().values() for way in e.caches.types.get(cache, ())]


def check_place(engine: str | None, gpu: str | None) -> None:
    """Refuse an engine or a GPU that is not known, or a pair without any cache type."""
    for flag, name, names in (("--engine", engine, serving_engines()), ("--gpu", gpu, GPUS)):
        if name not in (None, *names):
            raise InputError(f"{flag} '{name}' is not one of {', '.join(names)}")
    support = [pair for name in ALL_CACHES for pair in find_support(name)]
    if not any(engine in (None, owner.name) and gpu in (None, *way.gpus) for owner, way in support):
        place = " on ".join(filter(None, (engine or "any engine", gpu)))
        raise InputError(f"no type of KV cache but 16 bits is known for {place}")


def find_offer(
    cache: str,
    layers: Iterable[Layer],
    engine: str | None = None,
    gpu: str | None = None,
    model_type: str | None = None,
    *,
    strategy: Strategy | None = None,
) -> Offer:
    """Return how the first engine serves a cache there, or raise `NotServed`.

    `strategy` is that of FP8 scales which a checkpoint brings; without one FP8 has scale 1.0.
    """
    support = _fitting_support(cache, [Shape(*layer) for layer in layers], engine, gpu, model_type)
    owner = support[0].engine
    ways = [pair.way for pair in support if pair.engine is owner]
    gpus = [gpu] if gpu else [*dict.fromkeys(name for way in ways for name in way.gpus)]
    flag = ways[0].flag
    # scales of a checkpoint are for FP8 that ends at 448: where it ends at 240, engines double those of
    # compressed-tensors, or those of ModelOpt, which are written where that GPU is named
    is_doubled = strategy and (gpu or owner.methods["compressed-tensors"].doubles_fnuz)
    if cache == "fp8" and not is_doubled:
        gpus = [name for name in gpus if not GPUS[name].is_fnuz]
        if not gpus:
            raise NotServed(f"FP8 at scale 1.0 is measured up to 448, and on {gpu} FP8 ends at 240")
    if strategy == "attn_head":
        gpus = [name for name in gpus if GPUS[name].has_scales_per_head]
        flag = f"{flag} {owner.per_head_flag}"
        if not gpus:
            raise NotServed(f"{owner.name} has no scales per head on {gpu or 'the GPUs that serve FP8'}")
    notes = dict.fromkeys(way.note for way in ways if way.note and {*way.gpus} & {*gpus})
    return Offer(owner.name, owner.caches.version, tuple(gpus), tuple(notes), flag)


def format_for(engine: str, gpu: str | None) -> FormatName:
    """Return the format of scales that an engine which loads them reads right on a GPU."""
    if engine == "vllm" and gpu is not None and GPUS[gpu].is_fnuz:
        return "modelopt"
    return "sglang" if engine == "sglang" else "vllm"


def _fitting_support(
    cache: str, shapes: Sequence[Shape], engine: str | None, gpu: str | None, model_type: str | None
) -> list[Support]:
    """Find all that engines have for a cache there, or raise `NotServed`."""
    if not (every := find_support(cache)):
        raise NotServed(f"{cache} is in no engine yet")
    if not (own := [pair for pair in every if engine in (None, pair.engine.name)]):
        raise NotServed(f"{cache} is in {_engines(every)}, not in {engine}")
    kinds = {shape.attention for shape in shapes}
    if not (holding := [pair for pair in own if kinds <= {*pair.way.attention}]):
        served = ", ".join(sorted({kind for pair in own for kind in pair.way.attention}))
        missing = " and ".join(sorted(kinds))
        raise NotServed(f"{cache} is served for {served} ({_engines(own)}), not for {missing}")
    proven = [pair for pair in holding if pair.way.models is None or model_type in (None, *pair.way.models)]
    if not proven:
        if kinds != {"heads"}:
            raise NotServed(f"{_engines(holding)}: not known to cache latents of {model_type} models")
        models = _list(name for pair in holding for name in pair.way.models or ())
        raise NotServed(f"{cache} is served for {models} ({_engines(holding)}), not for {model_type}")
    if not (local := [pair for pair in proven if gpu in (None, *pair.way.gpus)]):
        gpus = _list(name for pair in proven for name in pair.way.gpus)
        raise NotServed(f"{cache} is served on {gpus} ({_engines(proven)}), not on {gpu}")
    fitting = [pair for pair in local if all(takes(pair.way, shape) for shape in shapes)]
    if not fitting:
        raise NotServed(size_problem(cache, local, shapes, gpu))
    return fitting


def takes(way: CacheSupport, shape: Shape) -> bool:
    """Return whether its kernels have these sizes."""
    if shape.attention == "heads":
        sizes = {shape.k, shape.v}
        return min(sizes) >= way.least_head if way.head_sizes is None else sizes <= {*way.head_sizes}
    return way.latents is None or (shape.k, shape.v) in way.latents


def size_problem(cache: str, support: Sequence[Support], shapes: Sequence[Shape], gpu: str | None) -> str:
    """Say which sizes are served, and which of `shapes` are not."""
    sizes, served = set[tuple[int, ...]](), set[tuple[int, ...]]()
    if all(shape.attention == "heads" for shape in shapes):
        word, sizes = "heads", {(size,) for shape in shapes for size in (shape.k, shape.v)}
        served = {(size,) for pair in support for size in pair.way.head_sizes or (pair.way.least_head,)}
    else:
        word, sizes = "latents", {(shape.k, shape.v) for shape in shapes}
        served = {pair for _, way in support for pair in way.latents or ()}
    allowed, missing = (
        [" + ".join(map(str, size)) for size in sorted(group)] for group in (served, sizes - served or sizes)
    )
    ending = " and more" if word == "heads" and any(pair.way.head_sizes is None for pair in support) else ""
    place = f"{f'on {gpu} ' if gpu else ''}with {word} of {', '.join(allowed)}{ending}"
    return f"{cache} is served {place} ({_engines(support)}), not of {' and '.join(missing)}"


def find_int8_flag(engine: Engine, shapes: Sequence[Shape]) -> tuple[str | None, str]:
    """Return the flag of an engine's INT8 cache for layers of these `shapes`, or None and why it has none."""
    caches = engine.caches.types
    kinds = [kind.name for kind in map(cache_type, caches) if kind.integers and kind.k.bits == 8]
    support = [Support(engine, way) for name in kinds for way in caches[name]]
    if not support:
        problem = "it has no INT8 cache" if caches else "it is not known to have an INT8 cache"
        return None, f"{problem}, which the weights are baked for"
    flags = [way.flag for _, way in support if all(takes(way, shape) for shape in shapes)]
    return (flags[0], "") if flags else (None, size_problem(kinds[0], support, shapes, None))


def _engines(support: Iterable[Support]) -> str:
    return _list(pair.engine.name for pair in support)


def _list(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
