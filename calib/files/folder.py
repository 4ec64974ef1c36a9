"""A directory with scales, as any tool may have left it: everything is read, nothing judged."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from calib.errors import InputError
from calib.files.calibrations import no_model
from calib.files.file_names import (
    CONFIG_FILE,
    INDEX_FILE,
    JSON_FILE,
    MODELOPT_FILE,
    STATS_FILE,
)
from calib.files.headers import Entry, is_zero, read_header, read_values
from calib.files.names import (
    ScaleName,
    is_of_cache,
    is_of_senses,
    is_offset,
    layer_of,
    parse_scale_name,
    pattern_of,
)
from calib.files.packs import read_pack
from calib.files.strict_json import read_object

# what no model comes near
_MAX_FILES = 100_000
# weights that only an attention module has, or their codes
_ATTENTION = re.compile(
    r"(?P<module>.+(?<!linear_attn))\.(?:k_proj|kv_b_proj|qkv_proj|query_key_value|c_attn|Wqkv|qkv)"
    r"\.(?:q?weight|weight_packed)"
)
# a layer that attends to another one's K and V has this alone
_QUERY = re.compile(r"(?P<module>.+)\.q_proj\.(?:q?weight|weight_packed)")
# what configs call the number of layers
LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_IN_STACK = re.compile(r"(.*?)\.?\b(\d{1,6})\.")
_Index = Annotated[str, Field(pattern=r"^[0-9]{1,6}$")]


class _Cache(BaseModel):
    model_config = ConfigDict(strict=True)
    scaling_factor: dict[_Index, dict[_Index, float]]  # rank -> layer -> scale
    dtype: Any = None


class ScalesJson(BaseModel):
    """`kv_cache_scales.json`, by `quantization/schema.py` of vLLM 0.4 to 0.6."""

    kv_cache: _Cache
    model_type: Any = None

    @property
    def dtype(self) -> str | None:
        """What FP8 type it is for, where it says so."""
        return self.kv_cache.dtype if isinstance(self.kv_cache.dtype, str) else None

    @cached_property
    def ranks(self) -> dict[int, dict[int, float]]:
        """The scale of each layer, for both K and V, by rank."""
        factors = self.kv_cache.scaling_factor.items()
        return {int(rank): {int(i): x for i, x in layers.items()} for rank, layers in factors}

    @cached_property
    def of_all_ranks(self) -> dict[int, float]:
        """One scale of each layer: ranks hold different heads, and for all it is the largest."""
        found: dict[int, float] = {}
        for layers in self.ranks.values():
            found |= {index: max(scale, found.get(index, scale)) for index, scale in layers.items()}
        return found


@dataclass(frozen=True)
class ScaleTensor:
    """One scale tensor of a file."""

    name: str
    parsed: ScaleName
    file: str
    dtype: str  # as safetensors names it: F32, BF16, ...
    shape: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class ScaleDirectory:
    """The scales of a directory, and all that its other files say about them."""

    path: Path
    config: dict[str, Any] | None
    modelopt: dict[str, Any] | None  # hf_quant_config.json
    index: dict[str, str] | None  # tensor name -> file
    files: list[str]  # safetensors files that are there
    tensors: list[ScaleTensor]  # of files that the index lists; without an index, of all
    json: ScalesJson | None
    modules: set[str]  # attention modules with a cache, by the names of their weights
    layers: set[int] = field(default_factory=set)  # of the weights, beside those modules
    misnamed: list[str] = field(default_factory=list)  # would be scales but for spaces or case
    offsets: list[str] = field(default_factory=list)  # zero points and such that are not 0
    # of files that the index does not list, which engines skip that read it
    unlisted: list[ScaleTensor] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """Files that the index names and that are not there."""
        return sorted({*(self.index or {}).values()} - {*self.files})

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of config.json: all of it, unless the model is multimodal."""
        config = self.config or {}
        nested = config.get("text_config")
        return nested if isinstance(nested, dict) else config

    @property
    def num_layers(self) -> Any:
        """What the config says, if it is no number too; None where it says nothing."""
        found = (self.text_config.get(key) for key in LAYER_KEYS)
        return next((count for count in found if count is not None), None)

    def guesses(self, layer: int | None) -> bool:
        """Whether a layer is one that guesses further tokens: they come after the model's own."""
        count, more = self.num_layers, self.text_config.get("num_nextn_predict_layers")
        known = type(count) is type(more) is type(layer) is int
        return known and count <= layer < count + more

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The quantization config, from where engines look for it, in their order."""
        config = self.config or {}
        found = [place.get("quantization_config") for place in (config, self.text_config)]
        found += [config.get("compression_config"), self.modelopt]
        return next((each for each in found if isinstance(each, dict)), None)

    @property
    def algorithms(self) -> dict[str, Any]:
        """The part of the quantization config with ModelOpt's words, nested or not."""
        config = self.quantization or {}
        nested = config.get("quantization")
        return nested if isinstance(nested, dict) else config


def open_scales(path: Path, *, or_statistics: bool = False) -> ScaleDirectory:
    """Read the scales of a directory; never read weights.

    Without a model or scales that is a NoModelError, if there are no statistics that would do.
    """
    if not path.is_dir():
        raise InputError(f"'{path}' is not a directory; give one that holds a model or its scales")
    if read_pack(path):
        _check_alone(path)
    index = read_index(path)
    # measurements of ours, which engines that read an index never see
    files = sorted({file.name for file in path.glob("*.safetensors")} - {STATS_FILE})
    if len(files) > _MAX_FILES:
        raise InputError(f"'{path}' holds {len(files):,} safetensors files, more than any model")
    listed = set(files if index is None else index.values())
    tensors, unlisted = list[ScaleTensor](), list[ScaleTensor]()
    names, offsets = {*(index or ())}, list[str]()
    for file in files:
        header = read_header(path / file)
        if file not in listed:
            unlisted += _scale_tensors(path / file, header)
            continue
        names.update(header)
        tensors += _scale_tensors(path / file, header)
        found_offsets = (name for name in header if is_offset(name))
        offsets += [name for name in found_offsets if not is_zero(path / file, header[name])]
    json = read_scales_json(path / JSON_FILE) if (path / JSON_FILE).exists() else None
    config = _optional(path / CONFIG_FILE)
    statistics = or_statistics and (path / STATS_FILE).is_file()
    if not (files or json or config or statistics):
        raise no_model(path, f"'{path}' holds no model: no config.json, no safetensors file")
    modelopt = _optional(path / MODELOPT_FILE)
    modules, misnamed = _attention_modules(names), sorted(filter(_is_misnamed, names))
    layers = _layers(names, modules)
    found = ScaleDirectory(
        path, config, modelopt, index, files, tensors, json, modules, layers, misnamed, offsets,
        unlisted,
    )  # fmt: skip
    modules.difference_update([m for m in modules if found.guesses(layer_of(m))])
    return found


def _check_alone(pack: Path) -> None:
    """Refuse weights in a pack: its manifest knows nothing of them, or of scales in them."""
    found = {file.name for file in pack.glob("*.safetensors")} - {STATS_FILE}
    found |= {name for name in (CONFIG_FILE, INDEX_FILE, MODELOPT_FILE) if (pack / name).exists()}
    if found:
        raise InputError(f"'{pack / min(found)}' is no file of a pack; move it out of '{pack}'")


def read_scales_json(path: Path) -> ScalesJson:
    """Read the file; an InputError if it holds no numbers by rank and layer."""
    try:
        return ScalesJson.model_validate(read_object(path))
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part)[:40] for part in first["loc"])
        raise InputError(f"'{path}': {at}: {first['msg']}; scales lie by rank and layer") from None


def _scale_tensors(path: Path, header: dict[str, Entry]) -> list[ScaleTensor]:
    found = []
    for name, entry in header.items():
        if parsed := parse_scale_name(name):
            values = tuple(read_values(path, entry))
            found.append(ScaleTensor(name, parsed, path.name, entry.dtype, entry.shape, values))
    return found


def _attention_modules(names: Collection[str]) -> set[str]:
    """Modules with K of their own, and those with queries alone that are called like them."""
    found, asking = (
        {match["module"] for name in names if (match := pattern.fullmatch(name))}
        for pattern in (_ATTENTION, _QUERY)
    )
    like = {pattern_of(module) for module in found}
    found |= {module for module in asking if pattern_of(module) in like}
    return {module for module in found if not is_of_senses(module)}


def _layers(names: Collection[str], modules: Collection[str]) -> set[int]:
    """The layers that have weights, of the stacks of layers that the modules are in."""
    stacks = {match[1] for module in modules if (match := _IN_STACK.match(module))}
    found = (match for name in names if not is_of_cache(name) and (match := _IN_STACK.match(name)))
    return {int(match[2]) for match in found if match[1] in stacks}


def _is_misnamed(name: str) -> bool:
    plain = "".join(name.split()).lower()
    return plain != name and not parse_scale_name(name) and parse_scale_name(plain) is not None


def read_index(path: Path) -> dict[str, str] | None:
    """File of each tensor, as the index says, none outside the directory; None without an index."""
    if not (path / INDEX_FILE).exists():
        return None
    weight_map = read_object(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"'{path / INDEX_FILE}' has no weight_map; download the model again")
    for file in sorted({str(file) for file in weight_map.values()}):
        if Path(file).name != file or file in {"", ".", ".."}:
            raise InputError(f"'{path / INDEX_FILE}' names '{file[:80]}', a file outside the directory")
    return {name: str(file) for name, file in weight_map.items()}


def _optional(path: Path) -> dict[str, Any] | None:
    return read_object(path) if path.exists() else None
