"""The scales of a directory by layer, one record for all commands, and what is wrong with them."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from calib.choices import FP8Name, Strategy
from calib.errors import InputError, NoScalesError
from calib.files.baked import baked_for
from calib.files.fp8_type import fp8_type
from calib.files.heads import caches_latents, head_counts, of_layer
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.names import INDEX_FILE, JSON_FILE, MODELOPT_FILE, is_of_senses, layer_of
from calib.files.safetensors_header import FLOATS
from calib.files.scale_files import ScalesJson, ScaleTensor

Values = tuple[float, ...]
# no |K| or |V| that a model computes comes from so small a scale: memory that nobody filled
_UNINITIALISED = 1e-20
# nor from so large a one
_HUGE = 1e6
# a baked model's K scales are 1/2 to 1 on the text it was baked with, less under a headroom
_BAKED = 8
# kinds of scales that no engine can do anything sensible with; the first that fits is told
_WRONG: dict[str, Callable[[float], bool]] = {
    "are NaN": math.isnan,
    "are infinite": math.isinf,
    "are negative": lambda scale: scale < 0,
    "are zero": lambda scale: scale == 0,
    "look like memory that nobody wrote": lambda scale: not _UNINITIALISED <= scale <= _HUGE,
}


@dataclass
class StoredLayer:
    """The scales of one layer, as one engine or another would read them."""

    layer: int
    k: Values | None = None
    v: Values | None = None
    q: Values | None = None
    tensors: list[ScaleTensor] = field(default_factory=list)


@dataclass(frozen=True)
class StoredScales:
    """The scales of a directory, whatever tool has written them and whatever they are worth."""

    directory: ModelDirectory
    layers: list[StoredLayer]

    @property
    def fp8_dtype(self) -> FP8Name:
        """The FP8 type they are for; an InputError where the files name another, or several."""
        return fp8_type(self.directory)

    @property
    def strategy(self) -> Strategy:
        """One scale per layer, or per head."""
        several = any(len(getattr(layer, x) or ()) > 1 for layer in self.layers for x in "kvq")
        return "attn_head" if several else "tensor"

    @property
    def formats(self) -> list[str]:
        """Whose names the scales have, most frequent first."""
        counts = Counter(t.parsed.dialect for layer in self.layers for t in layer.tensors)
        names = [dialect for dialect, _ in counts.most_common()]
        return names + [JSON_FILE] * (self.directory.json is not None)

    @property
    def problems(self) -> list[str]:
        """What is wrong for any engine, one line each."""
        of_scales = _value_problems(self.layers) + self.contradictions
        return of_scales + self.misread + _file_problems(self.directory)

    @property
    def contradictions(self) -> list[str]:
        """Scales that have two values, one line for K, V, Q, and what K and V share."""
        problems = []
        for letters in ("k", "v", "q", "kv"):
            pairs = {
                layer.layer: pair
                for layer in self.layers
                if (pair := _contradiction(layer, letters, self.directory.json))
            }
            if pairs:
                first, more = next(iter(pairs)), len(pairs) - 1
                problems.append(
                    f"two values for the {' and '.join(letters.upper())} scale of layer {first}"
                    f"{f' (and of {more} more)' * bool(more)}: {' and '.join(pairs[first])}"
                )
        return problems

    @property
    def misread(self) -> list[str]:
        """What makes scales other than they look: their numbers, and what is subtracted."""
        problems = _count_problems(self.layers, self.directory.text_config)
        if offsets := self.directory.offsets:
            problems.append(
                f"'{offsets[0]}' is not 0, and {len(offsets) - 1} more: scales are for values less "
                "an offset, which engines do not subtract"
            )
        return problems + _before_baking(self)

    def modules(self) -> dict[int | None, str]:
        """The attention module of each layer; an InputError where one has several."""
        modules = {layer_of(module): module for module in self.directory.modules}
        if len(modules) < len(self.directory.modules):
            raise InputError(
                f"'{self.directory.path}' has layers with several attention modules (as LongCat), "
                "whose scales cannot be told apart; calibrate the model with --format fp8kv"
            )
        return modules

    def by_module(self) -> dict[str, StoredLayer]:
        """Layers by attention module, also those without a scale; useless query scales left out."""
        modules = self.modules()
        layers = {layer: StoredLayer(layer) for layer in modules if layer is not None}
        layers |= {layer.layer: layer for layer in self.layers}
        named = {}
        for index, layer in sorted(layers.items()):
            said = sorted(tensor.parsed.module.removesuffix(".attn") for tensor in layer.tensors)
            if index not in modules and not said:
                raise InputError(
                    f"'{self.directory.path}' has scales for layer {index} and no attention module "
                    "to hold them; put the file beside the model's weights"
                )
            # a query scale is optional, and nobody can use one that is of no use
            query = layer.q if is_usable(layer.q) else None
            named[modules.get(index) or said[0]] = replace(layer, q=query)
        return named

    def to_json(self) -> dict[str, Any]:
        """The object that `fp8kv inspect --json` prints."""
        return {
            "directory": str(self.directory.path),
            "formats": self.formats,
            "strategy": self.strategy if self.layers else None,
            "quantization": quantization(self.directory),
            "layers": [
                {"layer": layer.layer, "k": layer.k, "v": layer.v, "q": layer.q}
                | {"tensors": {t.name: [t.file, t.dtype, t.shape] for t in layer.tensors}}
                for layer in self.layers
            ],
            "problems": self.problems,
        }


def read_scales(path: Path) -> StoredScales:
    """Read the scales of a directory, for whatever computes with them or writes them again.

    Files count that the index lists; without an index, all.

    Raises:
        NoScalesError: there are none that count.
        InputError: there are two values for one scale.
    """
    found = show_scales(path)
    directory = found.directory
    if any(tensor in directory.unlisted for tensor in found.layers[0].tensors):
        raise NoScalesError(
            f"'{path}' holds KV-cache scales only in {directory.unlisted[0].file}, which "
            f"{INDEX_FILE} does not list, so engines skip them; give the output of a calibration"
        )
    if wrong := found.contradictions:
        found.modules()  # of several, each has a value of its own
        raise InputError(f"'{path}' has {wrong[0]}; take away the one that is not the model's")
    return found


def show_scales(path: Path) -> StoredScales:
    """Read them as `read_scales` does, but none that is there is refused: for what shows problems.

    Raises:
        NoScalesError: the directory holds none at all.
    """
    directory = open_model_directory(path, weights=False)
    found = _by_layer(directory, directory.tensors)
    if not found and directory.json:
        scales = directory.json.of_all_ranks.items()
        found = {index: StoredLayer(index, (scale,), (scale,)) for index, scale in scales}
    if not found and (purpose := baked_for(path)):
        raise NoScalesError(f"'{path}' holds no KV-cache scales and needs none: it is baked for {purpose}")
    found = found or _by_layer(directory, directory.unlisted)
    if not found:
        raise NoScalesError(
            f"'{path}' holds no KV-cache scales: no tensor such as "
            f"'model.layers.0.self_attn.k_scale', no {JSON_FILE}; give the output of a calibration"
        )
    return StoredScales(directory, [found[index] for index in sorted(found)])


def _by_layer(directory: ModelDirectory, tensors: Sequence[ScaleTensor]) -> dict[int, StoredLayer]:
    """The layers of `tensors`; of several for one scale the one that `_preference` puts last."""
    found: dict[int, StoredLayer] = {}
    index = directory.index or {}
    for tensor in sorted(tensors, key=lambda tensor: _preference(tensor, index)):
        if is_of_senses(tensor.name):
            continue  # a tower's layers are others, with the same numbers
        layer = found.setdefault(tensor.parsed.layer, StoredLayer(tensor.parsed.layer))
        layer.tensors.append(tensor)
        for letter in tensor.parsed.letters:
            setattr(layer, letter, tensor.values)
    return found


def _preference(tensor: ScaleTensor, index: Mapping[str, str]) -> tuple[Any, ...]:
    """What puts tensors for one scale in order, whatever their files are called: best last."""
    is_where_index_says = index.get(tensor.name) == tensor.file
    precision = -FLOATS.index(tensor.dtype)
    return -len(tensor.parsed.letters), is_where_index_says, precision, tensor.values, tensor.name


def is_usable(values: Sequence[float] | None) -> bool:
    """Whether scales are there, and each is a number that a measurement can give."""
    return bool(values) and all(_UNINITIALISED <= value <= _HUGE for value in values or ())


def quantization(directory: ModelDirectory) -> str:
    """The method and KV scheme that a directory's config announces, in a few words."""
    found = directory.quantization
    if found is None:
        return "no quantization_config"
    where = MODELOPT_FILE if found is directory.modelopt else "quantization_config"
    method = found.get("quant_method") or directory.algorithms.get("quant_algo")
    scheme = found.get("kv_cache_scheme") or directory.algorithms.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        said = [key for key in ("type", "num_bits", "strategy") if key in scheme]
        scheme = ", ".join(f"{key} {scheme[key]}" for key in said)
    return f"{where}: {method}, KV cache: {scheme or 'not mentioned'}"


def _value_problems(layers: list[StoredLayer]) -> list[str]:
    problems = []
    for letter in "kvq":
        wrong: dict[str, list[int]] = defaultdict(list)
        for layer in layers:
            values = getattr(layer, letter)
            kinds = (kind for kind, holds in _WRONG.items() if any(map(holds, values or ())))
            if kind := next(kinds, None):
                wrong[kind].append(layer.layer)
        name = letter.upper()
        problems += [f"{name} scales {kind} in {these(each)}" for kind, each in wrong.items()]
        every = [value for layer in layers for value in getattr(layer, letter) or ()]
        if len(layers) > 1 and every and set(every) == {1.0}:
            problems.append(f"{name} scales are all 1.0: nothing was measured")
    counts = Counter((bool(layer.k), bool(layer.v)) for layer in layers)
    for has, lacks, count in (("K", "V", counts[True, False]), ("V", "K", counts[False, True])):
        if count:
            problems.append(f"{count} layers have a {has} scale and no {lacks} scale")
    return problems


def _contradiction(layer: StoredLayer, letters: str, json: ScalesJson | None) -> tuple[str, str] | None:
    """Two places that differ on one scale; one that K and V share is the larger of theirs."""
    tensors = [t for t in reversed(layer.tensors) if t.parsed.letters == letters]
    places = [(t.values, _place(t)) for t in tensors]
    if letters == "kv":
        own = [tensor for tensor in layer.tensors if tensor.parsed.letters in ("k", "v")]
        # beside one that nobody can use, which is the larger is not known
        if own and all(is_usable(tensor.values) for tensor in own):
            largest = max(own, key=lambda t: max(t.values))
            places.insert(0, ((max(largest.values),), _place(largest)))
        if json and (scale := json.of_all_ranks.get(layer.layer)) is not None:
            places.append(((scale,), f"{scale:.6g} in {JSON_FILE}"))
    others = (place for values, place in places[1:] if not _same(places[0][0], values))
    return next(((places[0][1], other) for other in others), None)


def _place(tensor: ScaleTensor) -> str:
    least, largest = min(tensor.values, default=0), max(tensor.values, default=0)
    shown = f"{largest:.6g}"
    if len(tensor.values) != 1:
        shown = f"{len(tensor.values)} values from {least:.6g} to {shown}"
    return f"{shown} as '{tensor.name}' in {tensor.file}"


def _same(one: Values, other: Values) -> bool:
    """Whether two values of one scale agree, as far as bfloat16 tells."""
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=2**-7) or str(a) == str(b)  # of NaN
        for a, b in zip(one, other, strict=True)
    )


def _count_problems(layers: list[StoredLayer], config: Mapping[str, Any]) -> list[str]:
    problems = []
    for letter, kind, other in (("k", "KV", "q"), ("v", "KV", "q"), ("q", "query", "k")):
        wrong: dict[tuple[int, int], list[int]] = defaultdict(list)
        for layer in layers:
            heads = head_counts(of_layer(config, layer.layer), letter)
            count = len(getattr(layer, letter) or (0,))
            if heads and count not in {1, *heads}:
                wrong[count, max(heads)].append(layer.layer)
        there = " there" * (len(head_counts(config, letter)) > 1)
        for (count, own), indices in wrong.items():
            named = f"has {own} {kind} head{'s' * (own != 1)}{there}"
            if letter != "q" and caches_latents(config):
                named = "caches latents (MLA), which have one scale"
            of_others = f" (one per {'query' if other == 'q' else 'KV'} head)"
            problems.append(
                f"{letter.upper()} has {count} scales in {these(indices)}"
                f"{of_others * (count in head_counts(config, other))}, but the model {named}: "
                "engines stop, or give heads the scales of others"
            )
    return problems


def _before_baking(scales: StoredScales) -> list[str]:
    """Tell scales of the model as it was before it was baked for FP8, which puts K's near 1."""
    directory = scales.directory
    values = [max(layer.k) for layer in scales.layers if layer.k and is_usable(layer.k)]
    is_latent = caches_latents(directory.text_config)
    if not values or is_latent or baked_for(directory.path) != "fp8":
        return []
    mean = math.exp(math.fsum(map(math.log, values)) / len(values))
    if 1 / _BAKED <= mean <= _BAKED:
        return []
    return [
        f"its weights are baked for fp8, which puts K scales near 1, and these are {mean:.3g} on "
        "average, as of the model before; take them away, or calibrate the baked model"
    ]


def these(indices: list[int]) -> str:
    """Layers in words, the first eight by number."""
    shown = ", ".join(map(str, indices[:8]))
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"layer{'s' if len(indices) > 1 else ''} {shown}{more}"


def _file_problems(directory: ModelDirectory) -> list[str]:
    unlisted = Counter(tensor.file for tensor in directory.unlisted)
    names = Counter(tensor.name for tensor in directory.tensors)
    twice = [name for name, count in names.items() if count > 1]
    problems = [
        f"{file} holds {count} scales and is not in the index: engines that read the index skip it"
        for file, count in unlisted.items()
    ]
    if directory.misnamed:
        problems.append(f"'{directory.misnamed[0]}' is no name that an engine looks for")
    if twice:
        problems.append(f"{len(twice)} scales are there twice, such as '{twice[0]}'")
    if directory.missing:
        problems.append(f"the index names {directory.missing[0]}, which is not there")
    return problems
