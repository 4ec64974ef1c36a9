"""Is an engine's traffic of this model? Its statistics have no marks of weights, by which others are told."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

from calib.errors import Fp8kvError, InputError
from calib.evaluate.served.watch_report import check_served, read_watched
from calib.files.cache_type import FP8_MAX
from calib.files.calibration import Amax
from calib.files.model_directory import open_model_directory
from calib.files.names import WATCH_FILE
from calib.files.stored_scales import StoredScales, is_usable
from calib.same_model.check import ModelFacts, model_facts
from calib.scales.stats import KVStats
from calib.scales.stats_file import Calibration, load_stats, open_calibration
from calib.transfer.estimates import settle_estimates

# random tokens beside prose change most absmax by a sixth (SmolLM2), and estimates of what a cache clipped
# are at most 4 times its range
_LARGE_FACTOR = 4.0


def check_traffic(traffic: Calibration, model: ModelFacts, stored: StoredScales) -> list[str]:
    """Refuse statistics that are surely of another model; return a warning where that may be."""
    _check_served(traffic, model)
    return _check_range(traffic, stored)


def open_measured(path: Path, directory: Path) -> tuple[Calibration, list[str]]:
    """Open a calibration, or an engine's traffic, to judge the scales in `directory` by, and notes on it.

    Traffic of another model is refused, where both models can be read; see `settle_estimates`.
    """
    calibration = open_calibration(path, needs_report=False)
    layers, model = calibration.stats.layers, None
    with suppress(Fp8kvError, OSError):
        model = model_facts(open_model_directory(directory, needs_scales=False), layers)
    if model:
        _check_served(calibration, model)
    return settle_estimates(calibration, directory)


def _check_served(traffic: Calibration, model: ModelFacts) -> None:
    """Refuse traffic of an engine that serves another model, if that is here and its weights can be read."""
    if (traffic.directory / WATCH_FILE).is_file():
        served = read_watched(traffic.directory).model
        problem = f"'{traffic.path}' is traffic of '{served}'"
        check_served(served, model, traffic.stats.layers, problem, "give that of this model")


def _check_range(traffic: Calibration, stored: StoredScales) -> list[str]:
    """Refuse traffic whose absmax is far from that of the statistics beside the scales, if there are any.

    Without these, scales that are far from it may themselves be wrong: return a warning.
    """
    path, directory, amax = traffic.path, stored.directory.path, traffic.stats.amax_by_head()
    try:
        own = _exact_amax(load_stats(directory))
    except InputError:  # without, or damaged
        values = {(layer.layer, letter): layer.values(letter) for layer in stored.layers for letter in "kv"}
        right = {
            place: scales for place, scales in values.items() if is_usable(scales) and {*scales} != {1.0}
        }
        if _median_factor(amax, right, FP8_MAX[stored.fp8_dtype]) < _LARGE_FACTOR:
            return []
        return [
            f"most scales are more than {_LARGE_FACTOR:g} times off what '{path}' measured; see that it is "
            "of this model"
        ]
    exact = _exact_amax(traffic.stats)
    if not exact.keys() & own.keys():
        problem = f"'{path}' cannot be compared with '{directory}', as a cache clipped every layer"
        return [f"{problem}; see that it is of this model"]
    if _median_factor(exact, own) < _LARGE_FACTOR:
        return []
    raise InputError(
        f"'{path}' is of another model: most K and V differ by more than {_LARGE_FACTOR:g} times from the "
        f"statistics in '{directory}'; give statistics of this model"
    )


def _exact_amax(stats: KVStats) -> Amax:
    """Return the absmax of layers that no cache has clipped: that of others is capped."""
    layers = {name: layer for name, layer in stats.layers.items() if not layer.estimated}
    shared = {name: module for name, module in stats.shared.items() if module.owner in layers}
    return replace(stats, layers=layers, shared=shared).amax_by_head()


def _median_factor(amax: Amax, amax_before: Amax, factor: float = 1.0) -> float:
    """Return the factor by which most absmax differ, up or down, from `amax_before` times `factor`."""
    pairs = [(max(amax[x]), factor * max(amax_before[x])) for x in amax.keys() & amax_before.keys()]
    return median([max(a / b, b / a) for a, b in pairs if a > 0 and b > 0] or [1.0])
