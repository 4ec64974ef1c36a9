"""The report as types; KL is in nats per token.

`python -m calib.evaluate.report > docs/report.schema.json` documents them.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema
from torch import Tensor

from calib.caches.types import Evidence
from calib.choices import REFERENCE, AttentionMode, FP8Name, Strategy
from calib.files.strict_json import json_text

Tensors = Literal["k", "v"]
Differs = Literal["higher", "lower", "no measurable difference", "not finite"]


# null in JSON, which cannot say what is not finite
NullableFloat = Annotated[
    float,
    BeforeValidator(lambda value: nan if value is None else value),
    PlainSerializer(lambda value: value if isfinite(value) else None),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]}),
]


class ReportPart(BaseModel):
    """A part of the report."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)


class Figure(ReportPart):
    """A figure with its 95 % interval."""

    value: NullableFloat
    low: NullableFloat
    high: NullableFloat

    @property
    def is_finite(self) -> bool:
        """Return whether the value and its interval are finite numbers."""
        return all(map(isfinite, (self.value, self.low, self.high)))


class Events(ReportPart):
    """Tokens with a value beyond the largest that FP8 holds, and the interval of their share.

    The interval is exact for a Poisson count (Garwood): it takes events to be independent.
    """

    tokens: int
    events: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Share of all tokens."""
        return self.events / self.tokens


class Exceedance(Events):
    """Such tokens of one layer: with the value in any of its heads, and in each KV head."""

    by_head: dict[Tensors, list[int]]
    expected: float | None = None  # events that were predicted


class ClippedLayer(ReportPart):
    """Clipping in one layer on other text: shares of the values of each KV head, and tokens."""

    layer_idx: int
    saturated: dict[Tensors, list[float]]
    exceedance: Exceedance


class ModalityRow(ReportPart):
    """Figures of the tokens of text, or of pictures, where a text has both."""

    tokens: int
    kl: Figure
    top1: Figure


class OtherRow(ReportPart):
    """Figures of one cache on other text."""

    kl: Figure
    difference: Figure  # of the mean KL, from that on the evaluation's own text
    differs: Differs  # whether that is more than chance and the noise floor
    clipped: Events  # in any layer
    layers: list[ClippedLayer]
    not_finite: str | None = None  # why figures are null
    modalities: dict[str, ModalityRow] = Field({})  # where there are pictures


class OtherText(ReportPart):
    """Text of another kind than the evaluation's own, and what the caches make of it."""

    dataset: str
    fingerprint: str
    documents: int
    tokens: int
    ppl: NullableFloat  # of the reference
    variants: dict[str, OtherRow]


class Search(ReportPart):
    """Result of `--search`; KL in nats, mean over the tokens of `documents` samples."""

    variant: str
    budget: float
    documents: int
    kl_of_all: NullableFloat  # every layer in FP8
    kl_alone: dict[int, NullableFloat]  # by layer_idx: that layer alone in FP8
    skipped: tuple[int, ...]  # layer_idx of those left in 16 bits
    kl: NullableFloat  # with those in 16 bits


class CacheFigures(ReportPart):
    """Figures by which caches are chosen."""

    cache: str  # name of the variant
    description: str = Field(alias="what")
    kl: Figure
    bytes_per_token: int
    share: float  # of the bytes in 16 bits
    tokens_per_gb: int | None  # that fit, by the engine's allocator; None: not known
    memory: float  # for as many tokens, a share of 16 bits'; by bytes where tokens are not known


class Alternative(CacheFigures):
    """A cache that was measured and can be served, and why it was not chosen."""

    why: str


class ServedCache(CacheFigures):
    """A cache and how to serve it."""

    needs: str
    engine: str
    engine_version: str  # whose rules and kernels are known; empty: any
    gpus: tuple[str, ...]
    notes: tuple[str, ...]
    commands: tuple[str, ...]  # the last one serves


class Recommendation(ReportPart):
    """The cheapest cache within `budget_kl`, nats per token, or the best within `budget_bytes`, a share."""

    budget_kl: float | None
    budget_bytes: float | None
    engine: str | None  # None: any
    gpu: str | None
    request_tokens: int | None  # of the requests that `tokens_per_gb` counts
    chosen: ServedCache
    alternatives: list[Alternative] = Field(alias="passed")
    not_served: dict[str, str]  # variant, or type that is not simulated: why
    evidence: dict[str, Evidence]  # of every type: how its simulation is known


class RecommendedDirectory(ReportPart):
    """A directory that serves what was recommended."""

    output: str
    serve: str  # the command
    kl: Figure  # of the directory, read again
    tokens: int  # that `kl` was measured on, new to the calibration
    problems: list[str]  # why it is not what was recommended; empty: it is

    @property
    def line(self) -> str:
        """Say where it is, and what was measured of it."""
        kl = f"KL {self.kl.value:.2g} nats [{self.kl.low:.2g}, {self.kl.high:.2g}]"
        return f"written to {self.output}: {kl} on {self.tokens:,} tokens that its making did not read"


SCHEMA: Literal[1] = 1
REPORT_FILE = "report.json"


@dataclass(frozen=True)
class Suite:
    """Amount of what is measured; lengths in tokens."""

    calibration_samples: int
    documents: int
    seq_len: int
    prompts: int
    new_tokens: int
    passkey_tokens: tuple[int, ...]
    passkey_depths: tuple[float, ...]
    layer_documents: int
    long_tokens: int = 0  # of each long document, as far as the model has positions; 0: none
    long_documents: int = 4


class PositionBin(Figure):
    """Mean KL and top-1 of the positions `from` to `to` (exclusive), with intervals over samples."""

    start: int = Field(alias="from")
    to: int
    tokens: int
    top1: Figure


class LongRow(ReportPart):
    """Figures of one cache on long documents.

    A margin is the log-probability of the right word less that of the likeliest wrong one, in nats.
    """

    kl: Figure
    top1: Figure
    kl_by_position: list[PositionBin]
    margin: Figure
    margin_change: Figure  # from that with the model's own cache, question by question
    margin_moved: Figure  # mean magnitude of these changes
    retrieved: Figure  # share of the questions whose margin is above 0

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The figures in the order of a table."""
        return self.kl, self.top1, self.margin, self.margin_change, self.margin_moved, self.retrieved


class Extremes(ReportPart):
    """The smallest and the largest of thousands of scales."""

    min: float
    max: float


class LayerRow(ClippedLayer):
    """Errors that one variant makes in one layer; shares are of each KV head."""

    rel_rms_layer: Figure  # of the attention output, over all heads
    rel_rms: list[NullableFloat]  # of each query head
    underflowed: dict[Tensors, list[float]]
    range_used: dict[Tensors, list[NullableFloat]]
    scale: dict[Tensors, float | list[float] | Extremes]  # per tensor, KV head or channel


class Row(ReportPart):
    """All figures of one cache; those that were not measured are absent."""

    kl: Figure
    ppl_change: Figure
    top1: Figure
    measurable: bool  # whether `kl.low` is above the noise floor
    same_tokens: Figure | None = None
    passkey: Figure | None = None
    description: str = Field(alias="what")
    kind: Literal["reference", "control", "fp8", "given", "cache"]
    cache: str | None = None  # its type, where that is not static FP8
    is_baked: bool = False  # on weights as `fp8kv bake` writes them
    bytes_per_token: int | None = None  # in all layers, with all overhead
    strategy: Strategy | None = None
    fp8_dtype: FP8Name | None = None
    tensors: str | None = None  # those of q, k and v that are in FP8
    attention: AttentionMode = "exact"  # whose rounding it was given
    kl_p99: Figure
    kl_p999: Figure
    ppl: NullableFloat
    top1_count: int
    kl_by_position: list[PositionBin]
    long: LongRow | None = None  # on long documents
    layers: list[LayerRow] = Field([])
    clipped: Events | None = None  # tokens with a saturated value in any layer
    not_finite: str | None = None  # why figures are null

    @property
    def furthest_bins(self) -> list[PositionBin]:
        """The figures by position that reach furthest: of long documents, where these were read."""
        return self.long.kl_by_position if self.long else self.kl_by_position


class Magnitudes(ReportPart):
    """|x| of K or V of one layer: a histogram in half octaves."""

    amax: list[NullableFloat]  # of each KV head
    zeros: int
    log2_first: float  # lower edge of the first bin
    counts: list[int]


class Layer(ReportPart):
    """K and V of one layer as the reference holds them."""

    layer_idx: int
    k: Magnitudes
    v: Magnitudes
    # tokens of the calibration, and the amax of K or V by then
    growth: dict[Tensors, list[tuple[int, NullableFloat]]] | None = None

    @property
    def tensors(self) -> dict[Tensors, Magnitudes]:
        """K and V by letter."""
        return {"k": self.k, "v": self.v}


class Continuation(ReportPart):
    """Greedy text after a prompt, cut where it leaves the reference's."""

    same_tokens: int
    start: str = Field(alias="same")
    end: str = Field(alias="rest")  # empty: all of it is the reference's


class Texts(ReportPart):
    """Prompts, and what each variant that generates wrote after them."""

    prompts: list[str]
    continuations: dict[str, list[Continuation]]


class TaskFigure(ReportPart):
    """A metric of a task; None: lm-eval has no number."""

    value: float | None
    stderr: float | None


class Harness(ReportPart):
    """Name and version of what ran the tasks, and how many documents of each; None: all."""

    name: str
    version: str
    limit: int | None


class Data(ReportPart):
    """The text that was measured on."""

    source: str
    fingerprint: str
    calibration_tokens: int
    documents: int
    tokens: int
    layer_documents: int  # how many of the documents the per-layer figures are from
    new_tokens: int
    long_documents: int
    long_tokens: int  # in all of them


class Report(ReportPart):
    """An evaluation: see docs/reference/report.md."""

    version: Literal[1] = Field(alias="schema")
    model: str
    backend: str
    attention: AttentionMode  # whose rounding FP8 caches were given
    dtype: str
    data: Data
    versions: dict[str, str]
    machine: str
    created: str  # UTC, ISO 8601
    suite: Suite
    bytes_per_token: dict[Literal["fp8", "16bit"], int]
    recipe: dict[str, Any]  # as resolved, but a headroom `auto`
    noise_floor: NullableFloat
    variants: dict[str, Row] = Field(min_length=1)
    layers: list[Layer]
    texts: Texts
    verdict: str
    subject: str | None  # the variant that the verdict is about
    advised: str | None
    advice: list[str]
    search: Search | None
    recommended: Recommendation | None
    other_texts: list[OtherText]
    tasks: dict[str, dict[str, dict[str, TaskFigure]]] = Field({})  # task, variant, metric
    harness: Harness | None = None
    warnings: list[str]

    @property
    def has_own_scales(self) -> bool:
        """Return whether a cache has scales or baked weights from the text that the evaluation read."""
        return any(is_of_own_text(name, row.kind, row.is_baked) for name, row in self.variants.items())

    @property
    def judged(self) -> Row | None:
        """The figures of the subject."""
        return None if self.subject is None else self.variants.get(self.subject)

    @property
    def subjects(self) -> list[str]:
        """Variants that an unqualified condition applies to: those of `--scales`, else the verdict's."""
        scales = [name for name, row in self.variants.items() if row.kind == "given"]
        return scales or [name for name in (self.subject,) if name is not None]

    def to_json(self) -> dict[str, Any]:
        """Return the object in `report.json`, without the keys of what was not measured."""
        return self.model_dump(by_alias=True, exclude_unset=True)


def is_of_own_text(name: str, kind: str, is_baked: bool) -> bool:
    """Return whether the scales or the weights of a variant are made from the evaluation's own text."""
    return is_baked or (kind == "fp8" and name not in ("none", "random"))


_WHY = "logits are not finite there"
BROKEN = "the model itself is broken on this text, whatever its cache"


def explain_not_finite(documents: Sequence[Tensor]) -> str | None:
    """Say for how many tokens of `documents`, KL [T] each, it is not finite; None if it is everywhere."""
    lost = sum(int((~kl.isfinite()).sum()) for kl in documents)
    tokens = sum(map(len, documents))
    return f"the KL of {lost:,} of {tokens:,} tokens is not a finite number: {_WHY}" if lost else None


def list_lost_figures(
    rows: Mapping[str, Row], texts: Iterable[OtherText], search: Search | None
) -> Iterable[str]:
    """Yield a line for each cache and text whose figures are null."""
    own = rows[REFERENCE].not_finite
    if own:
        yield f"{BROKEN}: {own}"
    for name, row in rows.items():
        if row.not_finite not in (None, own):
            yield f"'{name}': {row.not_finite}"
    for text in texts:
        for name, row_of_text in text.variants.items():
            if row_of_text.not_finite and not own:
                yield f"'{name}' on {text.dataset}: {row_of_text.not_finite}"
    layers = [str(i) for i, kl in search.kl_alone.items() if not isfinite(kl)] if search else []
    if layers:
        yield f"search: layers {', '.join(layers)} alone have a KL that is not finite: {_WHY}"


if __name__ == "__main__":
    sys.stdout.write(json_text(Report.model_json_schema(), indent=2) + "\n")
