"""The scales of a directory by layer, one record for all commands, and what is wrong with them."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from calib.choices import FP8Name, Purpose, Strategy
from calib.errors import InputError, NoScalesError
from calib.files.cache_type import fp8_type
from calib.files.config import Config, caches_latents, head_counts, layer_config
from calib.files.fingerprint import baked_for
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.names import (
    CARD_FILE,
    INDEX_FILE,
    JSON_FILE,
    MODELOPT_FILE,
    is_of_tower,
    layer_of,
    parse_scale_name,
    way_back,
)
from calib.files.safetensors_header import FLOATS
from calib.files.scale_files import ScaleTensor
from calib.files.text import show_layers

Values = tuple[float, ...]
# no |K| or |V| that a model computes comes from a scale beyond these: memory that nobody filled
_SMALLEST, _LARGEST = 1e-20, 1e6
# a baked model's K scales are 1/2 to 1 on the text it was baked with, less under a headroom
_BAKED = 8
# what the card of `fp8kv recommend --write` says of a model that is as it was: its cache, and what serves it
_RECOMMENDED = re.compile(
    r"^# .+, for a KV cache of (.{1,80})\n\nMade by `fp8kv recommend --write`: .+\n\n"
    r"```bash\n(.{1,800})\n```$",
    re.MULTILINE,
)
# kinds of scales that no engine can do anything sensible with; the first that fits is reported
_UNUSABLE: dict[str, Callable[[float], bool]] = {
    "are NaN": math.isnan,
    "are infinite": math.isinf,
    "are negative": lambda scale: scale < 0,
    "are zero": lambda scale: scale == 0,
    "look like memory that nobody wrote": lambda scale: not _SMALLEST <= scale <= _LARGEST,
}


@dataclass
class StoredLayer:
    """The scales of one layer, as one engine or another would read them."""

    layer: int
    k: Values | None = None
    v: Values | None = None
    q: Values | None = None
    tensors: list[ScaleTensor] = field(default_factory=list)
    is_baked: bool = False  # no file has them: the weights were baked, so 1.0 is right
    is_draft: bool = False  # it predicts extra tokens (MTP)

    def values(self, letter: str) -> Values:
        """Return the scales of K, V or Q; none where there are none."""
        return getattr(self, letter) or ()

    @property
    def name(self) -> int | str:
        """Its number, for reports; a draft's counts for itself in some models."""
        return f"{self.layer} (draft)" if self.is_draft else self.layer


@dataclass(frozen=True)
class StoredScales:
    """The scales of a directory, as any tool may have written them."""

    directory: ModelDirectory
    layers: list[StoredLayer]

    @property
    def drafts(self) -> list[StoredLayer]:
        """The scales of layers that predict extra tokens (MTP), by their numbers in the checkpoint."""
        layers = _group_by_layer(self.directory, self.directory.draft_tensors)
        return [replace(layers[index], is_draft=True) for index in sorted(layers)]

    @property
    def fp8_dtype(self) -> FP8Name:
        """The FP8 type they are for; an InputError where the files name another, or several."""
        return fp8_type(self.directory)

    @property
    def strategy(self) -> Strategy:
        """The number of scales: one per layer, or one per head."""
        counts = [len(layer.values(letter)) for layer in self.layers for letter in "kvq"]
        return "attn_head" if max(counts, default=0) > 1 else "tensor"

    @property
    def formats(self) -> list[str]:
        """The formats whose names the scales have, most frequent first."""
        counts = Counter(t.parsed.dialect for layer in self.layers for t in layer.tensors)
        names = [name for name, _ in counts.most_common()]
        return names if self.directory.json is None else [*names, JSON_FILE]

    @property
    def layers_without_scales(self) -> list[int]:
        """Layers with attention weights for which nothing is in the files; none known without weights."""
        indices = {layer_of(module) for module in self.directory.modules}
        return sorted(i for i in indices - {layer.layer for layer in self.layers} if i is not None)

    @property
    def problems(self) -> list[str]:
        """All that is wrong for any engine, one line each."""
        own = _value_problems(self.layers) + _value_problems(self.drafts) + self.contradictions
        return own + self.misread + _file_problems(self.directory)

    @property
    def contradictions(self) -> list[str]:
        """Scales that have two values, one line for K, V, Q, and what K and V share."""
        problems = []
        for letters in ("k", "v", "q", "kv"):
            layers = (*self.layers, *self.drafts)
            pairs = [(x.name, pair) for x in layers if (pair := self._contradiction(x, letters))]
            if pairs:
                (layer, places), *further = pairs
                scale = f"{' and '.join(letters.upper())} scale of layer {layer}"
                count = f" (and of {len(further)} more)" if further else ""
                problems.append(f"two values for the {scale}{count}: {' and '.join(places)}")
        return problems

    @property
    def misread(self) -> list[str]:
        """Reasons for which engines take the scales for other than they are."""
        problems = _count_problems([*self.layers, *self.drafts], self.directory.text_config)
        if offsets := self.directory.offsets:
            problems.append(
                f"'{offsets[0]}' is not 0, and {len(offsets) - 1} more: scales are for values less an "
                "offset, which engines do not subtract"
            )
        return problems + self._json_problems() + self._scales_from_before_baking()

    def modules(self) -> dict[int | None, str]:
        """Return the attention module of each layer; raise an InputError where one has several."""
        modules = {layer_of(module): module for module in self.directory.modules}
        if len(modules) < len(self.directory.modules):
            raise InputError(
                f"'{self.directory.path}' has layers with several attention modules (as LongCat), "
                "whose scales cannot be told apart; calibrate the model with --format fp8kv"
            )
        return modules

    def layers_by_module(self) -> dict[str, StoredLayer]:
        """Return layers by attention module, also without a scale; InputError for scales without a module."""
        modules = self.modules()
        layers = {index: StoredLayer(index) for index in modules if index is not None}
        layers |= {layer.layer: layer for layer in self.layers}
        named = {}
        for index, layer in sorted(layers.items()):
            names = sorted(tensor.parsed.module.removesuffix(".attn") for tensor in layer.tensors)
            if index not in modules and not names:
                raise InputError(
                    f"'{self.directory.path}' has scales for layer {index} and no attention module "
                    "to hold them; put the file beside the model's weights"
                )
            # a query scale is optional
            named[modules.get(index) or names[0]] = replace(layer, q=layer.q if is_usable(layer.q) else None)
        return named

    def to_json(self) -> dict[str, Any]:
        """Return the object that `fp8kv inspect --json` prints."""
        return {
            "directory": str(self.directory.path),
            "formats": self.formats,
            "strategy": self.strategy if self.layers else None,
            "quantization": quantization(self.directory),
            "layers": [
                {"layer": layer.name, "k": layer.k, "v": layer.v, "q": layer.q}
                | {"tensors": {t.name: [t.file, t.dtype, t.shape] for t in layer.tensors}}
                for layer in (*self.layers, *self.drafts)
            ],
            "layers_without_scales": self.layers_without_scales,
            "problems": self.problems,
        }

    def _contradiction(self, layer: StoredLayer, letters: str) -> tuple[str, str] | None:
        """Return two places that differ on one scale; one that K and V share is the larger of theirs."""
        places = [(t.values, _describe(t)) for t in reversed(layer.tensors) if t.parsed.letters == letters]
        if letters == "kv":
            own = [tensor for tensor in layer.tensors if tensor.parsed.letters in ("k", "v")]
            # beside one that is not usable, it is not known which is the larger
            if own and all(is_usable(tensor.values) for tensor in own):
                largest = max(own, key=lambda tensor: max(tensor.values))
                places.insert(0, ((max(largest.values),), _describe(largest)))
            json = self.directory.json.layer_scales if self.directory.json else {}
            if not layer.is_draft and (scale := json.get(layer.layer)) is not None:
                places.append(((scale,), f"{scale:.6g} in {JSON_FILE}"))
        for values, place in places[1:]:
            first, first_place = places[0]
            # as far as bfloat16 tells; NaN equals NaN
            if len(first) != len(values) or any(
                not math.isclose(a, b, rel_tol=2**-7) and str(a) != str(b)
                for a, b in zip(first, values, strict=True)
            ):
                return first_place, place
        return None

    def _json_problems(self) -> list[str]:
        """Report a kv_cache_scales.json for another type of model, or whose ranks are not 0, 1 and so on."""
        json = self.directory.json
        if json is None or self.directory.tensors:  # which come first
            return []
        types = [part.get("model_type") for part in (self.directory.config, self.directory.text_config)]
        if json.model_type is not None and any(types) and json.model_type not in types:
            named, own = str(json.model_type)[:80], types[0] or types[1]
            return [f"{JSON_FILE} is for a '{named}', and config.json is that of a '{own}'"]
        if set(json.ranks) != {*range(len(json.ranks))}:
            return [f"{JSON_FILE} has scales of ranks {[*json.ranks][:8]}; ranks count from 0"]
        return []

    def _scales_from_before_baking(self) -> list[str]:
        """Report scales of the model as it was before it was baked for FP8, which puts K's near 1."""
        logarithms = [math.log(max(x.k)) for x in self.layers if x.k and is_usable(x.k)]
        mean = math.fsum(logarithms) / max(1, len(logarithms))
        is_near_1 = abs(mean) <= math.log(_BAKED)
        if is_near_1 or caches_latents(self.directory.text_config) or baked_for(self.directory) != "fp8":
            return []
        return [
            f"its weights are baked for fp8, which puts K scales near 1, and these are {math.exp(mean):.3g} "
            "on average, as of the model before; take them away, or calibrate the baked model"
        ]


def read_scales(path: Path, *, strict: bool = True, or_baked: Sequence[Purpose] = ()) -> StoredScales:
    """Read the scales of a directory; unless `strict`, also those that only a report may show.

    A model without scales will do if it was baked for one of `or_baked`: it needs none.

    A NoScalesError where there are none; if `strict`, also where only files that the index does not list have
    some, and an InputError where one scale has two values.
    """
    directory = open_model_directory(path, weights=False)
    layers = _group_by_layer(directory, directory.tensors)
    if not layers and directory.json:
        json = directory.json.layer_scales
        layers = {index: StoredLayer(index, (scale,), (scale,)) for index, scale in json.items()}
    if not layers and (purpose := baked_for(directory)):
        if purpose in or_baked:
            return StoredScales(directory, [])
        raise NoScalesError(
            f"'{path}' holds no KV-cache scales and needs none: it is baked for {purpose}; "
            f"serve it as it is, and check its files with fp8kv verify {path}"
        )
    unlisted = {} if layers else _group_by_layer(directory, directory.unlisted)
    if unlisted and strict:
        raise NoScalesError(
            f"'{path}' holds KV-cache scales only in {directory.unlisted[0].file}, which "
            f"{INDEX_FILE} does not list, so engines skip them; give the output of a calibration"
        )
    index = directory.index or {}
    lost = [file for name, file in index.items() if file in directory.missing and parse_scale_name(name)]
    if lost and not (layers or unlisted):
        problem = f"'{path / INDEX_FILE}' names '{lost[0]}' for KV-cache scales, and it is missing"
        raise NoScalesError(f"{problem}; {way_back(lost[0], is_missing=True)}")
    if not (layers := layers or unlisted):
        raise NoScalesError(_explain_absence(path))
    scales = StoredScales(directory, [layers[index] for index in sorted(layers)])
    if strict and (problems := scales.contradictions):
        scales.modules()  # of several, each has a value of its own
        raise InputError(f"'{path}' has {problems[0]}; take away the one that is not the model's")
    return scales


def _explain_absence(path: Path) -> str:
    """Say that a directory needs no scales, where the card of `fp8kv recommend` says so, or give some."""
    card = path / CARD_FILE
    recommended = _RECOMMENDED.search(card.read_text(errors="replace")) if card.is_file() else None
    if recommended:
        kind, command = recommended.groups()
        return f"'{path}' holds no KV-cache scales: its cache, {kind}, needs none; serve it with {command}"
    return (
        f"'{path}' holds no KV-cache scales: no tensor such as 'model.layers.0.self_attn.k_scale', no "
        f"{JSON_FILE}; give the output of a calibration (16 bits, or int8_per_token_head, need none)"
    )


def is_usable(values: Sequence[float] | None) -> bool:
    """Return whether there are scales, and each is a number that a measurement can give."""
    return bool(values) and all(_SMALLEST <= value <= _LARGEST for value in values or ())


def quantization(directory: ModelDirectory) -> str:
    """Describe the method and KV scheme that a directory's config announces."""
    config = directory.quantization
    if config is None:
        return "no quantization_config"
    place = MODELOPT_FILE if config is directory.modelopt else "quantization_config"
    method = config.get("quant_method") or directory.algorithms.get("quant_algo")
    scheme = config.get("kv_cache_scheme") or directory.algorithms.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        keys = ("type", "num_bits", "strategy")
        scheme = ", ".join(f"{key} {scheme[key]}" for key in keys if key in scheme)
    return f"{place}: {method}, KV cache: {scheme or 'not mentioned'}"


def _group_by_layer(directory: ModelDirectory, tensors: Sequence[ScaleTensor]) -> dict[int, StoredLayer]:
    """Return the layers of `tensors`; of several for one scale the last by `preference` counts."""
    index = directory.index or {}

    def preference(tensor: ScaleTensor) -> tuple[Any, ...]:
        is_where_index_says = index.get(tensor.name) == tensor.file
        precision = -FLOATS.index(tensor.dtype)
        return -len(tensor.parsed.letters), is_where_index_says, precision, tensor.values, tensor.name

    layers: dict[int, StoredLayer] = {}
    # towers for images have layers of the same numbers
    for tensor in sorted((t for t in tensors if not is_of_tower(t.name)), key=preference):
        layer = layers.setdefault(tensor.parsed.layer, StoredLayer(tensor.parsed.layer))
        layer.tensors.append(tensor)
        for letter in tensor.parsed.letters:
            setattr(layer, letter, tensor.values)
    return layers


def _value_problems(layers: list[StoredLayer]) -> list[str]:
    problems = []
    for letter in "kvq":
        layers_by_kind: Mapping[str, list[int | str]] = defaultdict(list)
        for layer in layers:
            values = layer.values(letter)
            kinds = (kind for kind, is_wrong in _UNUSABLE.items() if any(map(is_wrong, values)))
            if kind := next(kinds, None):
                layers_by_kind[kind].append(layer.name)
        name = letter.upper()
        problems += [f"{name} scales {kind} in {show_layers(x)}" for kind, x in layers_by_kind.items()]
        if len(layers) > 1 and {x for layer in layers for x in layer.values(letter)} == {1.0}:
            problems.append(f"{name} scales are all 1.0: nothing was measured")
    for letter, partner in ("kv", "vk"):
        files = (x for x in layers if x.tensors)  # traffic may not tell one of the two
        if lacking := [x.name for x in files if x.values(letter) and not x.values(partner)]:
            scales = f"a {letter.upper()} scale and no {partner.upper()} scale"
            problems.append(f"there is {scales} in {show_layers(lacking)}")
    return problems


def _count_problems(layers: list[StoredLayer], config: Config) -> list[str]:
    problems, heads_names = [], {"k": "KV", "v": "KV", "q": "query"}
    for letter, heads_name in heads_names.items():
        wrong: dict[tuple[int, int], list[int | str]] = defaultdict(list)
        for layer in layers:
            counts = head_counts(layer_config(config, layer.layer), letter)
            count = len(layer.values(letter)) or 1
            if counts and count not in {1, *counts}:
                wrong[count, max(counts)].append(layer.name)
        for (count, heads), indices in wrong.items():
            model = f"has {heads} {heads_name} head{'' if heads == 1 else 's'} there"
            if letter != "q" and caches_latents(config):
                model = "caches latents (MLA), which have one scale"
            counterpart = "k" if letter == "q" else "q"
            is_of_counterpart = count in head_counts(config, counterpart)
            hint = f" (one per {heads_names[counterpart]} head)" if is_of_counterpart else ""
            problems.append(
                f"{letter.upper()} has {count} scales in {show_layers(indices)}{hint}, but the model "
                f"{model}: engines stop, or give heads the scales of others"
            )
    return problems


def _file_problems(directory: ModelDirectory) -> list[str]:
    unlisted = Counter(tensor.file for tensor in directory.unlisted)
    names = Counter(tensor.name for tensor in directory.tensors)
    repeated = [name for name, count in names.items() if count > 1]
    problems = [
        f"{file} holds {count} scales and is not in the index: engines that read the index skip it"
        for file, count in unlisted.items()
    ]
    if directory.misnamed:
        problems.append(f"'{directory.misnamed[0]}' is not a name that an engine looks for")
    if repeated:
        problems.append(f"{len(repeated)} scales are there twice, such as '{repeated[0]}'")
    if directory.missing:
        problems.append(f"the index names {directory.missing[0]}, which is not there")
    return problems


def _describe(tensor: ScaleTensor) -> str:
    shown = f"{max(tensor.values, default=0):.6g}"
    if len(tensor.values) != 1:
        shown = f"{len(tensor.values)} values from {min(tensor.values, default=0):.6g} to {shown}"
    return f"{shown} as '{tensor.name}' in {tensor.file}"
