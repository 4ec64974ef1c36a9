"""The tables of docs/caches.md, from types.yaml: `python -m calib.caches.listing`."""

import sys
from collections.abc import Iterable, Sequence

from calib.caches.types import CACHES, CacheType, Serving, cache_type

_HEAD_DIMS = (64, 128)


def tables() -> str:
    """Both tables: what each type is, and who serves it."""
    types = [cache_type(name) for name in ("fp8", *CACHES)]
    sizes = [f"bits, heads of {size}" for size in _HEAD_DIMS]
    whats = _table(["type", "K and V", *sizes, "how it is simulated"], map(_what, types))
    titles = ["type", "engine", "flag", "GPUs", "head sizes", "note"]
    return f"{whats}\n{_table(titles, (_served(t, s) for t in types for s in t.servings))}"


def _what(kind: CacheType) -> list[str]:
    bits = [f"{kind.bytes_per_token([(1, d, d)]) * 8 / (2 * d):g}" for d in _HEAD_DIMS]
    return [f"`{kind.name}`", kind.what, *bits, kind.simulated]


def _served(kind: CacheType, serving: Serving) -> list[str]:
    head_dims = ", ".join(map(str, serving.head_dims)) if serving.head_dims else "all"
    engine = f"{serving.engine} {serving.version}"
    gpus = ", ".join(serving.gpus)
    return [f"`{kind.name}`", engine, f"`{serving.flag}`", gpus, head_dims, serving.note]


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (titles, ["---"] * len(titles), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("|  |", "| |")


if __name__ == "__main__":
    sys.stdout.write(tables())
