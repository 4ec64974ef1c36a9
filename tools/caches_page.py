"""Write docs/caches.md from calib/caches/types.yaml and the catalogue of engines: `make caches-page`."""

import sys
from collections.abc import Iterable, Sequence
from itertools import starmap
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from calib.caches.types import ALL_CACHES, CacheType, Shape, cache_type
from calib.engines.cache_support import Support, find_support
from calib.engines.catalogue import Kernel, find_engine

PAGE = Path(__file__).parents[1] / "docs" / "caches.md"
_SHAPES = {
    "heads of 64": Shape(1, 64, 64),
    "heads of 128": Shape(1, 128, 128),
    "latents of 512 + 64": Shape(1, 512, 64, "latents"),
}
_SUPPORT_TITLES = ("type", "engine", "flag", "GPUs", "for", "sizes", "known by", "note")
_KERNEL_TITLES = ("`--attention`", "queries", "K and V", "softmax weights", "scales")


def page() -> str:
    """Render the whole page."""
    template = Environment(loader=FileSystemLoader(Path(__file__).parent)).get_template("caches.md.j2")
    types = [cache_type(name) for name in ALL_CACHES]
    titles = ("type", "K and V", *(f"bits, {name}" for name in _SHAPES), "how it is simulated")
    support = (_support_row(name, pair) for name in ALL_CACHES for pair in find_support(name))
    return (
        template.render(
            types=_table(titles, map(_type_row, types)), support=_table(_SUPPORT_TITLES, support)
        ).rstrip()
        + "\n"
    )


def kernel_table() -> str:
    """Render the table of attention kernels in docs/evaluation.md."""
    return _table(_KERNEL_TITLES, starmap(_kernel_row, find_engine("vllm").kernels.items()))


def _type_row(kind: CacheType) -> list[str]:
    bits = [_bits(kind, shape) if kind.holds(shape) else "-" for shape in _SHAPES.values()]
    return [f"`{kind.name}`", kind.description, *bits, kind.simulated]


def _bits(kind: CacheType, shape: Shape) -> str:
    return f"{kind.bytes_per_token([shape]) * 8 / shape.values:.3g}"


def _support_row(cache: str, support: Support) -> list[str]:
    engine, way = support
    flag = f"{engine.serve.partition('{path}')[2]} {way.flag}".strip()
    sizes = [*map(str, way.head_sizes or ()), *(f"{r} + {p}" for r, p in way.latents or ())]
    place = [", ".join(way.gpus), ", ".join(way.attention), ", ".join(sizes) or "all"]
    name = f"{engine.name} {engine.caches.version}"
    return [f"`{cache}`", name, f"`{flag}`", *place, engine.caches.evidence, way.note]


def _kernel_row(mode: str, kernel: Kernel) -> list[str]:
    queries = "E4M3" if kernel.queries == "fp8" else kernel.queries
    scales = " or ".join({"tensor": "per tensor", "attn_head": "KV head"}[x] for x in kernel.strategies)
    return [f"`{mode}`: {kernel.name}, {kernel.where}", queries, kernel.keys, kernel.weights, scales]


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (titles, ["---"] * len(titles), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("|  |", "| |")


if __name__ == "__main__":
    PAGE.write_text(page())
