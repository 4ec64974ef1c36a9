"""Results of loading a directory in one engine, and the GPUs it runs on."""

from dataclasses import dataclass, field
from typing import Literal

from calib.engines.catalogue import Engine

Values = tuple[float, ...]


@dataclass(frozen=True)
class Place:
    """Some GPUs."""

    ranks: int = 1  # that the heads are split over: tensor parallelism
    fnuz: bool = False  # their FP8 type ends at 240, as that of MI300 (gfx942) does

    def __str__(self) -> str:
        kind = "MI300" if self.fnuz else "GPU"
        return f"one {kind}" if self.ranks == 1 else f"{self.ranks} {kind}s, tensor parallel"

    def of_rank(self, rank: int, kv_heads: int) -> slice:
        """Which of all KV heads `rank` holds; several ranks hold one where heads are fewer."""
        if kv_heads >= self.ranks:
            held = kv_heads // self.ranks
            return slice(rank * held, (rank + 1) * held)
        head = rank // (self.ranks // kv_heads)
        return slice(head, head + 1)


class Refused(Exception):
    """The engine does not load the directory; says why, and what to do."""


class NotKnown(Exception):
    """What the engine does with the directory was never run; says with what."""


@dataclass(frozen=True)
class Outcome:
    """What one attention layer computes with."""

    module: str
    letter: str
    status: Literal["loaded", "default", "unknown"]
    values: Values  # none where they are not known
    reason: str = ""


@dataclass
class Simulation:
    """The outcome for every scale; none where the engine refuses the directory."""

    engine: Engine
    outcomes: list[Outcome] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)  # (tensor, why)
    refused: str | None = None
    fates: set[str] = field(default_factory=set)  # where the model's class settles them
    problem: str | None = None  # what is wrong although they load
    flag: str | None = None  # what the user must add for an FP8 cache

    @property
    def fate(self) -> str:
        """The fate of all scales: dropped, no place, crash; `partly` where they have several."""
        if "crash" in self.fates or len(self.fates) == 1:
            return "crash" if "crash" in self.fates else min(self.fates)
        return "partly" if self.fates else ""

    @property
    def is_known(self) -> bool:
        """Whether the engine loads the directory, and what it then computes with is known."""
        return not self.refused and all(o.status != "unknown" for o in self.outcomes)

    @property
    def is_good(self) -> bool:
        """Whether the engine uses every K and V scale with the value in the file."""
        arrived = [o.status == "loaded" for o in self.outcomes if o.letter != "q"]
        return not (self.refused or self.problem) and bool(arrived) and all(arrived)


def default(module: str, letter: str) -> Outcome:
    """A layer that computes with 1.0."""
    return Outcome(module, letter, "default", (1.0,), "nothing for it in the files: 1.0")
