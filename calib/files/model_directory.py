"""A model directory, opened and checked: config.json, the index, and safetensors files."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from calib.errors import InputError, UnsupportedExportError
from calib.files.calibration import missing_model_error
from calib.files.config import LAYER_KEYS, Config, caches_latents, quantization_configs, text_config
from calib.files.names import (
    CALIBRATION_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    JSON_FILE,
    MODELOPT_FILE,
    SCALES_SHARD,
    SINGLE_FILE,
    STATS_FILE,
    attention_modules,
    is_misnamed,
    is_misspelt,
    is_of_cache,
    is_of_tower,
    is_offset,
    layer_of,
    matches_in_stacks,
    way_back,
)
from calib.files.pack import read_pack
from calib.files.safetensors_header import Entry, is_zero, read_header
from calib.files.scale_files import ScalesJson, ScaleTensor, read_scale_tensors, read_scales_json
from calib.files.strict_json import read_object, read_optional

_MAX_FILES = 100_000
_PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
# `layers`, the index and the attention module itself, with which the names of one module end
_MODULE_PARTS = 3
_DECODER = re.compile(r"(?:.+\.)?(?:layers?|h|blocks)\.")  # what stacks of decoders are called
# layers after the model's own that predict extra tokens (MTP) have these beside what all have
_EXTRA_TOKENS = re.compile(r"(?:eh_proj|enorm|hnorm|shared_head)\b")
_STACK_OF_DRAFT = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.")  # or such layers have a stack of their own

FileState = tuple[int, int, int]  # inode, bytes, nanoseconds of the last change


@dataclass(frozen=True)
class ModelDirectory:
    """A local directory with a model in Hugging Face layout, or with scales alone."""

    path: Path
    config: dict[str, Any]  # empty without config.json
    headers: dict[str, dict[str, Entry]]  # by safetensors file, its tensors by name
    states: dict[str, FileState] = field(default_factory=dict)  # by file, when it was opened
    index: dict[str, str] | None = None  # tensor name -> file name
    has_config: bool = True
    name: str = ""  # of the model, on the Hub or built in; in messages

    @property
    def shards(self) -> list[str]:
        """Names of the safetensors files, sorted."""
        return sorted(self.headers)

    @property
    def indexed_shards(self) -> list[str]:
        """Names of the files that the index lists; without an index, of all."""
        listed = self.headers if self.index is None else {*self.index.values()}
        return [shard for shard in self.shards if shard in listed]

    @property
    def missing(self) -> list[str]:
        """Files that the index names and that are not there."""
        return sorted({*(self.index or {}).values()} - self.headers.keys())

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """The file of each tensor of the indexed files."""
        return {name: shard for shard in self.indexed_shards for name in sorted(self.headers[shard])}

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Type, shape and place of each tensor of the indexed files."""
        return {n: entry for shard in self.indexed_shards for n, entry in self.headers[shard].items()}

    @property
    def text_config(self) -> Config:
        """The language model's part of the config: all of it, unless the model is multimodal."""
        return text_config(self.config)

    @property
    def caches_latents(self) -> bool:
        """Return whether layers cache a latent instead of K and V per head (MLA), by the config."""
        return caches_latents(self.text_config)

    @property
    def num_layers(self) -> int | None:
        """The number of layers of the language model, where its config has one."""
        numbers = (self.text_config.get(key) for key in LAYER_KEYS)
        return next((number for number in numbers if type(number) is int), None)

    def predicts_extra_tokens(self, layer: int | None) -> bool:
        """Return whether a layer is for multi-token prediction (MTP), after the model's own layers."""
        count, extra = self.num_layers, self.text_config.get("num_nextn_predict_layers")
        if count is None or layer is None or type(extra) is not int:
            return False
        return count <= layer < count + extra

    def is_of_draft(self, name: str) -> bool:
        """Return whether a tensor or module is of a layer that predicts extra tokens (MTP)."""
        return bool(_STACK_OF_DRAFT.search(name)) or self.predicts_extra_tokens(layer_of(name))

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The quantization config, from where engines look for it, in their order."""
        configs = (config for _, config in quantization_configs(self.config))
        return next((config for config in configs if isinstance(config, dict)), self.modelopt)

    @property
    def producer(self) -> dict[str, Any]:
        """The tool that wrote the quantization config, with its version, where that says so."""
        producer = (self.quantization or {}).get("producer")
        return producer if isinstance(producer, dict) else {}

    @property
    def algorithms(self) -> dict[str, Any]:
        """The part of the quantization config with ModelOpt's words, nested or not."""
        config = self.quantization or {}
        nested = config.get("quantization")
        return nested if isinstance(nested, dict) else config

    @cached_property
    def modelopt(self) -> dict[str, Any] | None:
        """The document hf_quant_config.json of ModelOpt."""
        return read_optional(self.path / MODELOPT_FILE)

    @cached_property
    def json(self) -> ScalesJson | None:
        """The scales in kv_cache_scales.json."""
        file = self.path / JSON_FILE
        return read_scales_json(file) if file.exists() else None

    @cached_property
    def tensors(self) -> list[ScaleTensor]:
        """The scale tensors of the indexed files, but those of drafts."""
        return [x for x in self._scale_tensors(self.indexed_shards) if not self.is_of_draft(x.name)]

    @cached_property
    def draft_tensors(self) -> list[ScaleTensor]:
        """The scale tensors of layers that predict extra tokens (MTP), of the indexed files."""
        return [x for x in self._scale_tensors(self.indexed_shards) if self.is_of_draft(x.name)]

    @cached_property
    def unlisted(self) -> list[ScaleTensor]:
        """The scale tensors of files beside the index, which engines skip that read it."""
        return self._scale_tensors(sorted({*self.shards} - {*self.indexed_shards}))

    def _scale_tensors(self, shards: list[str]) -> list[ScaleTensor]:
        files = ((self.path / shard, self.headers[shard]) for shard in shards)
        return [tensor for file, header in files for tensor in read_scale_tensors(file, header)]

    @cached_property
    def offsets(self) -> list[str]:
        """Names of zero points, and of what is subtracted from K or V, that are not 0."""
        offsets = {name: entry for name, entry in self.entries.items() if is_offset(name)}
        return [n for n, entry in offsets.items() if not is_zero(self.path / self.weight_map[n], entry)]

    @cached_property
    def modules(self) -> set[str]:
        """Attention modules with a cache, by the names of their weights; those of drafts are out."""
        return {module for module in attention_modules(self._names) if not self.is_of_draft(module)}

    @cached_property
    def draft_modules(self) -> list[str]:
        """Attention modules of layers that predict extra tokens (MTP), sorted."""
        return sorted(filter(self.is_of_draft, attention_modules(self._names)))

    @cached_property
    def layers(self) -> set[int]:
        """Layers with weights, of the stacks that the attention modules are in."""
        stacks = {match["stack"] for match in matches_in_stacks(self.modules)}
        return {int(match["layer"]) for match in matches_in_stacks(self._names) if match["stack"] in stacks}

    @property
    def misnamed(self) -> list[str]:
        """Tensors that are meant as scales, and have no name of one; in our own file of scales all are."""
        files = {**(self.index or {}), **self.weight_map}
        strays = {name for name, file in files.items() if file == SCALES_SHARD and not is_of_cache(name)}
        strays |= {*filter(is_misnamed, files)}
        if "auto_map" not in self.config:  # a model's own code may have parameters of any name
            strays |= {*filter(is_misspelt, files)}
        return sorted(strays)

    @property
    def _names(self) -> set[str]:
        return {*(self.index or ()), *self.weight_map}

    def attention_prefix(self, module: str) -> str:
        """Return the prefix of an attention module's tensors in the checkpoint.

        The two differ where transformers renames on load: `model.language_model.layers.0.self_attn`
        for `language_model.model.layers.0.self_attn`. The prefix must end as the module does and share
        the most name parts with it. Towers for images and sound, whose layers may end so too, are out.
        """
        if module in self._prefixes:
            return module
        parts, scores = module.split("."), dict[str, tuple[int, int]]()
        for prefix in (prefix for prefix in self._prefixes if not is_of_tower(prefix)):
            own = prefix.split(".")
            pairs = zip(reversed(parts), reversed(own), strict=False)
            ending = [*takewhile(lambda pair: pair[0] == pair[1], pairs)]
            scores[prefix] = len(ending), len({*parts} & {*own})
        best = max(scores.values(), default=(0, 0))
        names = [prefix for prefix, likeness in scores.items() if likeness == best]
        if best[0] < _MODULE_PARTS or len(names) > 1:
            why = f"{names[0]} and {names[1]} both may" if best[0] >= _MODULE_PARTS else "no names end so"
            raise UnsupportedExportError(
                f"cannot tell which tensors of '{self.path}' belong to {module}: {why}; use --format fp8kv"
            )
        return names[0]

    @cached_property
    def _prefixes(self) -> list[str]:
        # k_proj.weight and the like: the attention module is two levels above the tensor
        names = (name for name in self.weight_map if name.count(".") >= _MODULE_PARTS)
        return sorted({name.rsplit(".", 2)[0] for name in names})

    def sizes_and_times(self) -> dict[str, list[int]]:
        """Return bytes and nanoseconds of the last change of each weight file, by name."""
        return {shard: [size, changed] for shard, (_, size, changed) in self.states.items()}

    def check_unchanged(self) -> None:
        """Check that the weight files are those that were opened: scales fit no others."""
        for shard, state in self.states.items():
            if not (self.path / shard).exists() or _state(self.path / shard) != state:
                problem = f"'{self.path / shard}' has changed since it was opened, so nothing was written"
                raise InputError(f"{problem}; run again once the model is complete")


def open_model_directory(
    path: Path, *, weights: bool = True, or_statistics: bool = False, needs_scales: bool = True
) -> ModelDirectory:
    """Open a model directory. Only scales' values are read.

    Its weight files must be whole and where the index says, except for scales unless it `needs_scales`.
    Refuses pickles, files outside the directory, two models in one, a tensor twice, and a config of
    another number of layers.

    With `weights` false, a directory of scales alone will do, whichever tool wrote it: every
    safetensors file is read, whatever the index says. An empty directory is a NoModelError; with
    `or_statistics`, statistics of a calibration alone will do.
    """
    if not path.is_dir():
        contents = "a model" if weights else "a model or its scales"
        raise InputError(f"'{path}' is not a directory; give one that holds {contents}")
    if not weights and read_pack(path):
        # weights in a pack: its manifest knows nothing of them, or of scales in them
        names = {file.name for file in path.glob("*.safetensors")} - {STATS_FILE}
        names |= {name for name in (CONFIG_FILE, INDEX_FILE, MODELOPT_FILE) if (path / name).exists()}
        if names:
            raise InputError(f"'{path / min(names)}' is not a file of a pack; move it out of '{path}'")
    config = read_optional(path / CONFIG_FILE)
    if weights and config is None:
        raise missing_model_error(path, f"'{path}' has no {CONFIG_FILE}: it is not a model directory")
    index = read_index(path)
    # statistics are ours, and engines that read an index never see them
    files = sorted({file.name for file in path.glob("*.safetensors")} - {STATS_FILE})
    if weights:
        files = _weight_files(path, index, needs_scales)
    elif len(files) > _MAX_FILES:
        raise InputError(f"'{path}' holds {len(files):,} safetensors files, more than any model")
    headers = {file: read_header(path / file) for file in files}
    states = {file: _state(path / file) for file in files}
    directory = ModelDirectory(path, config or {}, headers, states, index, config is not None)
    if weights:
        _check_weights(directory, needs_scales)
    elif not (files or config or directory.json or (or_statistics and (path / STATS_FILE).is_file())):
        raise missing_model_error(path, f"'{path}' holds no model: no config.json, no safetensors file")
    else:
        # damaged values and documents are refused now, not when they are needed
        _ = directory.tensors, directory.unlisted, directory.offsets, directory.json, directory.modelopt
    return directory


def read_index(path: Path) -> dict[str, str] | None:
    """Read which file holds each tensor; None without an index. Refuse files outside of the directory."""
    if not (path / INDEX_FILE).exists():
        return None
    weight_map = read_object(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"'{path / INDEX_FILE}' has no weight_map; download the model again")
    for file in sorted({str(file) for file in weight_map.values()}):
        if Path(file).name != file or file in {"", ".", ".."}:
            raise InputError(f"'{path / INDEX_FILE}' names '{file[:80]}', a file outside the directory")
    return {name: str(file) for name, file in weight_map.items()}


def check_model_type(path: Path, config: dict[str, Any]) -> None:
    """Refuse the config.json of `path` if a model_type in it is not a name; it may have none."""
    for part in (config, text_config(config)):
        value = part.get("model_type")
        if value is not None and not (isinstance(value, str) and value):
            problem = (
                f"the config of '{path}' has model_type {value!r:.40}; it must be a name such as 'llama'"
            )
            raise InputError(f"{problem}: correct it, or download the model again")


def check_layers(path: Path, config: dict[str, Any], names: Iterable[str]) -> None:
    """Refuse a config.json in `path` of another number of layers than weights called `names` have.

    Towers and other stacks may have any number, if one stack has that of the config.
    """
    text = text_config(config)
    key = next((key for key in LAYER_KEYS if type(text.get(key)) is int), None)
    if key is None or text[key] < 1 or "num_layers_per_stack" in text:  # whose layers run several times
        return
    weights = [match for match in matches_in_stacks(names) if not is_of_tower(match["stack"])]
    predicting = {weight.group("stack", "layer") for weight in weights if _EXTRA_TOKENS.match(weight["rest"])}
    numbers = Counter[str]()
    for stack, layer in {weight.group("stack", "layer") for weight in weights} - predicting:
        numbers[stack] = max(numbers[stack], int(layer) + 1)
    sizes = Counter(weight["stack"] for weight in weights)
    largest = next((stack for stack, _ in sizes.most_common() if _DECODER.fullmatch(stack)), None)
    if largest is not None and text[key] not in numbers.values():
        raise InputError(
            f"config.json of '{path}' says {key} {text[key]}, but the weights have "
            f"{numbers[largest]} layers; download the model again"
        )


def _weight_files(path: Path, index: dict[str, str] | None, needs_scales: bool) -> list[str]:
    """Return a whole model's files, sorted; unless it `needs_scales`, those of scales may be missing."""
    if index == {}:
        raise InputError(f"'{path / INDEX_FILE}' has no weight_map; download the model again")
    shards = sorted({*(index or {}).values()})
    if not needs_scales:
        with_weights = {shard for name, shard in (index or {}).items() if not is_of_cache(name)}
        shards = [shard for shard in shards if shard in with_weights or (path / shard).exists()]
    missing = [shard for shard in shards if not (path / shard).exists()]
    if missing:
        advice = way_back(missing[0], is_missing=True)
        if (path / CALIBRATION_FILE).exists() and missing[0] != SCALES_SHARD:
            advice = (
                "put the source's weight files beside these (--weights none leaves them out), "
                "or give the source"
            )
        raise InputError(f"'{path / INDEX_FILE}' names '{missing[0]}', which is missing; {advice}")
    has_single = (path / SINGLE_FILE).exists()
    if not (shards or has_single):
        problem = f"'{path}' holds no {SINGLE_FILE} and no {INDEX_FILE}"
        if index:
            problem = (
                f"'{path / INDEX_FILE}' names scales alone, which are missing, and '{path}' holds no "
                f"{SINGLE_FILE}; download the model again"
            )
        if pickles := sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES):
            problem = (
                f"'{path}' holds pickled weights ({pickles[0]}), which can run code when opened; "
                "convert them to safetensors first"
            )
        raise InputError(problem)
    if has_single and shards and {*shards} - {SCALES_SHARD} != {SINGLE_FILE}:
        # transformers reads the one, engines the others
        raise InputError(
            f"'{path}' holds {SINGLE_FILE} and {INDEX_FILE}, which names other files; "
            "take away whichever is not the model"
        )
    return shards or [SINGLE_FILE]


def _check_weights(directory: ModelDirectory, needs_scales: bool) -> None:
    path, weight_map = directory.path, directory.weight_map
    check_model_type(path, directory.config)
    for place, config in quantization_configs(directory.config):
        if not isinstance(config, dict):
            kind = type(config).__name__
            raise InputError(f"'{path / CONFIG_FILE}' must hold a JSON object as {place}, got {kind}")
    for shard, header in directory.headers.items():
        for name in header:
            if weight_map[name] != shard:
                problem = f"'{path}' holds '{name}' in {shard} and in {weight_map[name]}"
                raise InputError(f"{problem}; remove the one that is not the model's")
    for name, shard in (directory.index or {}).items():
        is_optional = not needs_scales and name not in weight_map and is_of_cache(name)
        if weight_map.get(name) != shard and not is_optional:
            raise InputError(
                f"'{path / INDEX_FILE}' says '{name}' is in '{shard}', but it is not; {way_back(shard)}"
            )
    check_layers(path, directory.config, weight_map)


def _state(file: Path) -> FileState:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
