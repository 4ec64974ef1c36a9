"""What `fp8kv verify` says: which engine loads which scale, and what is wrong with them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calib.scalefiles.fp8_type import FP8_MAX, fp8_type
from calib.scalefiles.inspection import Inspection, inspect_directory
from calib.scalefiles.measured import read_amax
from calib.verify.against import Fit, compare_with, fit_problems
from calib.verify.place import Place
from calib.verify.result import Simulation
from calib.verify.rules import Rules
from calib.verify.simulate import ONE_GPU, simulate

HEADINGS = ("engine", "K scales", "V scales", "Q scales", "FP8 cache")


@dataclass(frozen=True)
class Verification:
    """A directory beside the rules of engines."""

    inspection: Inspection
    simulations: list[Simulation]
    fits: list[Fit]  # beside measured absmax, where that was given
    problems: list[str]

    @property
    def is_good(self) -> bool:
        """Nothing is wrong, and some engine of those asked for loads every scale."""
        return not self.problems and any(each.is_good for each in self.simulations)

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "directory": str(self.inspection.directory.path),
            "good": self.is_good,
            "problems": self.problems,
            "engines": [
                {
                    "engine": each.rules.engine,
                    "versions": each.rules.versions,
                    "ran": each.rules.ran,
                    "refused": each.refused,
                    "problem": each.problem,
                    "flag": each.flag,
                    "ignored": dict(each.ignored),
                    "layers": [asdict(outcome) for outcome in each.outcomes],
                }
                for each in self.simulations
            ],
            "against": [asdict(fit) for fit in self.fits],
        }


def verify_directory(
    path: Path, rules: Sequence[Rules], against: Path | None = None, place: Place = ONE_GPU
) -> Verification:
    """Simulate loading `path` by each of `rules`.

    Args:
        path: a checkpoint with scales.
        rules: of the engines.
        place: what they run on.
        against: statistics of a calibration, to compare the scales with.

    Raises:
        InputError: there are no scales, or a file is damaged.
    """
    found = inspect_directory(path)
    problems, fits = [*found.problems], []
    if against:
        amax = read_amax(against)
        fp8_max = FP8_MAX[fp8_type(found.directory)]
        fits = compare_with(found.layers, amax, fp8_max)
        problems += fit_problems(found.layers, fits, amax, fp8_max)
    return Verification(found, [simulate(found.directory, r, place) for r in rules], fits, problems)


def table_rows(found: Verification) -> list[tuple[str, ...]]:
    """A row per engine."""
    return [
        (
            f"{each.rules.engine} {each.rules.versions}",
            *(_count(each, letter) for letter in "kvq"),
            "-" if each.refused else each.flag or "by itself",
        )
        for each in found.simulations
    ]


def closing_lines(found: Verification) -> list[str]:
    """Why scales do not arrive, problems of the scales, and how sure this is."""
    lines = []
    for each in found.simulations:
        reasons = (
            [each.refused] if each.refused else list(dict.fromkeys(r for _, r in each.ignored))
        )
        reasons += list(
            dict.fromkeys(o.reason for o in each.outcomes if o.status != "default" and o.reason)
        )
        reasons += [each.problem] if each.problem else []
        lines += [f"{each.rules.engine} {each.rules.versions}: {reason}" for reason in reasons[:4]]
    rounded = {t.dtype for layer in found.inspection.layers for t in layer.tensors} & {
        "BF16",
        "F16",
    }
    lines += [f"problem: {problem}" for problem in found.problems]
    lines += [f"note: scales are stored as {dtype}, rounded" for dtype in sorted(rounded)]
    read = sorted({each.rules.engine for each in found.simulations if not each.rules.ran})
    if read:
        lines.append(f"rules of {', '.join(read)} were read in the source, not run")
    return lines


def against_rows(found: Verification) -> list[tuple[str, ...]]:
    """A row per layer, beside measured absmax."""
    return [
        (
            str(fit.layer),
            *(f"{fit.used[x]:.0%}" if x in fit.used else "-" for x in "kv"),
            " and ".join(x.upper() for x in fit.clipped) or "-",
        )
        for fit in found.fits
    ]


def _count(simulation: Simulation, letter: str) -> str:
    if simulation.refused:
        return "refused"
    outcomes = [outcome for outcome in simulation.outcomes if outcome.letter == letter]
    if any(outcome.status == "unknown" for outcome in outcomes):
        return "not known"
    loaded = sum(outcome.status == "loaded" for outcome in outcomes)
    return f"{loaded} of {len(outcomes)}" if loaded else "1.0"
