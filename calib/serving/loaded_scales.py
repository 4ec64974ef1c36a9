"""The scales that an engine computes with, compared layer by layer with those in the files."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from calib.engines.outcome import Place
from calib.files.stored_scales import StoredLayer, StoredScales, Values, is_usable
from calib.files.text import show_layers

# every copy that an engine has of one scale, by its name there. The first has a value per head;
# others may have the largest. A copy that is empty has no value.
Copies = Mapping[str, Values]

_BF16 = 2**-8  # some engines pass scales through bfloat16


@dataclass(frozen=True)
class EngineLayer:
    """An attention layer of an engine on one rank, with every copy of its scales."""

    layer: int
    is_fp8: bool  # whether its cache is
    k: Copies
    v: Copies
    q: Copies = field(default_factory=dict)  # none: the engine has no place for it
    cache: str = "16 bits"  # where it is not FP8


@dataclass
class ScalesInForce:
    """The number of K and V scales in use, and the layers that compute with something else."""

    used: int = 0
    total: int = 0  # of the layers with an FP8 cache
    not_fp8: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # by cache
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = [f"{self.used} of {self.total} KV scales in use, FP8 cache"] if self.total else []
        counts += [f"{len(layers)} layers in {cache}" for cache, layers in self.not_fp8.items()]
        return "; ".join(["fp8kv: " + (", ".join(counts) or "no attention layer here"), *self.problems])


def compare(
    layers: Sequence[EngineLayer],
    stored: StoredScales | None,
    place: Place,
    rank: int = 0,
    stages: int = 1,
    is_fp8: bool = False,
) -> ScalesInForce:
    """Compare the layers of `rank` with the scales in the files; None: the files have none.

    With several pipeline `stages`, a rank sees only its own layers; where `is_fp8`, those of other ranks have
    an FP8 cache even if all layers of this rank were left in 16 bits.
    """
    report, layers_by_problem = ScalesInForce(), defaultdict(list)
    count = stored.directory.text_config.get("num_hidden_layers") if stored else None
    files = {  # without those of draft layers
        layer.layer: layer
        for layer in (stored.layers if stored else ())
        if not isinstance(count, int) or layer.layer < count
    }
    for layer in sorted(layers, key=lambda layer: layer.layer):
        if not layer.is_fp8:
            report.not_fp8[layer.cache].append(layer.layer)
            continue
        report.total += 2
        for letter in "kvq":
            problems = _scale_problems(layer, letter, files.get(layer.layer), place, rank)
            report.used += letter != "q" and not problems
            for problem in problems:
                layers_by_problem[problem].append(layer.layer)
    if files and layers and not report.total and not (is_fp8 and stages > 1):
        report.problems.append("the cache is not FP8, so no scale is used")
    report.problems += [f"{why} in {show_layers(indices)}" for why, indices in layers_by_problem.items()]
    missing = sorted(files.keys() - {layer.layer for layer in layers})
    if missing and stages == 1:
        report.problems.append(f"the files have scales for {show_layers(missing)}, which the engine lacks")
    return report


def _scale_problems(
    layer: EngineLayer, letter: str, file: StoredLayer | None, place: Place, rank: int
) -> list[str]:
    """Return what is wrong with a layer's scale; of which copy, unless it is wrong with all."""
    copies, name = getattr(layer, letter), letter.upper()
    if not copies:
        return [] if letter == "q" else [f"{name} has no place"]
    problems = {
        copy: _copy_problem(values, letter, file, place, rank, is_first=i == 0)
        for i, (copy, values) in enumerate(copies.items())
    }
    if len(kinds := {*problems.values()}) == 1:
        return [f"{name} {kind}" for kind in kinds if kind]
    return [f"{name}'s copy {copy} {problem}" for copy, problem in problems.items() if problem]


def _copy_problem(
    values: Values, letter: str, file: StoredLayer | None, place: Place, rank: int, *, is_first: bool
) -> str:
    """Return what is wrong with one copy of a scale; an empty string where it is the file's."""
    if not values:
        return "is empty, which kernels take for 1.0"
    is_1 = _is_close(values, (1.0,))
    expected = file.values(letter) if file else ()
    if letter == "q" and is_1 and not is_usable(expected):
        return ""  # a query scale is optional
    if not expected and file and letter == "v" and not is_1:
        expected = file.values("k")  # which some engines give a V without a scale
    if not expected:
        return "has no scale in the files and is at 1.0" if is_1 else "is not from the files"
    if not is_usable(expected):
        return "has no usable scale in the files"
    if letter == "q" and file and file.k:  # the largest of the query heads that share a KV head
        size = max(1, len(expected) // len(file.k))
        expected = tuple(max(expected[i : i + size]) for i in range(0, len(expected), size))
    if len(expected) > 1:
        expected = expected[place.head_slice(rank, len(expected))]
    if len(values) == 1 and not is_first:
        expected = (max(expected),)
    if letter != "q" and set(expected) == {1.0}:
        return "is 1.0 in the files, which nobody measured"
    if _is_close(values, tuple(2 * x for x in expected)):
        return "" if place.fnuz else "is twice the file's"
    if _is_close(values, expected):
        return "is not doubled for an FP8 type that ends at 240" if place.fnuz else ""
    return "is at 1.0: the engine dropped the file's scale" if is_1 else "is not the file's"


def _is_close(values: Values, expected: Values) -> bool:
    if len(set(values)) == 1:  # one value for all heads, however it is stored
        values = values[:1] * len(expected)
    return len(values) == len(expected) and all(
        abs(a - b) <= _BF16 * b for a, b in zip(values, expected, strict=True)
    )
