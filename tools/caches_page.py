"""Write docs/caches.md from calib/caches/types.yaml and the catalogue of engines: `make pages`."""

import sys
from collections.abc import Iterable, Sequence
from itertools import starmap
from pathlib import Path
from types import SimpleNamespace

from jinja2 import Environment, FileSystemLoader
from prose import fold

sys.path.insert(0, str(Path(__file__).parents[1]))

from calib.caches.types import ALL_CACHES, UNSIMULATED, CacheType, Layers, Shape, cache_type
from calib.engines.cache_support import Support, find_support
from calib.engines.catalogue import Kernel, find_engine
from calib.engines.tokens_that_fit import vllm_pool
from calib.errors import InputError

PAGE = Path(__file__).parents[1] / "docs" / "caches.md"
_HEADS = [Shape(1, size, size) for size in (64, 128, 256)]
_LATENT = Shape(1, 512, 64, "latents")
_FITTING = ("fp8", "fp8_per_token_head", "int4_per_token_head", "turboquant_k8v4")
_MAMBA = {
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}
_NETS = {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_value_head_dim": 128}
_NETS |= {"linear_key_head_dim": 128, "linear_conv_kernel_dim": 4}
_FULL, _SLIDING = "full_attention", "sliding_attention"
# kinds of layers, as often as they come; the shape of each kind that attends; more of the config
_MODELS = {
    "Llama-3.1-8B": ([_FULL], 32, {_FULL: (8, 128, 128)}, {}),
    "gpt-oss-20b": (
        [_SLIDING, _FULL],
        12,
        dict.fromkeys((_SLIDING, _FULL), (8, 64, 64)),
        {"sliding_window": 128},
    ),
    "Gemma-4-26B": (
        *([_SLIDING] * 5 + [_FULL], 5, {_SLIDING: (8, 256, 256), _FULL: (2, 512, 512)}),
        {"sliding_window": 1024},
    ),
    "Falcon-H1-1.5B": (["hybrid"], 24, {"hybrid": (2, 128, 128)}, _MAMBA),
    "Qwen3-Next-80B": (["linear_attention"] * 3 + [_FULL], 12, {_FULL: (2, 256, 256)}, _NETS),
}
_SUPPORT_TITLES = ("type", "engine", "flag", "GPUs", "for", "sizes", "known by", "note")
_KERNEL_TITLES = ("`--attention`", "queries", "K and V", "softmax weights", "scales")


def page() -> str:
    """Render the whole page."""
    template = Environment(loader=FileSystemLoader(Path(__file__).parent)).get_template("caches.md.j2")
    types = [cache_type(name) for name in (*ALL_CACHES, *UNSIMULATED)]
    bases: dict[str, list[str]] = {}  # what simulations rest on, to types
    for kind in types:
        bases.setdefault(kind.simulated, []).append(f"`{kind.name}`")
    support = (_support_row(kind.name, pair) for kind in types for pair in find_support(kind.name))
    text = template.render(
        types=_table(("type", "K and V", "bits", "latents, bits", "simulation"), map(_type_row, types)),
        bases=[f"{', '.join(names)}: {basis}." for basis, names in bases.items()],
        support=_table(_SUPPORT_TITLES, support),
        fitting=_table(("model", "16 bits", *(f"`{name}`" for name in _FITTING)), map(_fit_row, _MODELS)),
    )
    return f"{fold(text.rstrip())}\n"


def kernel_table() -> str:
    """Render the table of attention kernels in docs/evaluation.md."""
    return _table(_KERNEL_TITLES, starmap(_kernel_row, find_engine("vllm").kernels.items()))


def _type_row(kind: CacheType) -> list[str]:
    bits = [_bits(kind, shape) for shape in _HEADS]
    of_heads = " / ".join(bits if len({*bits}) > 1 else bits[:1])
    return [f"`{kind.name}`", kind.description, of_heads, _bits(kind, _LATENT), kind.evidence]


def _bits(kind: CacheType, shape: Shape) -> str:
    try:
        return f"{kind.bytes_per_token([shape]) * 8 / shape.values:.3g}"
    except InputError:
        return "-"


def _fit_row(name: str) -> list[str]:
    kinds, times, shapes, more = _MODELS[name]
    kinds = kinds * times
    config = SimpleNamespace(model_type=name.partition("-")[0].lower(), layer_types=kinds, **more)
    by_layer = {i: Shape(*shapes[kind]) for i, kind in enumerate(kinds) if kind in shapes}
    layers = Layers(by_layer, len(kinds), not {_FULL, _SLIDING}.issuperset(kinds))
    full = vllm_pool(config, layers, None).tokens_per_gb
    gains = []
    for cache in map(cache_type, _FITTING):
        try:
            gains.append(f"{vllm_pool(config, layers, cache).tokens_per_gb / full:.2f}")
        except InputError:
            gains.append("-")
    return [name, f"{full:,}", *gains]


def _support_row(cache: str, support: Support) -> list[str]:
    engine, way = support
    sizes = [*map(str, way.head_sizes or ()), *(f"{r} + {p}" for r, p in way.latents or ())]
    others = "all" if way.least_head == 1 else f"{way.least_head} and more"
    place = [", ".join(way.gpus), ", ".join(way.attention), ", ".join(sizes) or others]
    name = f"{engine.name} {engine.caches.version}"
    return [f"`{cache}`", name, f"`{way.flag}`", *place, engine.caches.evidence, way.note]


def _kernel_row(mode: str, kernel: Kernel) -> list[str]:
    queries = "E4M3" if kernel.queries == "fp8" else kernel.queries
    scales = " or ".join({"tensor": "per tensor", "attn_head": "KV head"}[x] for x in kernel.strategies)
    return [f"`{mode}`: {kernel.name}, {kernel.where}", queries, kernel.keys, kernel.weights, scales]


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (titles, ["---"] * len(titles), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("|  |", "| |")


if __name__ == "__main__":
    PAGE.write_text(page())
