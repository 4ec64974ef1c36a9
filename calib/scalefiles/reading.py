"""The scales of a directory by layer, one record for all commands, and what is wrong with them."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from calib.choices import FP8Name, Strategy
from calib.errors import InputError, NoScalesError
from calib.scalefiles.baked import baked_for
from calib.scalefiles.file_names import JSON_FILE, MODELOPT_FILE
from calib.scalefiles.folder import ScaleDirectory, ScaleTensor, open_scales
from calib.scalefiles.fp8_type import fp8_type
from calib.scalefiles.heads import caches_latents, head_counts, of_layer
from calib.scalefiles.names import layer_of

Values = tuple[float, ...]
# no |K| or |V| that a model computes comes from so small a scale: memory that nobody filled
_UNINITIALISED = 1e-20
# nor from so large a one
_HUGE = 1e6
# kinds of scales that no engine can do anything sensible with; the first that fits is told
_WRONG: dict[str, Callable[[float], bool]] = {
    "are NaN": math.isnan,
    "are infinite": math.isinf,
    "are negative": lambda scale: scale < 0,
    "are zero": lambda scale: scale == 0,
    "look like memory that nobody wrote": lambda scale: not _UNINITIALISED <= scale <= _HUGE,
}


@dataclass
class FoundLayer:
    """The scales of one layer, as one engine or another would read them."""

    layer: int
    k: Values | None = None
    v: Values | None = None
    q: Values | None = None
    tensors: list[ScaleTensor] = field(default_factory=list)


@dataclass(frozen=True)
class FoundScales:
    """The scales of a directory, whatever tool has written them and whatever they are worth."""

    directory: ScaleDirectory
    layers: list[FoundLayer]

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
        of_scales = _value_problems(self.layers) + _contradictions(self.layers)
        return of_scales + self.misread + _file_problems(self.directory)

    @property
    def misread(self) -> list[str]:
        """What makes scales other than they look: their numbers, and what is subtracted."""
        problems = _count_problems(self.layers, self.directory.text_config)
        if offsets := self.directory.offsets:
            problems.append(
                f"'{offsets[0]}' is not 0, and {len(offsets) - 1} more: scales are for values less "
                "an offset, which engines do not subtract"
            )
        return problems

    def by_module(self) -> dict[str, FoundLayer]:
        """Layers by attention module, also those without a scale; useless query scales left out."""
        modules = {layer_of(module): module for module in self.directory.modules}
        if len(modules) < len(self.directory.modules):
            raise InputError(
                f"'{self.directory.path}' has layers with several attention modules (as LongCat), "
                "whose scales cannot be told apart; calibrate the model with --format fp8kv"
            )
        layers = {layer: FoundLayer(layer) for layer in modules if layer is not None}
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


def read_scales(path: Path) -> FoundScales:
    """Read the scales of a directory: of several tensors for one scale, the more specific.

    Raises:
        NoScalesError: the directory holds none.
    """
    directory = open_scales(path)
    found: dict[int, FoundLayer] = {}
    # a scale of both K and V first, so that one of K alone replaces it
    for tensor in sorted(directory.tensors, key=lambda t: (-len(t.parsed.letters), t.name)):
        layer = found.setdefault(tensor.parsed.layer, FoundLayer(tensor.parsed.layer))
        layer.tensors.append(tensor)
        for letter in tensor.parsed.letters:
            setattr(layer, letter, tensor.values)
    if not found and directory.json:
        for ranks in directory.json.ranks.values():
            for index, scale in ranks.items():
                layer = found.setdefault(index, FoundLayer(index))
                # ranks hold different heads: one scale for all of them is the largest
                layer.k = layer.v = (max(scale, *(layer.k or (scale,))),)
    if not found and (purpose := baked_for(path)):
        raise NoScalesError(
            f"'{path}' holds no KV-cache scales and needs none: it is baked for {purpose}"
        )
    if not found:
        raise NoScalesError(
            f"'{path}' holds no KV-cache scales: no tensor such as "
            f"'model.layers.0.self_attn.k_scale', no {JSON_FILE}; give the output of a calibration"
        )
    return FoundScales(directory, [found[index] for index in sorted(found)])


def is_usable(values: Sequence[float] | None) -> bool:
    """Whether scales are there, and each is a number that a measurement can give."""
    return bool(values) and all(_UNINITIALISED <= value <= _HUGE for value in values or ())


def quantization(directory: ScaleDirectory) -> str:
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


def _value_problems(layers: list[FoundLayer]) -> list[str]:
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


def _contradictions(layers: list[FoundLayer]) -> list[str]:
    problems = []
    for letter in "kvq":
        of_letter = {
            layer.layer: [t.values for t in layer.tensors if t.parsed.letters == letter]
            for layer in layers
        }
        differ = [layer for layer, each in of_letter.items() if not _same(each)]
        if differ:
            problems.append(f"several {letter.upper()} scales that differ in {these(differ)}")
    return problems


def _same(scales: list[Values]) -> bool:
    """Whether scales of one tensor agree, as far as bfloat16 tells."""
    lengths = {len(values) for values in scales}
    return len(lengths) < 2 and all(
        math.isclose(a, b, rel_tol=2**-7)
        for values in scales[1:]
        for a, b in zip(scales[0], values, strict=True)
    )


def _count_problems(layers: list[FoundLayer], config: Mapping[str, Any]) -> list[str]:
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


def these(indices: list[int]) -> str:
    """Layers in words, the first eight by number."""
    shown = ", ".join(map(str, indices[:8]))
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"layer{'s' if len(indices) > 1 else ''} {shown}{more}"


def _file_problems(directory: ScaleDirectory) -> list[str]:
    unlisted = Counter(tensor.file for tensor in directory.tensors if not tensor.indexed)
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
