"""A directory checked for `fp8kv verify`: which engine loads which scale, and all problems."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from calib.engines.catalogue import Engine
from calib.engines.classes import architecture
from calib.engines.fit import Fit, Limits, compare, judge
from calib.engines.loading import ONE_GPU, simulate
from calib.engines.measured import measured_convention, read_measured
from calib.engines.outcome import Place, Simulation
from calib.errors import NoScalesError
from calib.files.cache_type import FP8_DIVISOR, FP8_MAX, FP8_SMALLEST, Convention, nvfp4_convention
from calib.files.calibration import statistics_file
from calib.files.fingerprint import read_bake
from calib.files.model_directory import open_model_directory
from calib.files.stored_scales import StoredLayer, StoredScales, read_scales
from calib.same_model.check import check_same_model, directory_facts, scales_facts


@dataclass(frozen=True)
class Verification:
    """A directory beside the rules of engines."""

    scales: StoredScales
    simulations: list[Simulation]
    fits: list[Fit]  # beside measured absmax, where that was given
    problems: list[str]
    warnings: list[str] = field(default_factory=list)  # what may be meant so
    baked: bool = False  # 1.0 is the right scale, and there are no others
    nvfp4: Convention | None = None  # of the values of an NVFP4 cache

    @property
    def architecture(self) -> str | None:
        """The model class that config.json names."""
        return architecture(self.scales.directory.config)

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
            "warnings": self.warnings,
            "engines": [
                {
                    "engine": each.engine.engine,
                    "versions": each.engine.versions,
                    "ran": each.engine.ran,
                    "classes": each.engine.classes_version,
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
    path: Path, rules: Sequence[Engine], against: Path | None = None, place: Place = ONE_GPU
) -> Verification:
    """Simulate loading `path` by each of `rules`; compare its scales with statistics `against`."""
    bake = dict[str, Any]()
    try:
        found = read_scales(path, strict=False)
    except NoScalesError:
        bake = read_bake(path)
        if bake.get("for") != "fp8":
            raise
        found = StoredScales(open_model_directory(path, weights=False), [])
    baked, problems, nvfp4 = bool(bake), [*found.problems], nvfp4_convention(found.directory)
    fits, warnings = list[Fit](), list[str]()
    if baked and place.fnuz and bake.get("fp8_dtype") != "e4m3fnuz":
        problems.append(
            "K and V were baked for an FP8 type that ends at 448, so 1.0 clips them on one that "
            "ends at 240; bake with scales of --fp8-dtype e4m3fnuz"
        )
    if against:
        _check_source(path, against, problems, bake)
        measured, layers = read_measured(against, found.layers), found.layers
        if nvfp4:
            nvfp4, wrong = measured_convention(nvfp4, layers, measured.amax)
            problems += wrong
        if baked:
            indices = sorted({layer for layer, _ in measured.amax})
            layers = [StoredLayer(layer, (1.0,), (1.0,)) for layer in indices]
        limits = _limits(found, place, nvfp4, baked=baked)
        fits = compare(layers, measured.amax, limits)
        findings = judge(layers, fits, measured, limits.largest)
        problems += [each.text for each in findings if each.is_problem]
        warnings = [each.text for each in findings if not each.is_problem]
        warnings += measured.warnings
    at_one = bake.get("latent") is True
    simulations = [simulate(found.directory, e, place, nvfp4, at_one=at_one) for e in rules]
    return Verification(found, simulations, fits, problems, warnings, baked, nvfp4)


def _check_source(path: Path, against: Path, problems: list[str], bake: dict[str, Any]) -> None:
    """Refuse statistics of another model; those of the model that was baked are a problem."""
    statistics_file(against)
    scales = scales_facts(against)
    check_same_model(scales, directory_facts(path))
    if bake and (scales.fingerprints or {}).get("checkpoint") == bake.get("source"):
        problems.append(
            f"'{against}' was measured on the model that was baked, whose K and V are others: "
            "calibrate the baked one"
        )


def _limits(found: StoredScales, place: Place, nvfp4: Convention | None, *, baked: bool) -> Limits:
    """What a value divided by its scale can be in the cache that the scales are for."""
    if nvfp4:
        # a block's scale, its absmax / (6 * value), is an E4M3 number
        return Limits(float(nvfp4.divisor or FP8_DIVISOR), 6 * FP8_SMALLEST["e4m3fn"])
    name = found.fp8_dtype
    if baked:
        name = "e4m3fnuz" if place.fnuz else "e4m3fn"
    return Limits(FP8_MAX[name], FP8_SMALLEST[name])
