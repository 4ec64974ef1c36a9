"""A directory checked for `fp8kv verify`: which engine loads which scale, and all problems."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from calib.errors import NoScalesError
from calib.scalefiles.baked import baked_for, baked_fp8_type, baked_from, bakes_latents
from calib.scalefiles.calibrations import Amax, read_amax, read_report, statistics_file
from calib.scalefiles.conventions import LARGER, Convention, compared, convention
from calib.scalefiles.file_names import CALIBRATION_FILE
from calib.scalefiles.folder import open_scales
from calib.scalefiles.fp8_type import FP8_MAX
from calib.scalefiles.identity import check_same_model, identity
from calib.scalefiles.reading import FoundLayer, FoundScales, read_scales
from calib.verify.classes import architecture
from calib.verify.result import Place, Simulation
from calib.verify.rules import Rules
from calib.verify.simulate import ONE_GPU, simulate

# rounding to bfloat16 takes 0.4 %
_CLIPS = 1.005
_NEAR = 0.02


@dataclass(frozen=True)
class Fit:
    """One layer: the share of the FP8 range that the measured absmax takes, at the worst head."""

    layer: int
    used: dict[str, float]  # k, v -> amax / (the FP8 maximum * scale); above 1 it clips

    @property
    def clipped(self) -> list[str]:
        """Which of K and V are cut off."""
        return [letter for letter, used in self.used.items() if used > _CLIPS]


@dataclass(frozen=True)
class Verification:
    """A directory beside the rules of engines."""

    scales: FoundScales
    simulations: list[Simulation]
    fits: list[Fit]  # beside measured absmax, where that was given
    problems: list[str]
    baked: bool = False  # 1.0 is the right scale, and there are no others
    nvfp4: Convention | None = None  # of the values of an NVFP4 cache

    @property
    def architecture(self) -> str | None:
        """The model class that config.json names."""
        return architecture(self.scales.directory.config or {})

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong, and at least one of the engines loads all scales, if any."""
        served = (s.is_known if self.baked else s.is_good for s in self.simulations)
        return not self.problems and any(served)

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "directory": str(self.scales.directory.path),
            "architecture": self.architecture,
            "good": self.is_good,
            "baked": self.baked,
            "nvfp4": self.nvfp4 and self.nvfp4._asdict(),
            "problems": self.problems,
            "engines": [
                each.rules.model_dump(include={"engine", "versions", "ran"})
                | {
                    "classes": each.rules.classes_version,
                    "refused": each.refused,
                    "fate": each.fate or None,
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
    """Simulate loading `path` by each of `rules`; compare its scales with statistics `against`."""
    baked = False
    try:
        found = read_scales(path)
    except NoScalesError:
        baked = baked_for(path) == "fp8"
        if not baked:
            raise
        found = FoundScales(open_scales(path), [])
    problems, fits, nvfp4 = [*found.problems], [], convention(found.directory)
    if baked and place.fnuz and baked_fp8_type(path) != "e4m3fnuz":
        problems.append(
            "K and V were baked for an FP8 type that ends at 448, so 1.0 clips them on one that "
            "ends at 240; bake with scales of --fp8-dtype e4m3fnuz"
        )
    if against:
        measured = identity(statistics_file(against).parent)
        check_same_model(against, measured, path, identity(path))
        if baked and _report_of(against).get("checkpoint") == baked_from(path):
            problems.append(
                f"'{against}' was measured on the model that was baked, whose K and V are others: "
                "calibrate the baked one"
            )
        amax, layers = read_amax(against), found.layers
        if nvfp4:
            nvfp4, wrong = compared(nvfp4, layers, amax)
            problems += wrong
        if baked:
            layers = [FoundLayer(layer, (1.0,), (1.0,)) for layer in sorted({i for i, _ in amax})]
        if nvfp4:
            fp8_max = float(nvfp4.divisor or LARGER)
        else:
            fp8_max = (240.0 if place.fnuz else 448.0) if baked else FP8_MAX[found.fp8_dtype]
        fits = _compare_with(layers, amax, fp8_max)
        problems += _fit_problems(layers, fits, amax, fp8_max)
    at_one = baked and bakes_latents(path)
    simulations = [simulate(found.directory, e, place, nvfp4, at_one=at_one) for e in rules]
    return Verification(found, simulations, fits, problems, baked, nvfp4)


def _report_of(against: Path) -> dict[str, Any]:
    """What a calibration says of itself; nothing where the statistics lie alone."""
    directory = statistics_file(against).parent
    return read_report(directory) if (directory / CALIBRATION_FILE).exists() else {}


def _compare_with(layers: Sequence[FoundLayer], amax: Amax, fp8_max: float) -> list[Fit]:
    """How each layer's scales fit what was measured; `fp8_max` is the FP8 type's largest value."""
    fits = []
    for layer in layers:
        used = {}
        for letter in "kv":
            scales, heads = getattr(layer, letter), amax.get((layer.layer, letter))
            if scales and heads and len(scales) in (1, len(heads)):
                each = scales * len(heads) if len(scales) == 1 else scales
                pairs = zip(heads, each, strict=True)
                used[letter] = max(h / (fp8_max * s) if s > 0 else float("inf") for h, s in pairs)
        fits.append(Fit(layer.layer, used))
    return fits


def _fit_problems(
    layers: Sequence[FoundLayer], fits: Sequence[Fit], amax: Amax, fp8_max: float
) -> list[str]:
    """Problems that the comparison shows, one line each."""
    problems = []
    clipped = [fit for fit in fits if fit.clipped]
    if _looks_swapped(layers, amax, fp8_max):
        problems.append("K scales fit V's measured absmax and V scales K's: they are swapped")
    elif clipped:
        worst = max(clipped, key=lambda fit: max(fit.used.values()))
        problems.append(
            f"{len(clipped)} layers clip what was measured, layer {worst.layer} the most: its "
            f"absmax is {max(worst.used.values()):.2f} times what its scale can hold"
        )
    used = [value for fit in fits for value in fit.used.values()]
    for factor, what in ((2.0, "half"), (0.5, "twice")):
        if used and all(abs(value / factor - 1) < _NEAR for value in used):
            problems.append(
                f"every scale is {what} of absmax / {fp8_max:g}, as if made for another FP8 type: "
                "files hold scales for e4m3fn (448) unless they name another"
            )
    absent = {fit.layer for fit in fits} ^ {layer for layer, _ in amax}
    if absent:
        problems.append(f"layer {min(absent)} is only in the scales, or only in the statistics")
    return problems


def _looks_swapped(layers: Sequence[FoundLayer], amax: Amax, fp8_max: float) -> bool:
    def mismatch(letter: str, other: str) -> float:
        ratios = [
            max(amax[layer.layer, other]) / (fp8_max * max(scales))
            for layer in layers
            if (scales := getattr(layer, letter))
            and (layer.layer, other) in amax
            and max(scales) > 0
        ]
        return median(max(r, 1 / r) if r > 0 else float("inf") for r in ratios) if ratios else 0.0

    straight = max(mismatch("k", "k"), mismatch("v", "v"))
    crossed = max(mismatch("k", "v"), mismatch("v", "k"))
    return straight > 2 and 0 < crossed < 1 + _NEAR
