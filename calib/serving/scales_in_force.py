"""Compare the scales that an engine computes with, layer by layer, with those in the files."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from calib.engines.result import Place
from calib.files.stored_scales import StoredLayer, StoredScales, Values, is_usable
from calib.files.text import show_layers

# every copy that an engine holds of one scale, by its name there: which one a kernel reads is for
# the kernel to say. The first has a value per head; others may hold the largest. One that is empty
# has no value.
Copies = Mapping[str, Values]

_BF16 = 2**-8  # some engines pass scales through bfloat16


@dataclass(frozen=True)
class LayerInForce:
    """What one attention layer of an engine computes with, on one rank."""

    layer: int
    is_fp8: bool  # whether its cache is
    k: Copies
    v: Copies
    q: Copies = field(default_factory=dict)  # none: the engine has no place for it
    cache: str = "16 bits"  # what it is instead


@dataclass
class Report:
    """How many K and V scales are in use, and which layers compute with something else."""

    used: int = 0
    total: int = 0  # of the layers with an FP8 cache
    not_fp8: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # by cache
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kept = [f"{len(layers)} layers in {cache}" for cache, layers in self.not_fp8.items()]
        if self.total:
            kept.insert(0, f"{self.used} of {self.total} KV scales in use, FP8 cache")
        counted = "fp8kv: " + (", ".join(kept) or "no attention layer here")
        return "; ".join([counted, *self.problems])


def compare(
    layers: Sequence[LayerInForce],
    found: StoredScales | None,
    place: Place,
    rank: int = 0,
    stages: int = 1,
    is_fp8: bool = False,
) -> Report:
    """Compare the layers that `rank` holds with the files' scales; None: the files have none.

    Of several pipeline `stages` the others hold the layers that are not here; where `is_fp8`, these
    have an FP8 cache even if all that are here were left in 16 bits.
    """
    report, wrong = Report(), defaultdict(list)
    unused = 0
    files = _files(found) if found else {}
    for layer in sorted(layers, key=lambda each: each.layer):
        if not layer.is_fp8:
            report.not_fp8[layer.cache].append(layer.layer)
            continue
        report.total += 2
        for letter in "kvq":
            problems = _problems(layer, letter, files.get(layer.layer), place, rank)
            unused += bool(problems) and letter != "q"
            for problem in problems:
                wrong[problem].append(layer.layer)
    if files and layers and not report.total and not (is_fp8 and stages > 1):
        report.problems.append("the cache is not FP8, so no scale is used")
    report.used = report.total - unused
    report.problems += [f"{why} in {show_layers(indices)}" for why, indices in wrong.items()]
    missing = sorted(files.keys() - {layer.layer for layer in layers})
    if missing and stages == 1:
        report.problems.append(f"the files have scales for {show_layers(missing)}, which the engine lacks")
    return report


def _files(found: StoredScales) -> dict[int, StoredLayer]:
    """The layers that have scales, draft layers left out."""
    count = found.directory.text_config.get("num_hidden_layers")
    kept = (each for each in found.layers if not (isinstance(count, int) and each.layer >= count))
    return {each.layer: each for each in kept}


def _problems(
    layer: LayerInForce, letter: str, file: StoredLayer | None, place: Place, rank: int
) -> list[str]:
    """Say what is wrong with a layer's scale, of which copy of it unless of all."""
    copies: Copies = getattr(layer, letter)
    if not copies:
        return [] if letter == "q" else [f"{letter.upper()} has no place"]
    why = {
        name: _difference(held, letter, file, place, rank, is_first=i == 0)
        for i, (name, held) in enumerate(copies.items())
    }
    kinds, name = set(why.values()), letter.upper()
    if len(kinds) == 1:
        return [f"{name} {kind}" for kind in kinds if kind]
    return [f"{name}'s copy {copy} {kind}" for copy, kind in why.items() if kind]


def _difference(
    held: Values, letter: str, file: StoredLayer | None, place: Place, rank: int, *, is_first: bool
) -> str:
    """Say what is wrong with a copy of a scale; nothing where it is the file's."""
    if not held:
        return "is empty, which kernels take for 1.0"
    is_1 = _same(held, (1.0,))
    wanted: Values | None = getattr(file, letter) if file else None
    if letter == "q" and is_1 and not is_usable(wanted):
        return ""  # a query scale is optional
    if not wanted and file and letter == "v" and not is_1:
        wanted = file.k  # which some engines give a V without a scale
    if not wanted:
        return "has no scale in the files and is at 1.0" if is_1 else "is not from the files"
    if not is_usable(wanted):
        return "has no usable scale in the files"
    if letter == "q" and file and file.k:
        wanted = _of_kv_heads(wanted, len(file.k))
    if len(wanted) > 1:
        wanted = wanted[place.of_rank(rank, len(wanted))]
    if len(held) == 1 and not is_first:
        wanted = (max(wanted),)
    if letter != "q" and set(wanted) == {1.0}:
        return "is 1.0 in the files, which nobody measured"
    if _same(held, tuple(2 * x for x in wanted)):
        return "" if place.fnuz else "is twice the file's"
    if _same(held, wanted):
        return "is not doubled for an FP8 type that ends at 240" if place.fnuz else ""
    return "is at 1.0: the engine dropped the file's scale" if is_1 else "is not the file's"


def _of_kv_heads(scales: Values, heads: int) -> Values:
    """Scales of query heads as engines use them: of those that share a KV head, the largest."""
    size = max(1, len(scales) // heads)
    return tuple(max(scales[i : i + size]) for i in range(0, len(scales), size))


def _same(held: Values, wanted: Values) -> bool:
    if len(set(held)) == 1:  # one value for all heads, however it is stored
        held = held[:1] * len(wanted)
    return len(held) == len(wanted) and all(
        abs(a - b) <= _BF16 * b for a, b in zip(held, wanted, strict=True)
    )
