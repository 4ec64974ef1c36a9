"""What an evaluation finds beside its rows: figures, layers to leave alone, a cache to serve."""

from math import isfinite, nan
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema

Tensors = Literal["k", "v"]
Differs = Literal["higher", "lower", "no measurable difference", "not finite"]


def _from_json(value: Any) -> Any:
    return nan if value is None else value


def _to_json(value: float) -> float | None:
    return value if isfinite(value) else None


# null in JSON, which has no word for what is not finite; earlier reports have NaN there
Number = Annotated[
    float,
    BeforeValidator(_from_json),
    PlainSerializer(_to_json),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]}),
]


class Part(BaseModel):
    """A part of the report."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)


class Figure(Part):
    """A figure with its 95 % interval."""

    value: Number
    low: Number
    high: Number

    @property
    def is_finite(self) -> bool:
        """Whether it and its interval are finite numbers."""
        return all(map(isfinite, (self.value, self.low, self.high)))


class Events(Part):
    """Tokens with a value beyond the largest that FP8 holds, and the interval of their share.

    The interval is exact for a Poisson count (Garwood): it takes events to be independent.
    """

    tokens: int
    events: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Events of all tokens."""
        return self.events / self.tokens


class Exceedance(Events):
    """The same of one layer, in any of its heads; and of each KV head."""

    by_head: dict[Tensors, list[int]]
    expected: float | None = None  # events that were predicted


class ClippedLayer(Part):
    """One layer on other text: shares of the values of each KV head, and tokens."""

    layer_idx: int
    saturated: dict[Tensors, list[float]]
    exceedance: Exceedance


class OtherRow(Part):
    """One cache on other text."""

    kl: Figure
    difference: Figure  # of the mean KL, from that on the evaluation's own text
    differs: Differs  # whether that is more than chance and the noise floor
    clipped: Events  # in any layer
    layers: list[ClippedLayer]
    not_finite: str | None = None  # why figures are null


class OtherText(Part):
    """Text of another kind than the evaluation's own, and what the caches make of it."""

    dataset: str
    fingerprint: str
    documents: int
    tokens: int
    ppl: Number  # of the reference
    variants: dict[str, OtherRow]


class Search(Part):
    """What `--search` found; KL in nats, mean over the tokens of `documents` documents."""

    variant: str
    budget: float
    documents: int
    kl_of_all: Number  # every layer in FP8
    kl_alone: dict[int, Number]  # by layer_idx: that layer alone in FP8
    skipped: tuple[int, ...]  # layer_idx of those left in 16 bits
    kl: Number  # with those in 16 bits


class Passed(Part):
    """A cache that was measured and can be served, and why it was not chosen."""

    cache: str  # name of the variant
    what: str
    kl: Figure
    bytes_per_token: int
    share: float  # of the bytes in 16 bits
    why: str


class Way(Part):
    """A cache and how to serve it."""

    cache: str
    what: str
    kl: Figure
    bytes_per_token: int
    share: float
    needs: str
    engine: str
    engine_version: str  # whose rules and kernels are known; empty: any
    gpus: tuple[str, ...]
    notes: tuple[str, ...]
    commands: tuple[str, ...]  # the last one serves


class Recommendation(Part):
    """The cheapest cache within `budget_kl`, or the best within `budget_bytes`, a share."""

    budget_kl: float | None
    budget_bytes: float | None
    engine: str | None  # None: any
    gpu: str | None
    chosen: Way
    passed: list[Passed]
    not_served: dict[str, str]  # variant: why
