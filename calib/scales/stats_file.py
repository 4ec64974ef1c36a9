"""`fp8kv_stats.safetensors`: the statistics that travel with a checkpoint.

Tensors are named `<module>.<k|v|q>.<field>`, a field of `calib.scales.stats.TensorStats`; `latent`
and `k_pe` stand for `k` and `v` where these are cached (MLA). The header's metadata holds, as JSON,
of each module its layer index, the tokens it counted and those it read, which modules share
another's cache, numbers of the text and a record of it. Version 1 has no `curve`, `positions`,
`tail` and `read`.
"""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor

from calib.arguments import check_arguments, to_path
from calib.errors import InputError
from calib.files.atomic import save_tensors
from calib.files.calibration import read_report, statistics_file
from calib.files.names import CALIBRATION_FILE, STATS_FILE
from calib.files.strict_json import json_text, parse_object, regular_size
from calib.scales.observers import NUM_BINS
from calib.scales.places import BUCKETS, POSITION_BUCKETS
from calib.scales.scales import SharedAttention
from calib.scales.stats import PER_TOKEN, STATISTICS, KVStats, LayerStats, TensorStats
from calib.scales.tail import TAIL
from calib.scales.text_record import TextRecord
from calib.scales.text_summary import SKETCH_BITS, TextSummary

_KEY = "fp8kv_stats"
_VERSION = 2
_MOST_TOKENS = 2 ** (BUCKETS - 1)
_PER_TOKEN = "curve, positions and tail"
_COLUMNS = {
    "histogram": NUM_BINS,
    "curve": BUCKETS,
    "positions": POSITION_BUCKETS,
    "tail": TAIL,
}


@check_arguments
def save_stats(
    stats: KVStats, path: str | os.PathLike[str], *, progress: dict[str, Any] | None = None
) -> None:
    """Write `stats` to the file `path`; `progress` says how far a run has come that goes on."""
    path = to_path(path)
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"cannot write '{path}': it is a folder, or its folder is not there")
    tensors = {
        f"{name}.{_called(which, stats.layers[name].latent)}.{field}": tensor
        for (name, which, field), tensor in stats.tensors().items()
    }
    modules = {
        name: {"layer_idx": layer.layer_idx, "tokens": layer.tokens, "read": layer.tokens_read}
        for name, layer in stats.layers.items()
    }
    shared = {name: asdict(module) for name, module in stats.shared.items()}
    # one key, because safetensors writes several in an order that changes from run to run
    facts = {"version": _VERSION, "modules": modules, "shared": shared, "progress": progress}
    if text := stats.text:
        facts["text"] = text.to_json() | {
            "sketch": f"{text.sketch:0{SKETCH_BITS // 4}x}",
            "records": text.records and [record.model_dump() for record in text.records],
        }
    save_tensors(tensors, path, {_KEY: json_text(facts)})


@check_arguments
def load_stats(path: str | os.PathLike[str]) -> KVStats:
    """Read statistics from a file, or from the calibration directory that holds one.

    InputError where they are damaged, hold NaN or Inf, or are not those that the report beside
    them sums up.
    """
    file = statistics_file(to_path(path))
    stats, _ = load_progress(file)
    for (name, which, field), tensor in stats.tensors().items():
        if field == "amax" and not tensor.isfinite().all():
            raise InputError(f"'{file}': {name} {which.upper()}: NaN or Inf was seen; calibrate again")
    if (file.parent / CALIBRATION_FILE).exists():
        rows = read_report(file.parent)["layers"]
        said = {row["module"]: (row["k_amax"], row["v_amax"]) for row in rows}
        layers = stats.layers.items()
        if said != {name: (float(x.k.amax.max()), float(x.v.amax.max())) for name, x in layers}:
            raise InputError(
                f"the statistics in '{file.parent}' are not those that its {CALIBRATION_FILE} sums "
                "up; calibrate again"
            )
    return stats


def load_progress(path: Path) -> tuple[KVStats, dict[str, Any]]:
    """Read statistics and the `progress` saved with them; an InputError for a damaged file."""
    regular_size(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read statistics '{path}': {error}") from None
    facts = _facts(metadata.get(_KEY, "{}"), f"'{path}'")
    layers = {name: _layer(name, m, tensors, f"'{path}'") for name, m in facts.modules.items()}
    if tensors:
        raise _damaged(f"'{path}'", f"no module has the tensor {min(tensors)[:80]}")
    shared = {name: SharedAttention(m.layer_idx, m.owner) for name, m in facts.shared.items()}
    text = facts.text.summary() if facts.text else None
    return KVStats(layers, shared, text), facts.progress.model_dump() if facts.progress else {}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Module(_Strict):
    layer_idx: int = Field(ge=0)
    # the buckets of `curve` have room for two such runs, one after the other
    tokens: int = Field(ge=1, lt=_MOST_TOKENS)
    read: int | None = Field(None, lt=_MOST_TOKENS)

    @model_validator(mode="after")
    def _counted_tokens_were_read(self) -> "_Module":
        if self.read is not None and self.read < self.tokens:
            raise ValueError(f"{self.tokens} tokens counted and {self.read} read")
        return self


class _Shared(_Strict):
    layer_idx: int = Field(ge=0)
    owner: str


class _Progress(_Strict):
    run: dict[str, Any]
    batches: int = Field(ge=0)


class _Text(_Strict):
    samples: int = Field(ge=1)
    tokens: int = Field(ge=1)
    unrepeated_tokens: int = Field(ge=1)
    distinct_tokens: int = Field(ge=1)
    unknown_tokens: int | None = Field(ge=0)
    words: int | None = Field(ge=0)
    word_tokens: int | None = Field(ge=0)
    sketch: str = Field(pattern=rf"^[0-9a-f]{{{SKETCH_BITS // 4}}}$")
    records: list[TextRecord] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _parts_are_of_the_tokens(self) -> "_Text":
        parts = self.unrepeated_tokens, self.distinct_tokens, self.unknown_tokens or 0, self.samples
        if max(parts) > self.tokens or (self.words is None) != (self.word_tokens is None):
            raise ValueError("a part is more than the whole")
        return self

    def summary(self) -> TextSummary:
        read = {"sketch": int(self.sketch, 16), "records": self.records and (*self.records,)}
        return TextSummary(**self.model_dump() | read)


class _Facts(_Strict):
    modules: dict[str, _Module] = Field(min_length=1)
    shared: dict[str, _Shared]
    progress: _Progress | None = None
    text: _Text | None = None

    @model_validator(mode="after")
    def _owners_are_modules(self) -> "_Facts":
        for owner in (module.owner for module in self.shared.values()):
            if owner not in self.modules:
                raise ValueError(f"no module is called '{owner[:80]}', whose cache is shared")
        return self


def _facts(text: str, where: str) -> _Facts:
    document = parse_object(text.encode(), f"the metadata of {where}")
    if type(document.get("version")) is not int or document["version"] not in (1, _VERSION):
        raise InputError(f"{where} is not a {STATS_FILE} of a version that this fp8kv reads, 1 or {_VERSION}")
    try:
        return _Facts.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])[:200]
        raise _damaged(where, f"{place}: {first['msg']}") from None


def _layer(name: str, facts: _Module, tensors: dict[str, Tensor], where: str) -> LayerStats:
    """Take the tensors of one module out of `tensors`."""

    latent = f"{name}.latent.amax" in tensors

    def read(letter: str) -> TensorStats:
        which = _called(letter, latent)
        found = {field: tensors.pop(f"{name}.{which}.{field}", None) for field in STATISTICS}
        amax = found["amax"]
        if amax is None or amax.dim() != 2 or not amax.numel():
            raise _damaged(where, f"{name}.{which}.amax must be there, [heads, channels]")
        if (amax < 0).any():
            raise _damaged(where, f"{name}.{which}.amax is below zero")
        for field, tensor in found.items():
            shape = (len(amax), _COLUMNS.get(field, amax.shape[1]))
            dtype = STATISTICS[field].dtype
            if tensor is not None and (tensor.dtype, tensor.shape) != (dtype, shape):
                got = f"{tensor.dtype} {[*tensor.shape]}"
                raise _damaged(where, f"{name}.{which}.{field} is {got}, not {dtype} {[*shape]}")
        if len({found[field] is None for field in ("total", "low", "high")}) > 1:
            raise _damaged(where, f"{name}.{which} needs total, low and high, or none of them")
        if problem := _misplaced(amax, [found[field] for field in PER_TOKEN]):
            raise _damaged(where, f"{name}.{which}: {problem}")
        return TensorStats(**found)  # type: ignore[arg-type]

    parts = (read("k"), read("v"), read("q"))
    layer = LayerStats(facts.layer_idx, facts.tokens, *parts, latent, facts.read)
    if len(layer.k.amax) != len(layer.v.amax):
        raise _damaged(where, f"{name} has other heads in K than in V")
    if layer.q.curve is not None or (layer.k.curve is None) != (layer.v.curve is None):
        raise _damaged(where, f"{name} needs {_PER_TOKEN} of K and V alone, or none")
    if layer.latent and len(layer.k.amax) != 1:
        raise _damaged(where, f"{name} has {len(layer.k.amax)} heads, a latent has one")
    return layer


def _misplaced(amax: Tensor, places: list[Tensor | None]) -> str | None:
    """What is wrong with the largest magnitudes by place, which are those of `amax` together."""
    held = [each for each in places if each is not None]
    if 0 < len(held) < len(PER_TOKEN):
        return f"needs {_PER_TOKEN}, or none of them"
    for field, largest in zip(PER_TOKEN, held, strict=False):
        if (largest < 0).any():
            return f"{field} is below zero"
        both = (largest.amax(1), amax.amax(1))
        if not torch.allclose(*both, rtol=0, atol=0, equal_nan=True):
            return f"the largest of {field} is not the amax of its head"
        if field == "tail" and (largest.diff(dim=1) > 0).any():
            return "tail is not in descending order"
    return None


def _called(letter: str, latent: bool) -> str:
    """What K, V and Q are called in the file."""
    return {"k": "latent", "v": "k_pe"}.get(letter, letter) if latent else letter


def _damaged(where: str, problem: str) -> InputError:
    return InputError(f"{where} is damaged ({' '.join(problem.split())}); calibrate again")
