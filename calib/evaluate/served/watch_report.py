"""What an engine's cache held, as the plugin wrote it: which layers clip, beside what was expected."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from calib.errors import Fp8kvError, InputError, first_problem
from calib.files.cache_type import FP8_MAX
from calib.files.calibration import statistics_file
from calib.files.model_directory import open_model_directory
from calib.files.names import WATCH_FILE
from calib.files.strict_json import read_object
from calib.files.text import Condition, show_layers
from calib.same_model.check import (
    LayerFacts,
    ModelFacts,
    check_same_model,
    compare_weights,
    directory_facts,
    model_facts,
)
from calib.scales.cache_counts import code_table
from calib.scales.scales import KVScales
from calib.scales.stats import KVStats, derive_scales
from calib.scales.stats_file import open_calibration
from calib.scales.tail import ROUNDING, TAIL, poisson_interval
from fp8kv_runtime.fp8 import FP8_DTYPES

METRICS = ("clipped", "zero")
_TIMES = 2.0  # what was expected: that is more than another text of the same kind has
_ROUNDING = 2**-8  # of scales that files hold in bfloat16
_SHOWN = 3  # rows that a failure names
FEW = 256  # tokens, of which nothing can be said

_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Positive = Annotated[int, Field(ge=1, lt=2**53)]


Expected = Mapping[tuple[int, str], float]  # share of tokens in the last code, by layer, of K and V


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Counts(_Part):
    """Counts of K or V, of each head."""

    tokens: list[_Positive] = Field(min_length=1)
    clipped: list[_Count]  # tokens
    saturated: list[_Count]  # values
    zero: list[_Count]
    # the magnitude from which a value has the last code
    limit: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None

    @model_validator(mode="after")
    def _check_heads(self) -> "_Counts":
        lists = (self.tokens, self.clipped, self.saturated, self.zero, self.limit or self.tokens)
        if len({*map(len, lists)}) > 1:
            raise ValueError("counts are of different heads")
        if any(part > whole for part, whole in zip(self.clipped, self.tokens, strict=True)):
            raise ValueError("more tokens are clipped than were counted")
        return self


class _Layer(_Part):
    layer: _Count
    channels: _Positive
    tokens: _Positive
    # the magnitude, over the scale, from which the engine's FP8 type and kernels have the last code
    edge: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    k: _Counts | None = None  # none: a cache in 16 bits
    v: _Counts | None = None

    @model_validator(mode="after")
    def _check_values(self) -> "_Layer":
        for counts in filter(None, (self.k, self.v)):
            for values in (counts.zero, counts.saturated):
                if any(x > n * self.channels for x, n in zip(values, counts.tokens, strict=True)):
                    raise ValueError("more values are zero or saturated than were counted")
        return self


class Watched(_Part):
    """The document that the plugin writes."""

    fp8kv_watch: Literal[1]
    engine: str
    model: str = Field(min_length=1, max_length=4096)
    fingerprint: str
    since: str
    written: str
    tokens: _Count  # of the traffic; a part of them was counted
    layers: list[_Layer] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_layers(self) -> "Watched":
        if len({layer.layer for layer in self.layers}) < len(self.layers):
            raise ValueError("a layer is there twice")
        if datetime.fromisoformat(self.written).tzinfo is None:
            raise ValueError("the time of writing has no time zone")
        return self

    @property
    def age(self) -> float:
        """The seconds since the document was written, 0 where the clock of its machine is ahead."""
        age = datetime.now(timezone.utc) - datetime.fromisoformat(self.written)
        return max(0.0, age.total_seconds())

    @property
    def limits(self) -> dict[tuple[int, str], torch.Tensor]:
        """The magnitudes from which values have the last code, [K] float32, by layer and letter."""
        return {
            (layer.layer, letter): torch.tensor(counts.limit)
            for layer in self.layers
            for letter, counts in (("K", layer.k), ("V", layer.v))
            if counts and counts.limit
        }

    def facts(self) -> ModelFacts:
        """Return what the counts say of the model: of a cache in 16 bits its layers alone."""
        layers = {x.layer: _layer_facts(len(x.k.tokens), x.channels) if x.k else {} for x in self.layers}
        return ModelFacts(self.model, layers=layers)


@dataclass(frozen=True)
class WatchRow:
    """K or V of one layer: the head that clips most tokens."""

    layer: int
    letter: str
    tokens: int
    clipped: float  # share of the tokens
    low: float  # of its exact 95 % interval, for independent tokens
    high: float
    zero: float  # share of the values of the head that has most zeros
    saturated: float  # share of the values of the head that has most at the end of the range
    expected: float | None  # share of the calibration's own tokens

    @property
    def is_expected(self) -> bool:
        """Return whether the calibration expects about as many clipped tokens."""
        return self.expected is not None and self.low <= _TIMES * self.expected


@dataclass(frozen=True)
class WatchReport:
    """A row for K and V of each layer that was watched, and those that meet a condition."""

    watched: Watched
    rows: list[WatchRow]
    alarms: list[WatchRow]
    condition: Condition
    has_calibration: bool  # which may expect no shares: of scales per channel, or without tails
    difference: str  # of the engine's scales from the calibration's; empty: none
    refusal: str  # why the calibration beside the model was not taken; empty: it was, or none is there

    @property
    def failures(self) -> list[str]:
        """Say which layers need new scales, and why; or of which layers too few tokens were counted."""
        lines = [
            f"layer {row.layer}'s {row.letter} clips {row.clipped:.2%} of {row.tokens:,} tokens"
            if self.condition.metric == "clipped"
            else f"layer {row.layer}'s {row.letter} is 0 in {100 * row.zero:.2g}% of its values"
            for row in sorted(self.alarms, key=lambda row: -getattr(row, self.condition.metric))[:_SHOWN]
        ]
        if self.alarms:
            are_small = self.condition.metric == "clipped"
            layers = show_layers(self.alarm_layers)
            lines.append(f"{'recalibrate' if are_small else 'see whether scales are too large in'} {layers}")
        elif few := [row for row in self.rows if row.tokens < FEW]:
            layers = show_layers(sorted({row.layer for row in few}))
            lines.append(f"cannot judge {layers}: {few[0].tokens} tokens were counted, {FEW} are needed")
        return lines

    @property
    def notes(self) -> list[str]:
        """Say which layers meet the condition as was expected, and that it is not known what was."""
        lines = [
            f"layer {row.layer}'s {row.letter} clips {row.clipped:.2%}: no alarm, as {row.expected:.2%} was "
            f"expected, and up to {min(1, _TIMES * row.expected):.2%} is allowed"
            for row in sorted(self.rows, key=lambda row: -row.clipped)
            if row.expected is not None and row not in self.alarms and _is_beyond(self.condition, row)
        ][:_SHOWN]
        if self.difference:
            lines.append(f"note: {self.difference}; what was expected may not hold for the engine's")
        if self.rows and not self.has_calibration:
            refusal = f" (not taken: {self.refusal})" if self.refusal else ""
            lines.append(
                "the limit alone counts: for the share that was expected, give the calibration of this model "
                f"with --model{refusal}"
            )
        return lines

    def advice(self, source: Path | None) -> str:
        """Say which command helps where layers are alarms; `source` is None where a server was asked."""
        directory = source.parent if source and source.is_file() else source
        model, traffic = quote(self.watched.model), quote(str(directory or "DIR"))
        where = "" if source else ", where DIR is what FP8KV_WATCH names at the server"
        if self.condition.metric == "zero":
            return f"fp8kv verify {model} --against {traffic}{where}"
        return f"scales for this traffic: fp8kv repair {model} --stats {traffic} -o NEW{where}"

    @property
    def alarm_layers(self) -> list[int]:
        """The layers that meet the condition."""
        return sorted({row.layer for row in self.alarms})

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        facts = self.watched.model_dump(exclude={"layers"})
        return {**facts, "layers": [asdict(row) for row in self.rows], "alarm": self.alarm_layers}


def read_watched(directory: Path) -> Watched:
    """Read the document in `directory`; an InputError where there is none, or it is damaged."""
    file = directory if directory.name == WATCH_FILE else directory / WATCH_FILE
    if not file.is_file():
        raise InputError(
            f"'{directory}' has no {WATCH_FILE}: give the directory that FP8KV_WATCH names, after the engine "
            "has read some text, or the address of its server"
        )
    try:
        return Watched.model_validate(read_object(file))
    except ValidationError as error:
        raise InputError(f"'{file}' is not what the plugin writes ({first_problem(error)})") from None


def join_watched(documents: Sequence[Watched]) -> Watched:
    """Add up what several engines of one model counted; ends of the range that differ are not kept."""
    rows: dict[int, list[_Layer]] = {}
    for layer in chain.from_iterable(document.layers for document in documents):
        rows.setdefault(layer.layer, []).append(layer)
    facts = {
        "tokens": sum(document.tokens for document in documents),
        "since": min(document.since for document in documents),
        "written": min(document.written for document in documents),
        "layers": [_join_layers(parts) for parts in rows.values() if len(parts) == len(documents)],
    }
    return documents[0].model_copy(update=facts)


def _join_layers(parts: Sequence[_Layer]) -> _Layer:
    def join(counts: Sequence[_Counts | None]) -> _Counts | None:
        coded = [x for x in counts if x is not None]
        if len(coded) < len(counts):  # one of 16 bits
            return None
        sums = {
            name: [sum(heads) for heads in zip(*(getattr(x, name) for x in coded), strict=True)]
            for name in ("tokens", "clipped", "saturated", "zero")
        }
        limits = [x.limit for x in coded]
        return _Counts(**sums, limit=limits[0] if all(x == limits[0] for x in limits) else None)

    k, v = join([x.k for x in parts]), join([x.v for x in parts])
    edge = parts[0].edge if all(x.edge == parts[0].edge for x in parts) else None
    tokens = sum(x.tokens for x in parts)
    return parts[0].model_copy(update={"tokens": tokens, "edge": edge, "k": k, "v": v})


def report_on(
    watched: Watched, condition: Condition, expected: Expected | None, difference: str = "", refusal: str = ""
) -> WatchReport:
    """Make a row of K and of V of each FP8 layer; one that meets the condition for sure is an alarm.

    Of a layer whose share is `expected`, twice as much has to be clipped; None: without a calibration.
    """
    shares = expected or {}
    rows = [
        _row(layer, letter, counts, shares.get((layer.layer, letter)))
        for layer in watched.layers
        for letter, counts in (("K", layer.k), ("V", layer.v))
        if counts
    ]
    alarms = [row for row in rows if _is_met(condition, row)]
    return WatchReport(watched, rows, alarms, condition, expected is not None, difference, refusal)


def _row(layer: _Layer, letter: str, counts: _Counts, expected: float | None) -> WatchRow:
    heads = [*zip(counts.clipped, counts.tokens, strict=True)]
    clipped, tokens = max(heads, key=lambda head: head[0] / head[1])
    low, high = (min(1.0, end / tokens) for end in poisson_interval(clipped))
    zero, saturated = (
        max(x / n / layer.channels for x, n in zip(values, counts.tokens, strict=True))
        for values in (counts.zero, counts.saturated)
    )
    return WatchRow(layer.layer, letter, tokens, clipped / tokens, low, high, zero, saturated, expected)


def _is_met(condition: Condition, row: WatchRow) -> bool:
    return _is_beyond(condition, row) and (condition.metric == "zero" or not row.is_expected)


def _is_beyond(condition: Condition, row: WatchRow) -> bool:
    """Return whether a row meets the condition for sure, expected or not."""
    ends = (row.zero,) if condition.metric == "zero" else (row.low, row.high)
    return row.tokens >= FEW and all(condition.compare(end, condition.limit) for end in ends)


def read_expected(model: Path, watched: Watched) -> tuple[Expected, str]:
    """Return what the calibration in `model` expects, see `expected_shares`, and how its scales differ.

    Raises an InputError where it is not of the model that was watched, or cannot be read.
    """
    # of the file: it holds for the model whatever became of the scales beside it
    calibration = open_calibration(statistics_file(model))
    stats = calibration.stats
    layers = {layer.layer_idx: _layer_facts(*layer.k.amax.shape) for layer in stats.layers.values()}
    shared = {module.layer_idx for module in stats.shared.values()}
    check_same_model(
        watched.facts(),
        ModelFacts(str(model), layers=layers, shared_layers=shared),
        "give --model its own calibration",
    )
    if Path(watched.model).resolve() != model.resolve():
        _check_weights(watched.model, model, tuple(stats.layers))
    scales = derive_scales(stats, calibration.recipe())
    edges = {layer.layer: layer.edge for layer in watched.layers if layer.edge}
    different = _compare_limits(model, watched.limits, edges, scales)
    return expected_shares(stats, scales, watched.limits), different


@cache  # `watch --follow` asks again and again
def _check_weights(served: str, model: Path, modules: tuple[str, ...]) -> None:
    problem, advice = f"the engine serves '{served}'", "give --model its own calibration"
    check_served(served, directory_facts(model), modules, problem, advice)


def check_served(served: str, model: ModelFacts, modules: Iterable[str], problem: str, advice: str) -> None:
    """Refuse another model than an engine has `served`, if that is here and its weights can be read."""
    if not Path(served).is_absolute():
        return
    try:
        facts = model_facts(open_model_directory(Path(served), needs_scales=False), modules)
        for marks in filter(None, (facts.marks, model.marks)):
            marks()
    except (Fp8kvError, OSError):
        return
    if compare_weights(facts, model):
        raise InputError(f"{problem}, whose weights are others; {advice}")
    check_same_model(facts, model, f"{problem}: {advice}")


def _compare_limits(
    model: Path, limits: Mapping[tuple[int, str], torch.Tensor], edges: Mapping[int, float], scales: KVScales
) -> str:
    """Say in which layers an engine clips from other `limits`, [K] each, than with the calibration's scales.

    `edges` are where its layers clip at scale 1.0.
    """
    wrong = {}
    for layer in scales.layers.values():
        for letter, scale in (("K", layer.k), ("V", layer.v)):
            place, edge = (layer.layer_idx, letter), edges.get(layer.layer_idx, 0.0)
            # engines double scales for an FP8 type that ends at 240
            factor = 2 if edge <= FP8_MAX["e4m3fnuz"] and scales.fp8_dtype == "e4m3fn" else 1
            end = scale * edge * factor
            if place in limits and edge and scale.dim() == 1 and not _is_limit(limits[place], end):
                wrong[place] = end
    if not wrong:
        return ""
    (index, letter), end = next(iter(wrong.items()))
    limit = limits[index, letter]
    head = int((limit / end).log().abs().argmax())
    layers_of_wrong = show_layers(sorted({i for i, _ in wrong}))
    return (
        f"the engine's scales are not those that the statistics in '{model}' give in {layers_of_wrong}: "
        f"layer {index}'s {letter} clips from {limit[head]:.4g}, and not from "
        f"{end.expand(len(limit))[head]:.4g}"
    )


def _is_limit(limit: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether the limits [K] of an engine are those `expected`, [1] or [K].

    A rank may have the largest of its heads' scale for all of them.
    """
    heads = len(limit)
    sizes = [size for size in range(1, heads + 1) if heads % size == 0]
    parts = (expected.expand(heads).view(-1, size).amax(1).repeat_interleave(size) for size in sizes)
    return any(torch.allclose(limit, part, rtol=_ROUNDING, atol=0) for part in parts)


def _layer_facts(heads: int, channels: int) -> LayerFacts:
    return {"K heads": {heads}, "K channels": {heads * channels}}


def expected_shares(
    stats: KVStats, scales: KVScales, limits: Mapping[tuple[int, str], torch.Tensor] | None = None
) -> Expected:
    """Return the share of a calibration's own tokens in the last code, for K and V of each layer.

    Of several heads it is the largest share. The largest token defines the scale, and so is in the last
    code. Where V depends on the token alone, in the first layer, every token of that kind is. Statistics
    count all tokens that tie for the largest, and know the `TAIL` largest values besides.

    `limits`, [K] float32 by layer and letter, are the magnitudes from which an engine clips. Where these
    are larger than the calibration's, fewer tokens are expected; smaller ones are a fault of the engine,
    and change nothing.
    """
    table = code_table(FP8_DTYPES[scales.fp8_dtype])
    shares = {}
    for name, layer in stats.layers.items():
        for letter, part in (("K", layer.k), ("V", layer.v)):
            scale = getattr(scales.layers[name], letter.lower())
            if part.tail is None or scale.dim() > 1:
                continue
            own = scale * table.edge
            engines = (limits or {}).get((layer.layer_idx, letter), own)
            counts = (part.tail * ROUNDING >= torch.maximum(own, engines).view(-1, 1)).sum(-1)
            if part.ties is not None:
                counts = torch.where(counts == TAIL, counts.maximum(part.ties[:, 1]), counts)
            shares[layer.layer_idx, letter] = int(counts.max()) / layer.tokens
    return shares
