"""What an engine's cache held, as the plugin wrote it: which layers clip, beside what was predicted."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from calib.errors import Fp8kvError, InputError, first_problem
from calib.files.names import CALIBRATION_FILE, STATS_FILE, WATCH_FILE
from calib.files.strict_json import read_object
from calib.files.text import Condition, show_layers
from calib.scales.stats_file import load_scales, load_stats
from calib.scales.summary import clipped_tokens
from calib.scales.tail import poisson_interval

METRICS = ("clipped", "zero")
FEW = 256  # tokens, of which nothing can be said


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Counts(_Part):
    """Counts of K or V, of each head."""

    tokens: list[PositiveInt] = Field(min_length=1)
    clipped: list[NonNegativeInt]  # tokens
    saturated: list[NonNegativeInt]  # values
    zero: list[NonNegativeInt]

    @model_validator(mode="after")
    def _check_heads(self) -> "_Counts":
        if len({len(counts) for counts in (self.tokens, self.clipped, self.saturated, self.zero)}) > 1:
            raise ValueError("counts are of different heads")
        return self


class _Layer(_Part):
    layer: NonNegativeInt
    channels: PositiveInt
    tokens: PositiveInt
    k: _Counts | None = None  # none: a cache in 16 bits
    v: _Counts | None = None


class Watched(_Part):
    """The document that the plugin writes."""

    fp8kv_watch: Literal[1]
    engine: str
    model: str = Field(max_length=4096)
    fingerprint: str
    since: str
    written: str
    tokens: NonNegativeInt  # of the traffic; a part of them was counted
    layers: list[_Layer] = Field(min_length=1)


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
    predicted: float | None  # share of the tokens, of K and V together, when the scales were made


@dataclass(frozen=True)
class WatchReport:
    """A row for K and V of each layer that was watched, and those that meet a condition."""

    watched: Watched
    rows: list[WatchRow]
    alarms: list[WatchRow]

    @property
    def is_judged(self) -> bool:
        """True where enough tokens of each layer were counted."""
        return all(row.tokens >= FEW for row in self.rows)

    @property
    def alarm_layers(self) -> list[int]:
        """The layers that meet the condition."""
        return sorted({row.layer for row in self.alarms})

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        facts = self.watched.model_dump(exclude={"layers"})
        return {**facts, "layers": [asdict(row) for row in self.rows], "alarm": self.alarm_layers}

    def advice(self, directory: str) -> str:
        """Say which layers need new scales, and how to make them."""
        worst = max(self.alarms, key=lambda row: row.clipped)
        return (
            f"recalibrate: {show_layers(self.alarm_layers)}: layer {worst.layer}'s {worst.letter} clips "
            f"{worst.clipped * 10_000:,.0f} in 10,000 tokens and is 0 in {worst.zero:.1%} of its values; for "
            f"this traffic: fp8kv repair {self.watched.model} --stats {directory} -o NEW"
        )


def read_watched(directory: Path) -> Watched:
    """Read the document in `directory`; an InputError where there is none, or it is damaged."""
    file = directory / WATCH_FILE
    if not file.is_file():
        raise InputError(
            f"'{directory}' has no {WATCH_FILE}: give the directory that FP8KV_WATCH names, after the engine "
            "has read some text, or the address of its server"
        )
    try:
        return Watched.model_validate(read_object(file))
    except ValidationError as error:
        raise InputError(f"'{file}' is not what the plugin writes ({first_problem(error)})") from None


def report_on(watched: Watched, condition: Condition, model: Path | None = None) -> WatchReport:
    """Make a row of K and of V of each FP8 layer; one that meets the condition for sure is an alarm.

    What was predicted is read in the `model` directory.
    """
    predicted = _predicted(model) if model else {}
    rows = [
        _row(layer, letter, counts, predicted.get(layer.layer))
        for layer in watched.layers
        for letter, counts in (("K", layer.k), ("V", layer.v))
        if counts
    ]
    return WatchReport(watched, rows, [row for row in rows if _is_met(condition, row)])


def _row(layer: _Layer, letter: str, counts: _Counts, predicted: float | None) -> WatchRow:
    heads = [*zip(counts.clipped, counts.tokens, strict=True)]
    clipped, tokens = max(heads, key=lambda head: head[0] / head[1])
    low, high = (min(1.0, end / tokens) for end in poisson_interval(clipped))
    zero = max(x / n / layer.channels for x, n in zip(counts.zero, counts.tokens, strict=True))
    return WatchRow(layer.layer, letter, tokens, clipped / tokens, low, high, zero, predicted)


def _is_met(condition: Condition, row: WatchRow) -> bool:
    if condition.metric == "zero":
        return condition.compare(row.zero, condition.limit)
    ends = (row.low, row.high)  # both: chance alone does not do
    return all(condition.compare(end, condition.limit) for end in ends)


def _predicted(model: Path) -> dict[int, float]:
    """Return the share of clipped tokens of each layer that the calibration of a local model predicts."""
    try:
        if not ((model / STATS_FILE).is_file() and (model / CALIBRATION_FILE).is_file()):
            return {}
        tokens = clipped_tokens(load_stats(model), load_scales(model))
    except (Fp8kvError, OSError):  # the model is not what is asked about
        return {}
    return tokens.by_layer if tokens else {}


def watch_rows(rows: Sequence[WatchRow], *, only: int = 0) -> list[tuple[str, ...]]:
    """Return the cells of a table, the worst rows first; the `only` worst."""
    ordered = sorted(rows, key=lambda row: (-row.clipped, row.layer, row.letter))
    return [
        (
            f"{row.layer} {row.letter}",
            f"{row.tokens:,}",
            f"{row.clipped:.2%}",
            f"{row.low:.2%} to {row.high:.2%}",
            "-" if row.predicted is None else f"{row.predicted:.2g}",
            f"{row.zero:.2%}",
        )
        for row in ordered[: only or None]
    ]
