"""`fp8kv_stats.safetensors`: the statistics that travel with a checkpoint.

Tensors are named `<module>.<k|v|q>.<field>`, a field of `calib.scales.stats.TensorStats`; `latent`
and `k_pe` stand for `k` and `v` where these are cached (MLA). The header's metadata holds, as JSON,
of each module its layer index, the tokens it counted and those it read, which modules share
another's cache, numbers of the text and a record of it, and a SHA-256 of all tensors. Version 3
has `modalities`, and is written where pictures or sound were read.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from pydantic import BaseModel, Field, NonNegativeInt, TypeAdapter, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor

from calib.arguments import check_arguments, to_path
from calib.errors import InputError, NoModelError, NoScalesError, first_problem, one_line
from calib.files.atomic import save_tensors
from calib.files.cache_type import FP8_DIVISOR, FP8_MAX, nvfp4_convention
from calib.files.calibration import parse_report, statistics_file
from calib.files.names import CALIBRATION_FILE, STATS_FILE, TEXT_FILE, WATCH_FILE
from calib.files.pack import Pack, read_pack
from calib.files.safetensors_header import read_header
from calib.files.stored_scales import StoredLayer, read_scales
from calib.files.strict_json import json_text, parse_object
from calib.recipe import Recipe, load_recipe
from calib.scales.places import STATS_KEY, ModuleFacts
from calib.scales.scales import KVScales, SharedAttention
from calib.scales.stats import PER_TOKEN, STATISTICS, KVStats, LayerStats, TensorStats, derive_scales
from calib.scales.tail import are_ties
from calib.scales.text_summary import Records, TextSummary, read_records

_VERSIONS = (2, 3)
_LATENT_NAMES = {"k": "latent", "v": "k_pe", "q": "q"}
_OF_TOKENS = ("curve", "positions", "tail")  # whose largest is amax
# fields that a tensor has together, or not at all
_TOGETHER = (("total", "low", "high"), _OF_TOKENS)
# relative error of a stored scale
_ROUNDING = {"BF16": 2**-8, "F16": 2**-10}


@check_arguments
def save_stats(
    stats: KVStats, path: str | os.PathLike[str], *, progress: dict[str, Any] | None = None
) -> None:
    """Write `stats` to the safetensors file `path`, with the `progress` of a run that is not finished.

    Raises an InputError where it cannot be written.
    """
    path = to_path(path)
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"cannot write '{path}': it is a folder, or its folder is not there")
    tensors = {}
    for (name, letter, field), tensor in stats.tensors().items():
        part = _LATENT_NAMES[letter] if stats.layers[name].latent else letter
        tensors[f"{name}.{part}.{field}"] = tensor
    modules = {
        name: {"layer_idx": layer.layer_idx, "tokens": layer.tokens, "read": layer.tokens_read}
        | {x: [*getattr(layer, x)] for x in ("estimated", "unbounded") if layer.estimated}
        for name, layer in stats.layers.items()
    }
    shared = {name: asdict(module) for name, module in stats.shared.items()}
    # one key, because safetensors writes several in an order that changes from run to run
    version = 3 if any(place[2] == "modalities" for place in stats.tensors()) else 2
    facts = {"version": version, "modules": modules, "shared": shared, "progress": progress}
    facts["sha256"] = _digest(tensors)
    if stats.text:
        facts["text"] = TypeAdapter(TextSummary).dump_python(stats.text)
    save_tensors(tensors, path, {STATS_KEY: json_text(facts)})


@check_arguments
def load_stats(path: str | os.PathLike[str]) -> KVStats:
    """Read statistics from a safetensors file, or from the calibration directory that holds one.

    InputError where they are damaged, hold NaN or Inf, or are not those that the report beside
    them sums up.
    """
    return open_calibration(to_path(path), needs_report=False).stats


@check_arguments
def load_scales(directory: str | os.PathLike[str]) -> KVScales:
    """Derive the scales of a finished calibration from its statistics and its saved recipe.

    Raises as `load_stats` and `KVStats.scales` do, and an InputError where the directory has other scales.
    """
    calibration = open_calibration(to_path(directory), needs_report=False)
    _check_unchanged(calibration)
    return calibration.scales()


@dataclass(frozen=True)
class Calibration:
    """A finished calibration, or a pack of one, whose files were compared with its manifest."""

    path: Path  # its directory, or its statistics file
    report: dict[str, Any]  # empty: these are statistics alone
    pack: Pack | None

    @property
    def directory(self) -> Path:
        """The directory of all its files."""
        return self.path if self.path.is_dir() else self.path.parent

    def replace_stats(self, stats: KVStats) -> "Calibration":
        """Return this calibration with `stats` in place of those in its file."""
        calibration = replace(self)
        calibration.__dict__["stats"] = stats  # where the property below keeps them
        return calibration

    @cached_property
    def stats(self) -> KVStats:
        """The statistics, read when they are first asked for; an InputError as by `load_stats`."""
        file = statistics_file(self.path)
        advice = "watch the engine again" if (file.parent / WATCH_FILE).exists() else "calibrate again"
        stats, _ = load_progress(file, advice)
        for (name, letter, field), tensor in stats.tensors().items():
            if field == "amax" and not tensor.isfinite().all():
                raise InputError(f"'{file}': {name} {letter.upper()}: NaN or Inf was seen; {advice}")
        reported = {row["module"]: (row["k_amax"], row["v_amax"]) for row in self.report.get("layers", ())}
        amax = {name: (float(x.k.amax.max()), float(x.v.amax.max())) for name, x in stats.layers.items()}
        if self.report and reported != amax:
            raise InputError(
                f"the statistics in '{self.directory}' are not those that its {CALIBRATION_FILE} sums up; "
                "calibrate again"
            )
        return stats

    def recipe(self, settings: dict[str, Any] | None = None) -> Recipe:
        """Read the saved recipe, changed by `settings`."""
        return load_recipe(str(self.directory / CALIBRATION_FILE), settings)

    def scales(self) -> KVScales:
        """Derive the scales from the statistics and the saved recipe."""
        return derive_scales(self.stats, self.recipe())


def open_calibration(path: Path, *, needs_report: bool = True) -> Calibration:
    """Open a calibration by its directory or statistics file, and check the report and a pack's files.

    Statistics alone, without a report beside them, are enough unless it `needs_report`. Then scales will be
    made of them, and a directory is refused whose own scales were changed since.
    """
    directory = statistics_file(path).parent
    pack = read_pack(directory)
    has_report = needs_report or (directory / CALIBRATION_FILE).exists()
    calibration = Calibration(path, parse_report(directory, pack) if has_report else {}, pack)
    if needs_report:
        _check_unchanged(calibration)
    return calibration


def has_calibration(directory: Path) -> bool:
    """Return whether statistics and the report that sums them up lie in `directory`."""
    return (directory / STATS_FILE).exists() and (directory / CALIBRATION_FILE).exists()


def _check_unchanged(calibration: Calibration) -> None:
    """Refuse a directory whose scales, which somebody may have changed, are not those of its statistics."""
    if change := _describe_change(calibration):
        stats = quote(str(calibration.path / STATS_FILE))
        raise InputError(f"{change}; fp8kv apply {stats} MODEL -o OUTPUT writes the measured ones")


def change_warnings(directories: Iterable[Path]) -> list[str]:
    """Say which `directories` have scales that are not those of the calibration beside them."""
    calibrations = (open_calibration(x, needs_report=False) for x in directories if has_calibration(x))
    changes = filter(None, map(_describe_change, calibrations))
    return [f"{change}; the scales are taken as they are" for change in changes]


def _describe_change(calibration: Calibration) -> str:
    """Name scales that do not follow from the statistics beside them; "" where all do."""
    changed = [f"{letter}_scale of layer {layer}" for layer, letter in changed_scales(calibration)]
    if not changed:
        return ""
    names = ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
    return (
        f"'{calibration.path}': scales were changed ({names}), and are not what the statistics beside them "
        "give"
    )


def changed_scales(calibration: Calibration) -> list[tuple[int, str]]:
    """Return layer and letter of each scale in the directory that does not follow from its statistics."""
    if calibration.pack or not calibration.path.is_dir():
        return []
    try:
        stored = read_scales(calibration.path, strict=False)
    except (NoModelError, NoScalesError):  # format fp8kv
        return []
    scales = calibration.scales()
    layers = {layer.layer_idx: dict(layer.items()) for layer in scales.expand_shared().values()}
    convention = nvfp4_convention(stored.directory)
    factor = convention.divisor / FP8_DIVISOR if convention and convention.divisor else 1.0
    changed = []
    for layer in stored.layers:
        derived = layers.get(layer.layer, {})
        error = max([1e-4, *(_ROUNDING.get(tensor.dtype, 0.0) for tensor in layer.tensors)])
        is_one = layer.values("k") == layer.values("v")  # one scale for K and V
        for letter, own in derived.items():
            values = factor * torch.tensor(layer.values(letter))
            largest = torch.maximum(derived["k"].max(), derived["v"].max()) if is_one else own.max()
            forms = [x for x in (own.flatten(), own.max(), largest) if x.numel() in (1, len(values))]
            if len(values) and not any(torch.allclose(values, x, rtol=error, atol=0) for x in forms):
                changed.append((layer.layer, letter))
    return changed


def load_records(directory: Path) -> Records:
    """Read the records of the text behind the scales in `directory`, as far as it has any."""
    if (directory / STATS_FILE).exists():
        return load_stats(directory).records
    return read_records(directory / TEXT_FILE) if (directory / TEXT_FILE).exists() else (None,)


def smallest_scales(stats: KVStats) -> list[StoredLayer]:
    """Return scales per head that hold the largest values in E4M3, unrounded and without headroom.

    Where an engine's cache does not tell these, there are none.
    """
    layers = []
    for layer in stats.layers.values():
        k, v = (
            () if letter in layer.unbounded else tuple((part.amax.amax(1) / FP8_MAX["e4m3fn"]).tolist())
            for letter, part in (("k", layer.k), ("v", layer.v))
        )
        layers.append(StoredLayer(layer.layer_idx, k, v))
    return layers


def load_progress(path: Path, advice: str = "calibrate again") -> tuple[KVStats, dict[str, Any]]:
    """Read statistics and the `progress` saved with them; an InputError with `advice` for a damaged file."""
    read_header(path, advice)  # which tells plainly what is wrong
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
    except SafetensorError as error:
        raise InputError(f"'{path}' is damaged ({one_line(error)}); {advice}") from None
    text = metadata.get(STATS_KEY, "{}")
    version = parse_object(text.encode(), f"the metadata of '{path}'").get("version")
    if type(version) is not int or version not in _VERSIONS:
        raise InputError(f"'{path}' is not a {STATS_FILE} of a version that this fp8kv reads: 2 or 3")
    try:
        facts = _StatsFacts.model_validate_json(text, strict=True)
        whole = dict(tensors)
        layers = {name: _take_layer(tensors, name, module) for name, module in facts.modules.items()}
        if tensors:
            raise ValueError(f"no module has the tensor {min(tensors)[:80]}")
        if facts.sha256 != _digest(whole):
            raise ValueError("its values are not those that were written")
    except ValueError as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else one_line(error)
        raise InputError(f"'{path}' is damaged ({problem}); {advice}") from None
    progress = facts.progress.model_dump() if facts.progress else {}
    return KVStats(layers, facts.shared, facts.text), progress


def _digest(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of all names and values."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].numpy().tobytes())
    return total.hexdigest()


class _Progress(BaseModel):
    run: dict[str, Any]
    batches: NonNegativeInt


class _StatsFacts(BaseModel):
    modules: dict[str, ModuleFacts] = Field(min_length=1)
    shared: dict[str, SharedAttention]
    progress: _Progress | None = None
    text: TextSummary | None = None
    sha256: str

    @model_validator(mode="after")
    def _check_facts(self) -> "_StatsFacts":
        for module in self.shared.values():
            if module.owner not in self.modules:
                raise ValueError(f"no module is called '{module.owner[:80]}', whose cache is shared")
        if text := self.text:
            parts = text.samples, text.unrepeated_tokens, text.distinct_tokens, text.unknown_tokens or 0
            if max(parts) > text.tokens or (text.words is None) != (text.word_tokens is None):
                raise ValueError("text: a part is more than the whole")
        return self


def _take_layer(tensors: dict[str, Tensor], name: str, facts: ModuleFacts) -> LayerStats:
    """Remove the tensors of the module `name` from `tensors`; a ValueError if they are damaged."""
    latent = f"{name}.latent.amax" in tensors
    k, v = (_take_part(tensors, f"{name}.{_LATENT_NAMES[x] if latent else x}") for x in "kv")
    q = _take_part(tensors, f"{name}.q") if f"{name}.q.amax" in tensors else None
    # an earlier plugin did not tell which are unbounded
    marks = tuple(facts.estimated), tuple(facts.estimated if facts.unbounded is None else facts.unbounded)
    layer = LayerStats(facts.layer_idx, facts.tokens, k, v, q, latent, facts.read, *marks)
    for part in (layer.k, layer.v):
        if part.ties is not None and not are_ties(part.ties, part.amax.amax(1), layer.tokens):
            raise ValueError(f"{name}: the ties are not of its largest tokens")
    if len(layer.k.amax) != len(layer.v.amax):
        raise ValueError(f"{name} has other heads in K than in V")
    if (layer.q and layer.q.curve is not None) or (layer.k.curve is None) != (layer.v.curve is None):
        raise ValueError(f"{name} needs {', '.join(PER_TOKEN)} of K and V alone, or none")
    if latent and len(layer.k.amax) != 1:
        raise ValueError(f"{name} has {len(layer.k.amax)} heads, a latent has one")
    return layer


def _take_part(tensors: dict[str, Tensor], name: str) -> TensorStats:
    """Remove the fields of K, V or Q from `tensors`; a ValueError if they are damaged."""
    fields = {x: tensors.pop(f"{name}.{x}") for x in STATISTICS if f"{name}.{x}" in tensors}
    amax = fields.get("amax")
    if amax is None or amax.dim() != 2 or not amax.numel():
        raise ValueError(f"{name}.amax must be there, [heads, channels]")
    for field, tensor in fields.items():
        statistic = STATISTICS[field]
        shape = (len(amax), statistic.columns or amax.shape[1])
        if (tensor.dtype, tensor.shape) != (statistic.dtype, shape):
            actual = f"{tensor.dtype} {[*tensor.shape]}"
            raise ValueError(f"{name}.{field} is {actual}, not {statistic.dtype} {[*shape]}")
        if field in ("amax", "least", "modalities", *PER_TOKEN) and (tensor < 0).any():
            raise ValueError(f"{name}.{field} is below zero")
        if field in ("modalities", *_OF_TOKENS) and not torch.allclose(
            tensor.amax(1), amax.amax(1), rtol=0, atol=0, equal_nan=True
        ):
            raise ValueError(f"{name}: the largest of {field} is not the amax of its head")
        if field == "least" and (tensor > amax.amax(1, keepdim=True)).any():
            raise ValueError(f"{name}.least is above the amax of its head")
        if field == "tail" and (tensor.diff(dim=1) > 0).any():
            raise ValueError(f"{name}.tail is not in descending order")
    for group in _TOGETHER:
        if 0 < len(fields.keys() & set(group)) < len(group):
            raise ValueError(f"{name} needs {', '.join(group)}, or none of them")
    return TensorStats(**fields)
