"""What becomes of the scales of a directory in one engine."""

from dataclasses import dataclass, field
from typing import Literal

from calib.verify.rules import Rules

Values = tuple[float, ...]


class Refused(Exception):
    """The engine does not load the directory; says why, and what to do."""


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
    """What becomes of every scale; where the engine refuses, of none."""

    rules: Rules
    outcomes: list[Outcome] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)  # (tensor, why)
    refused: str | None = None
    problem: str | None = None  # what is wrong although they load
    flag: str | None = None  # what the user must add for an FP8 cache

    @property
    def is_good(self) -> bool:
        """Every K and V scale arrives, and means there what it means in the file."""
        arrived = [o.status == "loaded" for o in self.outcomes if o.letter != "q"]
        return not (self.refused or self.problem) and bool(arrived) and all(arrived)


def default(module: str, letter: str) -> Outcome:
    """A layer that computes with 1.0."""
    return Outcome(module, letter, "default", (1.0,), "nothing for it in the files: 1.0")
