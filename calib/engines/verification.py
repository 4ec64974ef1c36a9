"""A directory checked for `fp8kv verify`: which engine loads which scale, and all problems."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from calib.caches.types import Shape
from calib.choices import Purpose
from calib.engines.cache_support import find_int8_flag
from calib.engines.catalogue import Backend, Engine
from calib.engines.model_classes import architecture
from calib.engines.outcome import Place, Simulation
from calib.engines.scale_fit import Fit, Limits, judge, judge_mtp, measured_amax, measured_convention
from calib.engines.simulate_loading import ONE_GPU, simulate
from calib.errors import Fp8kvError, InputError
from calib.files.cache_type import (
    FP8_DIVISOR,
    FP8_MAX,
    FP8_SMALLEST,
    Convention,
    asks_for_heads,
    nvfp4_convention,
)
from calib.files.fingerprint import read_bake
from calib.files.model_directory import ModelDirectory
from calib.files.names import CALIBRATION_FILE, STATS_FILE
from calib.files.skipped_layers import skipped_layers
from calib.files.stored_scales import StoredLayer, StoredScales, read_scales
from calib.files.text import show_layers
from calib.same_model.check import (
    check_same_model,
    directory_facts,
    open_with_weights,
    scales_facts,
    weight_warnings,
)

if TYPE_CHECKING:
    from calib.scales.stats_file import Calibration


@dataclass(frozen=True)
class Verification:
    """The scales of a directory, their problems, and what each engine does with them."""

    scales: StoredScales
    simulations: list[Simulation]
    fits: list[Fit]  # where measured absmax was given
    problems: list[str]
    warnings: list[str]  # findings that may be intended
    baked: Purpose | None  # the cache that the weights are baked for, without scales; for fp8 1.0 is right
    nvfp4: Convention | None  # of the values of an NVFP4 cache
    skipped: tuple[int, ...] = ()  # layers that stay in 16 bits, by the config

    @property
    def architecture(self) -> str | None:
        """The model class that config.json names."""
        return architecture(self.scales.directory.config)

    @property
    def is_good(self) -> bool:
        """Return whether nothing is wrong, and at least one of the engines loads all scales, if any."""
        if self.baked == "int8":
            return not self.problems and any(s.is_known and not s.problem for s in self.simulations)
        return not self.problems and any(s.is_known if self.baked else s.is_good for s in self.simulations)

    def next_step(self, against: Path | None) -> list[str]:
        """Return the flag or command to use next, in a line, if any; `against` names the statistics."""
        path = self.scales.directory.path
        own = path if (path / STATS_FILE).is_file() else None
        if any(simulation.gap for simulation in self.simulations) and not self.nvfp4:
            stats = quote(str(against or own)) if against or own else "CALIBRATION"
            return [f"for the missing scales, fp8kv repair {quote(str(path))} --stats {stats} -o NEW"]
        if own and not (against or self.problems):
            return [f"to see what the scales clip, add --against {quote(str(path))}"]
        return []

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            "directory": str(self.scales.directory.path),
            "architecture": self.architecture,
            "good": self.is_good,
            "baked": self.baked,
            "nvfp4": self.nvfp4 and self.nvfp4._asdict(),
            "layers_in_16_bits": [*self.skipped],
            "problems": self.problems,
            "warnings": self.warnings,
            "engines": [
                {
                    "engine": simulation.engine.engine,
                    "versions": simulation.engine.versions,
                    "ran": simulation.engine.ran,
                    "classes": simulation.engine.classes_version,
                    "refused": simulation.refused,
                    "fate": simulation.fate or None,
                    "problem": simulation.problem,
                    "flag": simulation.flag,
                    "draft": simulation.draft or None,
                    "ignored": dict(simulation.ignored),
                    "layers": [asdict(outcome) for outcome in simulation.outcomes],
                }
                for simulation in self.simulations
            ],
            "against": [asdict(fit) for fit in self.fits],
        }


def verify_directory(
    path: Path, engines: Sequence[Engine], against: Calibration | None = None, place: Place = ONE_GPU
) -> Verification:
    """Simulate loading `path` by each of `engines`; compare its scales with statistics `against`."""
    scales = read_scales(path, strict=False, or_baked=("fp8", "int8"))
    directory, layers = scales.directory, scales.layers
    bake, nvfp4 = {} if layers else read_bake(directory), nvfp4_convention(directory)
    purpose: Purpose | None = bake.get("for")
    needs_weights = against or (path / CALIBRATION_FILE).exists()
    checkpoint = open_with_weights(path) if needs_weights else None
    problems = [*scales.problems, *find_own_problems(path, None if bake else checkpoint)]
    warnings, fits = list[str](), list[Fit]()
    if purpose == "int8" and against:
        raise InputError(f"'{path}' is baked for int8, whose cache makes its own scales; leave --against out")
    if purpose == "fp8" and place.fnuz and bake.get("fp8_dtype") != "e4m3fnuz":
        problem = "K and V were baked for FP8 that ends at 448, so 1.0 clips them where it ends at 240"
        problems.append(f"{problem}; bake with scales of --fp8-dtype e4m3fnuz")
    if against:
        facts = directory_facts(path, checkpoint, against.stats.layers)
        check_same_model(scales_facts(against.path, report=against.report), facts)
        measured = measured_amax(against, layers)
        if nvfp4:
            nvfp4, mismatch = measured_convention(nvfp4, layers, measured.amax)
            problems += mismatch
        if bake:
            layers = [StoredLayer(i, (1.0,), (1.0,)) for i in sorted({i for i, _ in measured.amax})]
        limits = _cache_limits(scales, place, nvfp4, baked=bool(bake))
        own, drafts = judge(layers, measured, limits), judge_mtp(scales.drafts, against, measured, limits)
        fits, findings = own[0] + drafts[0], own[1] + drafts[1]
        problems += [finding.text for finding in findings if finding.is_problem]
        warnings = [finding.text for finding in findings if not finding.is_problem] + measured.warnings
    else:
        warnings = [f"{x} is 1.0 in the files, which nobody measured" for x in _unmeasured(layers)]
    at_one, skipped = bake.get("latent") is True, skipped_layers(directory)
    simulations = [simulate(directory, engine, place, nvfp4, at_one=at_one) for engine in engines]
    if purpose == "int8":
        shapes = [Shape(1, size, size) for size in _head_sizes(directory)]
        for simulation in simulations:
            simulation.flag, problem = find_int8_flag(simulation.engine, shapes)
            simulation.problem, simulation.outcomes = problem or simulation.problem, []
    return Verification(scales, simulations, fits, problems, warnings, purpose, nvfp4, skipped)


def backend_problems(report: Verification, backend: Backend) -> list[str]:
    """Say what of the model or its scales `backend` does not take, where that is known."""
    allowed = backend.head_sizes
    wrong = [size for size in _head_sizes(report.scales.directory) if size not in allowed] if allowed else []
    problems = [f"with an FP8 cache the head size must be {allowed}; this model's is {x}" for x in wrong]
    if asks_for_heads(report.scales.directory) and not backend.takes_scales_per_head:
        problems.append("on a GPU it takes no scale per head, and the engine does not start with it")
    return problems


def _head_sizes(directory: ModelDirectory) -> list[int]:
    """Return the sizes of the model's heads; none where they are not known, or it caches latents."""
    sizes = set[int]()
    from calib.models.config import caches_latents, layer_configs, read_config  # imports transformers

    with suppress(AttributeError, Fp8kvError, TypeError):  # code of its own, or no heads
        config = read_config(directory.path, directory.config, trust_remote_code=False)
        if not caches_latents(config):
            layers = layer_configs(config)
            sizes = {getattr(x, "head_dim", 0) or x.hidden_size // x.num_attention_heads for x in layers}
    return sorted(sizes)


def _unmeasured(layers: Sequence[StoredLayer]) -> list[str]:
    """Name K or V with layers where all scales are 1.0, unless all layers' are."""
    at_one = {x: [y.name for y in layers if {*y.values(x)} == {1.0}] for x in "kv"}
    letters = [x for x in "kv" if 0 < len(at_one[x]) < len(layers)]
    return [f"the scale of {x.upper()} in {show_layers(at_one[x])}" for x in letters]


def find_own_problems(path: Path, checkpoint: ModelDirectory | None) -> list[str]:
    """Compare the calibration in `path`, if any, with the scales there and the weights of `checkpoint`."""
    from calib.scales.stats_file import has_calibration, open_calibration  # imports torch

    problems = list[str]()
    if has_calibration(path):
        try:
            open_calibration(path)
        except InputError as error:
            problems.append(str(error))
        problems += weight_warnings([path], checkpoint) if checkpoint else []
    return [*dict.fromkeys(problems)]  # damaged statistics are refused twice


def _cache_limits(scales: StoredScales, place: Place, nvfp4: Convention | None, *, baked: bool) -> Limits:
    """Return the range of a value over its scale in the cache that the scales are for."""
    if nvfp4:
        # a block's scale, its absmax / (6 * value), is an E4M3 number
        return Limits(float(nvfp4.divisor or FP8_DIVISOR), 6 * FP8_SMALLEST["e4m3fn"])
    name = scales.fp8_dtype
    if baked:
        name = "e4m3fnuz" if place.fnuz else "e4m3fn"
    return Limits(FP8_MAX[name], FP8_SMALLEST[name])
