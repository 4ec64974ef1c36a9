"""Outcomes of scales that an engine loads, on some GPUs."""

from dataclasses import dataclass, field
from enum import Enum

from calib.engines.catalogue import Engine

Values = tuple[float, ...]


class Outcome(str, Enum):
    """The fate of a scale."""

    LOADED = "loaded"  # the layer computes with it
    DEFAULT = "default"  # the layer computes with 1.0, and nothing for it is in the files
    DROPPED = "dropped"  # the layer computes with 1.0 all the same
    NO_PLACE = "no place"  # the layer has no parameter for it
    PARTLY = "partly"  # layers differ
    CRASH = "crash"  # loading ends with an error that nobody foresaw
    REFUSED = "refused"  # loading ends with an error that says why
    UNKNOWN = "unknown"  # nobody ran or read this


class SimulationEnd(Exception):
    """The outcome of a whole directory, which ends a simulation; says why."""

    outcome: Outcome


class Refused(SimulationEnd):
    """The engine does not load the directory; says also what to do."""

    outcome = Outcome.REFUSED


class NotKnown(SimulationEnd):
    """Nobody ran the engine with such a directory."""

    outcome = Outcome.UNKNOWN


@dataclass(frozen=True)
class Place:
    """Some GPUs."""

    ranks: int = 1  # that the heads are split over: tensor parallelism
    fnuz: bool = False  # their FP8 type ends at 240, as that of MI300 (gfx942) does

    def __str__(self) -> str:
        kind = "MI300" if self.fnuz else "GPU"
        return f"one {kind}" if self.ranks == 1 else f"{self.ranks} {kind}s, tensor parallel"

    def head_slice(self, rank: int, kv_heads: int) -> slice:
        """Return which of all KV heads `rank` holds; several ranks hold one where heads are fewer."""
        count = max(1, kv_heads // self.ranks)
        start = rank * kv_heads // self.ranks
        return slice(start, start + count)


@dataclass(frozen=True)
class LayerScale:
    """The scale of K, V or Q that one attention layer computes with."""

    module: str
    letter: str
    status: Outcome  # loaded, default or unknown
    values: Values  # none where they are not known
    reason: str = ""


@dataclass
class Simulation:
    """The outcome for every scale; none where the engine refuses the directory."""

    engine: Engine
    outcomes: list[LayerScale] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)  # (tensor, why)
    refused: str | None = None
    fates: set[Outcome] = field(default_factory=set)  # where the model's class settles them
    problem: str | None = None  # what is wrong although they load
    flag: str | None = None  # what the user must add for an FP8 cache
    draft: str = ""  # the fate of scales of a layer that drafts tokens (MTP), in words

    @property
    def fate(self) -> str:
        """The fate of all scales: dropped, no place, crash; `partly` where they have several."""
        if Outcome.CRASH in self.fates:
            return Outcome.CRASH.value
        return min(self.fates).value if len(self.fates) == 1 else "partly" * bool(self.fates)

    @property
    def is_known(self) -> bool:
        """True where the engine loads the directory, and the scales that it then computes with are known."""
        return not self.refused and all(scale.status != Outcome.UNKNOWN for scale in self.outcomes)

    @property
    def is_good(self) -> bool:
        """True where the engine uses every K and V scale with the value in the file."""
        arrived = [scale.status == Outcome.LOADED for scale in self.outcomes if scale.letter != "q"]
        return not (self.refused or self.problem) and bool(arrived) and all(arrived)


def default_scale(module: str, letter: str) -> LayerScale:
    """Return the scale of a layer for which nothing is in the files."""
    return LayerScale(module, letter, Outcome.DEFAULT, (1.0,), "nothing for it in the files: 1.0")
