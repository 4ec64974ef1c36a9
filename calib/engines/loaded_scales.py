"""The scales that an engine computes with, compared layer by layer with those in the files.

Engines whose scales have the same fingerprint read each other's FP8 blocks rightly.
"""

import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from calib.engines.outcome import Place
from calib.errors import OUR_NAMES, NoScalesError
from calib.files.names import PACK_FILE
from calib.files.stored_scales import StoredLayer, StoredScales, Values, is_usable, read_scales
from calib.files.text import show_layers

# every copy that an engine has of one scale, by its name there. The first has a value per head;
# others may have the largest. A copy that is empty has no value.
Copies = Mapping[str, Values]
# layer -> its cache type, and the scales of K and V that it stores with
Stored = Mapping[int, tuple[str, Values, Values]]

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
    backend: str = ""  # the attention backend; empty: not known
    written: tuple[str, ...] = ()  # the copies that it stores with; none: not known
    read: tuple[str, ...] = ()  # and those that it stores or attends with; none: not known, so all count
    has_kernels: bool = True  # False: the backend says that it does not take such a cache


@dataclass
class ScalesInForce:
    """The number of K and V scales in use, and the layers that compute with something else."""

    used: int = 0
    total: int = 0  # of the layers with an FP8 cache
    not_fp8: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # by cache
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # to be known, but not a problem
    fingerprint: str = ""  # of the scales that K and V are stored with; empty without an FP8 cache
    awaits_scales: bool = False  # weights have come from memory, and no scales since
    # of the whole model, by layer: its cache, and the scales of K and V that it is stored with
    stored: list[tuple[int, str, Values, Values]] = field(default_factory=list)
    fnuz: bool = False  # and they are doubled, for an FP8 type that ends at 240
    server: str = ""  # a random number of the engine's core, by which one that has two addresses is known

    def to_json(self) -> dict[str, Any]:
        """Return plain data, which `ScalesInForce` takes again."""
        return {name: value for name, value in vars(self).items() if name != "not_fp8"}

    def __str__(self) -> str:
        counts = [f"{self.used} of {self.total} KV scales in use, FP8 cache"] if self.total else []
        for cache, layers in self.not_fp8.items():
            counts.append(f"{len(layers)} layer{'' if len(layers) == 1 else 's'} in {cache}")
        counts += [f"fingerprint {self.fingerprint}"] if self.fingerprint else []
        start = "fp8kv: " + (", ".join(counts) or "no attention layer here")
        return "; ".join([start, *self.notes, *self.problems])


def compare(
    layers: Sequence[EngineLayer],
    files: Mapping[int, StoredLayer],
    place: Place,
    rank: int = 0,
    stages: int = 1,
    is_fp8: bool = False,
) -> ScalesInForce:
    """Compare the layers of `rank` with the scales in the files, by layer.

    With several pipeline `stages`, a rank sees only its own layers; where `is_fp8`, those of other ranks have
    an FP8 cache even if all layers of this rank were left in 16 bits.
    """
    report, layers_by_problem = ScalesInForce(), defaultdict(list)
    one_value = {x.backend for x in layers if _has_largest_alone(x, files.get(x.layer), place, rank)}
    report.notes += [
        f"{name} takes the largest of a layer's scales for all of its heads" for name in sorted(one_value)
    ]
    if any(file.is_baked for file in files.values()):
        report.notes.append("the model is baked: 1.0 is right")
    for layer in sorted(layers, key=lambda layer: layer.layer):
        if not layer.is_fp8:
            report.not_fp8[layer.cache].append(layer.layer)
            if not layer.has_kernels:
                problem = f"{layer.backend} has no kernels for {layer.cache}, so the cache holds garbage"
                layers_by_problem[problem].append(layer.layer)
            continue
        report.total += 2
        for letter in "kvq":
            problems = _scale_problems(layer, letter, files.get(layer.layer), place, rank)
            report.used += letter != "q" and not any(is_read for is_read in problems.values())
            for problem in problems:
                layers_by_problem[problem].append(layer.layer)
    if files and layers and not report.total and not (is_fp8 and stages > 1):
        report.problems.append("the cache is not FP8, so no scale is used")
    report.problems += [f"{why} in {show_layers(indices)}" for why, indices in layers_by_problem.items()]
    missing = sorted(files.keys() - {layer.layer for layer in layers})
    if missing and stages == 1:
        report.problems.append(f"the files have scales for {show_layers(missing)}, which the engine lacks")
    return report


def compare_stored(stored: Stored, files: Mapping[int, StoredLayer], place: Place) -> list[int]:
    """Return the layers that a whole model, of all ranks, does not store with the scales in the files.

    A rank that stores with one value for all of its heads has the largest of theirs. Layers in 16 bits are
    not compared unless all are.
    """
    layers, files = files.keys() - stored.keys(), dict(files)
    is_fp8 = any(k or v for _, k, v in stored.values())
    for index, (cache, k, v) in stored.items():
        layer = EngineLayer(index, bool(k or v), {"": k}, {"": v}, cache=cache)
        if file := files.get(index):
            k, v = _largest(file.values("k"), len(k)), _largest(file.values("v"), len(v))
            files[index] = replace(file, k=k, v=v)
        if compare([layer], files, place, stages=2, is_fp8=is_fp8).problems:
            layers.add(index)
    return sorted(layers)


def _largest(values: Values, count: int) -> Values:
    """Return the largest of each of `count` parts of the heads' scales."""
    size = max(1, len(values) // count) if count and is_usable(values) else 1
    return tuple(max(values[i : i + size]) for i in range(0, len(values), size))


def read_engine_scales(directory: Path) -> StoredScales:
    """Read the scales that an engine serves `directory` with, none of a model that was baked for FP8."""
    if (directory / PACK_FILE).exists():  # whose JSON has one scale for K and V
        raise NoScalesError(f"'{directory}' is a pack, which no engine loads; give what the engine serves")
    return read_scales(directory, or_baked=("fp8",))


def layers_of_files(
    stored: StoredScales | None, layers_of_engine: Iterable[int] = (), *, is_draft: bool = False
) -> dict[int, StoredLayer]:
    """Return the layers that the files have scales for; a draft's by `layers_of_engine`, a bake's at 1.0."""
    if stored and is_draft:
        return dict(zip(sorted({*layers_of_engine}), stored.drafts, strict=False))
    if stored and not stored.layers:
        return {i: StoredLayer(i, (1.0,), (1.0,), is_baked=True) for i in layers_of_engine}
    return {layer.layer: layer for layer in (stored.layers if stored else ())}


def expected_values(file: StoredLayer | None, letter: str, place: Place, rank: int) -> Values:
    """Return the values of a file's scale that `rank` has to compute with; none where none can be used.

    A scale of queries is the largest of those that share a KV head, as vLLM keeps them.
    """
    values = file.values(letter) if file else ()
    if not is_usable(values):
        return ()
    if letter == "q" and file and file.k:
        values = _largest(values, len(file.k))
    if len(values) > 1:
        values = values[place.head_slice(rank, len(values))]
    return tuple(2 * x for x in values) if place.fnuz and file and not file.is_baked else values


def _scale_problems(
    layer: EngineLayer, letter: str, file: StoredLayer | None, place: Place, rank: int
) -> dict[str, bool]:
    """Return what is wrong with a scale, by copy unless all are wrong alike, and whether kernels read it."""
    copies, name = getattr(layer, letter), letter.upper()
    if not copies:
        return {} if letter == "q" else {f"{name} has no place": True}
    problems = {
        copy: _copy_problem(values, letter, file, place, rank, is_first=i == 0)
        for i, (copy, values) in enumerate(copies.items())
    }
    if len(kinds := {*problems.values()}) == 1:
        return {f"{name} {kind}": True for kind in kinds if kind}
    # the catalogue knows which copies of K and V a backend reads
    knows_copies = layer.read and letter != "q"
    wrong = {}
    for copy, problem in problems.items():
        is_read = not knows_copies or copy in layer.read
        by = f", which {layer.backend} {'reads' if is_read else 'does not read'}," if knows_copies else ""
        if problem:
            wrong[f"{name}'s copy {copy}{by} {problem}"] = is_read
    return wrong


def _has_largest_alone(layer: EngineLayer, file: StoredLayer | None, place: Place, rank: int) -> bool:
    """Return whether a copy that the backend reads is the largest of the file's different heads."""
    heads = {letter: expected_values(file, letter, place, rank) for letter in "kv"}
    return layer.is_fp8 and any(
        len({*expected}) > 1 and len(values) == 1 and _is_close(values, (max(expected),))
        for letter, expected in heads.items()
        for copy, values in getattr(layer, letter).items()
        if copy in layer.read
    )


def _copy_problem(
    values: Values, letter: str, file: StoredLayer | None, place: Place, rank: int, *, is_first: bool
) -> str:
    """Return what is wrong with one copy of a scale; an empty string where it is the file's."""
    if not values:
        return "is empty, which kernels take for 1.0"
    is_1 = _is_close(values, (1.0,))
    stored = file.values(letter) if file else ()
    if letter == "q" and is_1 and not is_usable(stored):
        return ""  # a query scale is optional
    if not stored and file and letter == "v" and not is_1:
        stored, letter = file.values("k"), "k"  # which some engines give a V without a scale
    if not stored:
        return "has no scale in the files and is at 1.0" if is_1 else "is not from the files"
    if not is_usable(stored):
        return "has no usable scale in the files"
    is_all_1 = {*expected_values(file, letter, Place(place.ranks), rank)} == {1.0}
    if letter != "q" and is_all_1 and not (file and file.is_baked):
        return "is 1.0 in the files, which nobody measured"
    expected = expected_values(file, letter, place, rank)
    if len(values) == 1 and not is_first:
        expected = (max(expected),)
    if _is_close(values, expected):
        return ""
    if _is_close(values, tuple(2 * x for x in expected)):
        if not place.fnuz:
            return "is twice the file's"
        if not is_1:
            return "is doubled twice"
    if place.fnuz and _is_close(values, tuple(x / 2 for x in expected)):
        return "is not doubled for an FP8 type that ends at 240"
    return "is at 1.0: the engine dropped the file's scale" if is_1 else "is not the file's"


def _is_close(values: Values, expected: Values) -> bool:
    if len(set(values)) == 1:  # one value for all heads, however it is stored
        values = values[:1] * len(expected)
    return len(values) == len(expected) and all(
        abs(a - b) <= _BF16 * b for a, b in zip(values, expected, strict=True)
    )


def stored_scales(layers: Sequence[EngineLayer]) -> Stored:
    """Return the scales that each layer stores K and V with, of the copies those that its backend reads."""
    return {
        layer.layer: (layer.cache, _written(layer, layer.k), _written(layer, layer.v)) for layer in layers
    }


def fingerprint(stored: Stored) -> str:
    """Return 16 bytes, in hex, of all layers' scales, as float32; empty where no layer has an FP8 cache."""
    digest, has_scales = blake2b(digest_size=16), False
    for index, (cache, *scales) in sorted(stored.items()):
        digest.update(f"{index} {OUR_NAMES.get(cache, cache)} ".encode())
        for values in scales:
            # one value for all heads is the same scale, however it is stored
            values = values[:1] if len({*values}) == 1 else values
            digest.update(struct.pack(f"<I{len(values)}f", len(values), *values))
            has_scales |= bool(values)
    return digest.hexdigest() if has_scales else ""


def join_ranks(ranks: Sequence[Stored], tensor_parallel_size: int, kv_heads: int) -> Stored:
    """Return the scales of the whole model, of its ranks in order: tensor-parallel ones of a stage together.

    So the fingerprint of a model does not depend on how many GPUs it is split over.
    """
    whole: dict[int, tuple[str, Values, Values]] = {}
    for first in range(0, len(ranks), tensor_parallel_size):
        group = ranks[first : first + tensor_parallel_size]
        for index, (cache, *_) in group[0].items():
            k = _join([rank[index][1] for rank in group], kv_heads)
            whole[index] = (cache, k, _join([rank[index][2] for rank in group], kv_heads))
    return whole


def _join(parts: Sequence[Values], kv_heads: int) -> Values:
    values = tuple(value for part in parts for value in part)
    if len({*values}) == 1:
        return values[:1]
    copies = max(1, len(values) // kv_heads)  # of a head that several ranks hold
    heads = values[::copies]
    is_copied = tuple(value for value in heads for _ in range(copies)) == values
    return heads if is_copied else values  # ranks that differ where they must not


def _written(layer: EngineLayer, copies: Mapping[str, Values]) -> Values:
    if not layer.is_fp8:
        return ()
    first = next(iter(copies.values()), ())
    return next((values for name, values in copies.items() if name in layer.written), first)
