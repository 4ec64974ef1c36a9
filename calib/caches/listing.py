"""The tables of docs/caches.md, from types.yaml: `python -m calib.caches.listing`."""

import sys
from collections.abc import Iterable, Sequence

from calib.caches.types import ALL_CACHES, CacheType, Serving, Shape, cache_type

_SHAPES = {
    "heads of 64": Shape(1, 64, 64),
    "heads of 128": Shape(1, 128, 128),
    "latents of 512 + 64": Shape(1, 512, 64, "latents"),
}


def tables() -> str:
    """Both tables: what each type is, and who serves it."""
    types = [cache_type(name) for name in ALL_CACHES]
    sizes = [f"bits, {name}" for name in _SHAPES]
    whats = _table(["type", "K and V", *sizes, "how it is simulated"], map(_what, types))
    titles = ["type", "engine", "flag", "GPUs", "for", "sizes", "note"]
    return f"{whats}\n{_table(titles, (_served(t, s) for t in types for s in t.servings))}"


def _what(kind: CacheType) -> list[str]:
    bits = [_bits(kind, shape) if kind.holds(shape) else "-" for shape in _SHAPES.values()]
    return [f"`{kind.name}`", kind.what, *bits, kind.simulated]


def _bits(kind: CacheType, shape: Shape) -> str:
    return f"{kind.bytes_per_token([shape]) * 8 / shape.values:.3g}"


def _served(kind: CacheType, serving: Serving) -> list[str]:
    sizes = [*map(str, serving.head_dims or ()), *(f"{r} + {p}" for r, p in serving.latents or ())]
    engine = f"{serving.engine} {serving.version}"
    gpus = ", ".join(serving.gpus)
    where = [f"`{serving.flag}`", gpus, ", ".join(serving.of), ", ".join(sizes) or "all"]
    return [f"`{kind.name}`", engine, *where, serving.note]


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (titles, ["---"] * len(titles), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("|  |", "| |")


if __name__ == "__main__":
    sys.stdout.write(tables())
